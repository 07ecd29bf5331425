"""A run's curves for TensorBoard, in RUN/tensorboard.

Names become tags, and what stands before the first slash is a group of charts: "loss" is "train/loss"; "time/data" and
"gpu/power" have their group already; those of a validation are "validation/held-out/loss".

The values of a step are one event. SummaryWriter.add_scalar makes one of each, with a checksum in Python and a switch
to the writing thread: 25 values then take 1.8 ms of CPU time instead of 0.6. Events wait for others for up to a second,
because waking that thread takes longer than what it does.
"""

import importlib
import json
import time
from collections.abc import Mapping
from typing import Any

from fasttrain.events import Event
from fasttrain.rundir import RunDir

_QUEUE = 1000  # events that may wait for the disk before the loop does
_FLUSH = 10  # seconds: what a kill can lose, and how far behind the charts are
_WAIT = 1.0  # seconds more


class TensorBoard:
    """The sink of TensorBoard's event files. Raises ImportError where tensorboard is not installed."""

    def __init__(self, run: RunDir, *, config_toml: str, resume_step: int) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer: Any = writer(
            log_dir=str(run.tensorboard),
            purge_step=resume_step + 1,  # hides what an earlier process did after the checkpoint
            max_queue=_QUEUE,
            flush_secs=_FLUSH,
        )
        self._writer.add_text("config", f"```toml\n{config_toml}\n```", resume_step + 1)
        self._waiting: list[tuple[Any, int, float]] = []  # summary, step, and when

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, {key if "/" in key else f"train/{key}": value for key, value in values.items()})

    def validation(self, step: int, name: str, values: Mapping[str, float]) -> None:
        self._add(step, {f"validation/{name}/{key}": value for key, value in values.items()})

    def event(self, event: Event) -> None:
        """A mark among the curves, at its step, and its text."""
        documents = {"documents": list(event.documents)} if event.documents else {}
        details = {"action": event.action or "none", **event.evidence, **documents}
        lines = "".join(f"\n- {name}: {json.dumps(detail)}" for name, detail in details.items())
        tag = f"events/{event.kind}"
        self._add(event.step, {tag: 1.0})
        self._hand_over()
        self._writer.add_text(tag, f"{event.text}\n{lines}", event.step)
        self._writer.flush()

    def _add(self, step: int, tags: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._waiting.append((self._summary(value=values), step, time.time()))
        if not 0 <= time.time() - self._waiting[0][2] < _WAIT:
            self._hand_over()

    def _hand_over(self) -> None:
        while self._waiting:
            self._writer.file_writer.add_summary(*self._waiting.pop(0))

    def close(self, exit_code: int) -> None:
        self._hand_over()
        self._writer.close()
