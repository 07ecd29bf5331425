"""The model of a run, whole, on one device, to be used and not trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fasttrain.checkpoint import Checkpoint, find, restore
from fasttrain.checkpoint.state import saved_tensors
from fasttrain.config import Config
from fasttrain.config_toml import from_toml
from fasttrain.data import TrainingData, training_data
from fasttrain.data.segments import segment_at
from fasttrain.model import Decoder
from fasttrain.rundir import RunDir

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with the weights of a checkpoint, and what they were trained with."""

    checkpoint: Checkpoint
    settings: Config
    model: Decoder
    data: TrainingData
    run: Path | None  # its directory; None: the checkpoint lies elsewhere

    @property
    def separator(self) -> int | None:
        """The token that begins a document."""
        return self.data.first.separator

    def tokenizer(self) -> Tokenizer:
        found = self.data.tokenizer()
        if found is None:
            raise ValueError(
                f"{self.data.first.path} comes without a tokenizer, and the run has none (data.tokenizer); name one: "
                "--tokenizer FILE"
            )
        return found

    def changed_data(self) -> str:
        """Say what differs from the data that the run had; empty: nothing."""
        before = self.checkpoint.metadata["datasets"]
        changed = [
            str(self.data.datasets[name].path)
            for name, digest in self.data.digests.items()
            if before.get(name) != digest
        ]
        return f"not what the run was trained on: {', '.join(changed)}" if changed else ""


def load_model(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    data: Path | None = None,  # in place of the run's own
    tokenizer: Path | None = None,  # of data that comes without one
) -> TrainedModel:
    """Load what RUN, RUN@STEP or a checkpoint's directory means. Files are compared with their checksums."""
    checkpoint = find(name)
    rundir = RunDir.of_checkpoint(checkpoint.path)
    run = rundir.path if rundir else None
    settings = _with_data(from_toml(checkpoint.metadata["config"]), checkpoint, run, data, tokenizer)
    opened = training_data(settings.data)
    rows = saved_tensors(checkpoint.path)["model.embedding.weight"].size[0]
    if opened.first.vocab > rows:
        raise ValueError(
            f"{opened.first.path} has a vocabulary of {opened.first.vocab} tokens, and the model {rows}: it was "
            "trained with another tokenizer; name the data of the run: --data"
        )
    try:
        checkpoint.verify()
    except ValueError as error:
        raise ValueError(str(error).replace("resume from an earlier one", "name an earlier one, RUN@STEP")) from None
    with torch.device("meta"):
        model = Decoder(settings.model, vocab=rows, sequence=settings.data.sequence)
    model = model.to(dtype).to_empty(device=device).eval()  # to_empty makes the rotary table anew, in float32
    restore(checkpoint, model)
    return TrainedModel(
        checkpoint=checkpoint, settings=settings, model=model.requires_grad_(False), data=opened, run=run
    )


def _with_data(
    settings: Config, checkpoint: Checkpoint, run: Path | None, data: Path | None, tokenizer: Path | None
) -> Config:
    """With the paths that the run has noted: those of its settings were relative to where it was started."""
    found = settings.data
    if run is not None and RunDir(run).segments.exists():
        found = segment_at(run, max(checkpoint.step - 1, 0)).data
    if data is not None:
        found = replace(found, path=data, mixture={})
    return replace(settings, data=replace(found, tokenizer=tokenizer or found.tokenizer))
