"""The model of a run, whole, on one device, to be used and not trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fasttrain.checkpoint.committed import Checkpoint, find
from fasttrain.checkpoint.resume import check_metadata
from fasttrain.checkpoint.state import restore, saved_tensors
from fasttrain.config import Config
from fasttrain.config_toml import from_toml
from fasttrain.data.datasets import TrainingData, training_data
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
        names = [name for name, digest in self.data.digests.items() if before.get(name) != digest]
        changed = [str(self.data.datasets[name].path) for name in names]
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
    check_metadata(checkpoint)
    settings = from_toml(checkpoint.metadata["config"])
    used = settings.data
    if rundir and rundir.segments.exists():  # paths of the settings were relative to where the run was started
        used = segment_at(rundir.path, max(checkpoint.step - 1, 0)).data
    if data is not None:
        used = replace(used, path=data, mixture={})
    settings = replace(settings, data=replace(used, tokenizer=tokenizer or used.tokenizer))
    opened = training_data(settings.data)
    rows = saved_tensors(checkpoint)["model.embedding.weight"].size[0]
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
    model, run = model.requires_grad_(False), rundir.path if rundir else None
    return TrainedModel(checkpoint=checkpoint, settings=settings, model=model, data=opened, run=run)
