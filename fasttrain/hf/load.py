"""Loads the weights of a Hugging Face checkpoint into a model that is spread over its ranks.

Each rank reads the rows of its own shards, a few at a time, and no others. All names, shapes and types are compared
before the first weight is read.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fasttrain.data.dataset import read_tokenizer
from fasttrain.data.datasets import TrainingData
from fasttrain.hf.names import INDEX, SINGLE, parts
from fasttrain.model import Decoder
from fasttrain.schema import parse

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
READABLE = ("F32", "BF16", "F16")
_DERIVED = "rotary_emb.inv_freq"  # older Llamas store it; rope_theta says the same
_READ_BYTES = 64 * 2**20  # of a tensor in memory
_MAX_NAMES = 3  # in an error


@torch.no_grad()
def load_pretrained(model: Decoder, directory: Path) -> None:
    """Give a model the weights of a checkpoint. All ranks call it."""
    with _Tensors(directory) as tensors:
        wanted = list(_rows_wanted(model))
        tensors.check({tensor.name: tensor.shape for tensor in wanted})
        for tensor in wanted:
            for rows, values in tensors.read(tensor.name, tensor.wanted):
                tensor.local[rows.start : rows.stop].copy_(values)
        if model.config.tied_head and HEAD in tensors.files:
            _check_tied(tensors, next(tensor for tensor in wanted if tensor.name == EMBEDDING))


class _TensorRows(NamedTuple):
    """A tensor of the checkpoint, and what a rank wants of it."""

    name: str
    shape: list[int]
    wanted: range  # rows
    local: Tensor  # where they go


def _rows_wanted(model: Decoder) -> Iterator[_TensorRows]:
    parameters = dict(model.named_parameters())
    for ours, theirs in parts(model.config, {name: len(parameter) for name, parameter in parameters.items()}).items():
        local, first = _shard(parameters[ours])
        start = 0  # of a packed matrix, the row where this one begins
        for name, rows in theirs.items():
            begin = max(first, start)
            end = max(begin, min(first + len(local), start + rows))
            wanted = range(begin - start, end - start)
            shape = [rows, *parameters[ours].shape[1:]]
            yield _TensorRows(name, shape, wanted, local[begin - first : end - first])
            start += rows


def _shard(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's shard of a parameter, and its first row in the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return parameter, 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    assert not any(offset[1:]), f"{parameter.placements} shard more than rows"
    return parameter.to_local(), offset[0]


class _Tensors(ExitStack):
    """The safetensors files of a checkpoint, mapped; use as a context."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._open: dict[Path, Any] = {}
        self.files = _files(directory)  # by name of a tensor

    def check(self, shapes: Mapping[str, list[int]]) -> None:
        """Raise unless the checkpoint has these tensors, of these shapes, and no others."""
        if HEAD in self.files:  # of a tied head too: _check_tied
            shapes = {HEAD: shapes[EMBEDDING], **shapes}
        missing = [name for name in shapes if name not in self.files]
        unexpected = [name for name in self.files if name not in shapes and not name.endswith(_DERIVED)]
        faults = []
        for what, names in (("lacks", missing), ("also has", unexpected)):
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            faults += [f"{what} {', '.join(names[:_MAX_NAMES])}{more}"] if names else []
        if faults:
            raise ValueError(
                f"from_hf: {self._directory} {' and '.join(faults)}: not the tensors of the model in its config.json"
            )
        for name, shape in shapes.items():
            found, dtype = self._slice(name).get_shape(), self._slice(name).get_dtype()
            if found != shape:
                raise ValueError(f"from_hf: {name} in {self.files[name]} is {found}, and its config.json says {shape}")
            if dtype not in READABLE:
                only = ", ".join(READABLE)
                raise ValueError(f"from_hf: {name} in {self.files[name]} is {dtype}; only {only} are read")

    def read(self, name: str, rows: range) -> Iterator[tuple[range, Tensor]]:
        """Some rows of a tensor, a few at a time; where they are among the rows that are asked for."""
        tensor = self._slice(name)
        shape = tensor.get_shape()
        step = max(_READ_BYTES // (4 * (shape[1] if len(shape) > 1 else 1)), 1)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            yield range(first - rows.start, last - rows.start), tensor[first:last]

    def _slice(self, name: str) -> Any:
        path = self.files[name]
        try:
            if path not in self._open:
                self._open[path] = self.enter_context(safe_open(path, framework="pt"))
            return self._open[path].get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"from_hf: {path} is corrupt, or copied in part ({error}); copy it again") from None


def _files(directory: Path) -> dict[str, Path]:
    index, single = directory / INDEX, directory / SINGLE
    if not index.exists() and not single.exists():
        if any(directory.glob("*.bin")):
            raise ValueError(
                f"from_hf: {directory} has its weights as pickles (.bin), which can run any program and are not read; "
                "write them as safetensors first: "
                f"AutoModelForCausalLM.from_pretrained({str(directory)!r}).save_pretrained(DIR)"
            )
        raise FileNotFoundError(f"from_hf: {directory} has neither {SINGLE} nor {INDEX}; download the weights too")
    try:
        if index.exists():
            places = parse(index.read_text("utf-8"))["weight_map"]
            files = {name: directory / file for name, file in places.items()}
        else:
            with safe_open(single, framework="pt") as file:
                files = dict.fromkeys(file.keys(), single)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        path = index if index.exists() else single
        raise ValueError(f"from_hf: {path} is corrupt, or copied in part ({error!r}); copy it again") from None
    for path in sorted(set(files.values())):
        if not path.exists():
            raise FileNotFoundError(f"from_hf: {path} is missing, which {INDEX} names; download it too")
    return files


def _check_tied(tensors: _Tensors, embedding: _TensorRows) -> None:
    """Some checkpoints with a tied head store it all the same. It has to be what it is tied to."""
    for rows, values in tensors.read(HEAD, embedding.wanted):
        if not torch.equal(values.to(embedding.local), embedding.local[rows.start : rows.stop]):
            raise ValueError(
                f"from_hf: config.json says tie_word_embeddings, but {HEAD} in {tensors.files[HEAD]} is not "
                f"{EMBEDDING}; set tie_word_embeddings to false there, if the head is its own"
            )


def tokenizer_warning(directory: Path, data: TrainingData) -> str:
    """Say what differs between the tokenizers of data and checkpoint; empty: nothing. Other tokens are an error."""
    path, ours = directory / "tokenizer.json", data.tokenizer()
    if ours is None or not path.exists():
        where = "the data" if ours is None else str(directory)
        return f"{where} has no tokenizer.json: nobody knows whether token ids of data and weights mean the same"
    theirs = read_tokenizer(path, "from_hf")
    tokens, expected = ({number: token for token, number in one.get_vocab().items()} for one in (ours, theirs))
    if others := [number for number in sorted(tokens) if expected.get(number, tokens[number]) != tokens[number]]:
        first = others[0]
        raise ValueError(
            f"from_hf: token {first} is {expected[first]!r} for the weights in {directory} and {tokens[first]!r} in "
            f"the data ({data.first.path}), and {len(others):,} tokens differ in all; prepare the data with "
            f"--tokenizer {directory}"
        )
    one, other = json.loads(ours.to_str()), json.loads(theirs.to_str())
    differing = [part for part in ("normalizer", "pre_tokenizer") if one[part] != other[part]]
    if one["model"].get("merges") != other["model"].get("merges"):
        differing.append("merges")
    if differing:
        return f"the tokenizers of the data and of {directory} split text in different ways ({', '.join(differing)})"
    return ""
