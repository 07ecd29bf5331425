"""Weights from a checkpoint's files to safetensors, without ever holding the model.

    a few tensors of the checkpoint  ->  split and rounded  ->  until a file is full  ->  written, forgotten

In memory are one file of the result, and what is read at once for it. Averages of the optimizer are not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from fasttrain import config
from fasttrain.checkpoint import Checkpoint
from fasttrain.checkpoint.state import load, saved_tensors
from fasttrain.hf.names import parts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INDEX = "model.safetensors.index.json"
_AT_ONCE = 256 * 2**20  # bytes to read in one call; a larger tensor is read alone


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What is to be written: tensors by their names in Transformers."""

    checkpoint: Checkpoint
    packed: dict[str, dict[str, int]]  # our tensors, of which they are rows
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def bytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    def files(self, most: int) -> dict[str, list[str]]:
        """Names of files, at most so many bytes each unless one tensor has more, and the tensors in them."""
        groups = list(_groups(self.shapes, lambda name: math.prod(self.shapes[name]) * self.dtype.itemsize, most))
        if len(groups) == 1:
            return {"model.safetensors": groups[0]}
        return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}

    def write(self, directory: Path, most: int, report: Callable[[int], None]) -> None:
        """The files, and the index if they are several; report() is told of bytes written."""
        files = self.files(most)
        tensors = self._read(min(most // 4, _AT_ONCE))
        for file, names in files.items():
            state = dict(next(tensors) for _ in names)
            assert list(state) == names
            save_file(state, directory / file, metadata={"format": "pt"})
            report((directory / file).stat().st_size)
            del state  # before the next ones are read
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            totals = {"total_parameters": self.parameters, "total_size": self.bytes}
            index = {"metadata": totals, "weight_map": places}
            (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _read(self, most: int) -> Iterator[tuple[str, Tensor]]:
        """All tensors in order; of the checkpoint, so many bytes at a time."""
        reader = _Reader(self.checkpoint.path)
        saved: Any = reader.read_metadata().state_dict_metadata
        names = {f"model.{ours}": rows for ours, rows in self.packed.items()}
        sizes = {name: math.prod(saved[name].size) * saved[name].properties.dtype.itemsize for name in names}
        for group in _groups(names, sizes.__getitem__, most):
            state = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in group}
            load(self.checkpoint, state, None, reader)
            for name in group:
                rows = names[name]
                for theirs, part in zip(rows, state.pop(name).split(list(rows.values())), strict=True):
                    yield theirs, part.to(self.dtype)


def weights(checkpoint: Checkpoint, model: config.ModelConfig, dtype: torch.dtype) -> Weights:
    """Those of a checkpoint; reads its metadata only."""
    saved = {
        name.removeprefix("model."): tuple(tensor.size)
        for name, tensor in saved_tensors(checkpoint.path).items()
        if name.startswith("model.")
    }
    packed = parts(model, {name: size[0] for name, size in saved.items()})
    assert packed.keys() == saved.keys(), f"{checkpoint.path} has other tensors than its model"
    shapes = {theirs: (n, *saved[ours][1:]) for ours, rows in packed.items() for theirs, n in rows.items()}
    return Weights(checkpoint=checkpoint, packed=packed, shapes=shapes, dtype=dtype)


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once: those that many ranks have left take longer than a few tensors."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **options)
        return self._metadata


def _groups(names: Iterable[str], size: Callable[[str], int], most: int) -> Iterator[list[str]]:
    """Names in order, as many together as fit."""
    group: list[str] = []
    held = 0
    for name in names:
        if group and held + size(name) > most:
            yield group
            group, held = [], 0
        group.append(name)
        held += size(name)
    if group:
        yield group
