"""What there is to export, and what its run says of it: settings, progress, data, tokenizer, validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fasttrain.checkpoint import Checkpoint
from fasttrain.checkpoint.state import saved_tensors
from fasttrain.config import Config, from_toml
from fasttrain.data import AnyDataset, TrainingData
from fasttrain.data.foreign.dataset import SEPARATORS
from fasttrain.data.history import NAME as BATCHES
from fasttrain.data.history import stretch_at
from fasttrain.metrics import read_incidents, read_validations

WITHOUT = "none"  # as --tokenizer


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint, and its run as far as it can be read."""

    checkpoint: Checkpoint
    settings: Config
    vocab: int  # rows of the embedding
    data: TrainingData | None  # None: not here
    tokenizer: Path | None  # tokenizer.json
    separator: int | None
    separator_text: str | None
    validations: list[dict[str, Any]]  # at this step
    hardware: str

    @property
    def run(self) -> Path:
        return self.checkpoint.path.parent.parent


def describe(checkpoint: Checkpoint, tokenizer: str | None = None) -> Source:
    """All but the weights. tokenizer: in place of the data's, a tokenizer.json or WITHOUT."""
    run = checkpoint.path.parent.parent
    vocab = saved_tensors(checkpoint.path)["model.embedding.weight"].size[0]
    data, trouble = _data(run, checkpoint.step)
    if data is None and tokenizer is None:
        raise ValueError(
            f"export: the tokenizer is with the data of the run: {trouble}. Or name it: --tokenizer tokenizer.json, or "
            f"--tokenizer {WITHOUT} to export without one"
        )
    path = _tokenizer_path(data, tokenizer)
    separator, text = _separator(path, data, vocab)
    starts = [event for event in read_incidents(run) if event["kind"] in ("start", "resume")]
    return Source(
        checkpoint=checkpoint,
        settings=from_toml(checkpoint.facts["config"]),
        vocab=vocab,
        data=data,
        tokenizer=path,
        separator=separator,
        separator_text=text,
        validations=[line for line in read_validations(run) if line["step"] == checkpoint.step],
        hardware=starts[-1]["evidence"].get("hardware", "") if starts else "",
    )


def _data(run: Path, step: int) -> tuple[TrainingData | None, str]:
    """What the run trained on, or why nobody knows."""
    if not (run / BATCHES).exists():
        return None, f"{run} has no {BATCHES} to say where that is"
    try:
        return stretch_at(run, max(step - 1, 0)).open(), ""
    except (ValueError, OSError) as error:
        return None, str(error)


def _tokenizer_path(data: TrainingData | None, named: str | None) -> Path | None:
    if named is not None:
        return None if named == WITHOUT else Path(named)
    assert data is not None
    data.tokenizer()  # compares it with its checksum
    datasets: list[AnyDataset] = list(data.datasets.values())
    return next((dataset.tokenizer_path for dataset in datasets if dataset.tokenizer_path), None)


def _separator(path: Path | None, data: TrainingData | None, vocab: int) -> tuple[int | None, str | None]:
    """The token between documents, and its text: as the data has it, or by a usual name."""
    separator = data.first.separator if data else None
    if path is None:
        return separator, None
    if not path.exists():
        raise FileNotFoundError(f"export: there is no tokenizer {path}; name a tokenizer.json, or {WITHOUT}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class of its own for it
        raise ValueError(f"export: {path} is no tokenizer.json of Hugging Face tokenizers ({error})") from None
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab:
        raise ValueError(
            f"export: {path} has tokens up to {largest}, and the embedding {vocab} rows: it is the tokenizer of "
            "another model"
        )
    if data is None:
        numbers = (tokenizer.token_to_id(name) for name in SEPARATORS)
        separator = next((number for number in numbers if number is not None), None)
    return separator, None if separator is None else tokenizer.id_to_token(separator)
