"""How two checkpoints differ: tensor by tensor and bit by bit, whatever numbers of ranks wrote them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.checkpoint.state import load, saved_tensors
from fasttrain.grouping import grouped

_AT_ONCE = 256 * 2**20  # bytes of each checkpoint in memory; a larger tensor is read alone
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that differs, at the element that differs most."""

    tensor: str
    index: tuple[int, ...]
    values: tuple[float | str, float | str]  # "present" and "absent", if only one checkpoint has the tensor
    elements: int  # that differ
    relative: float  # the greatest difference over the greatest value

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        one, other = (f"{value:.9g}" if isinstance(value, float) else value for value in self.values)  # fp32 is exact
        return f"{self.tensor}{place} is {one} and {other}"


def names(checkpoint: Checkpoint) -> list[str]:
    """Of the tensors that it holds."""
    return list(saved_tensors(checkpoint))


def differences(one: Checkpoint, other: Checkpoint) -> list[Difference]:
    """What is not equal bit by bit, the greatest difference first; loss scales count as tensors."""
    found = [*_of_tensors(one, other), *_of_scales(one.scaler, other.scaler)]
    return sorted(found, key=lambda difference: -difference.relative)


def _of_tensors(one: Checkpoint, other: Checkpoint) -> Iterator[Difference]:
    ones, others = saved_tensors(one), saved_tensors(other)
    for name in ones.keys() ^ others.keys():
        values = ("present", "absent") if name in ones else ("absent", "present")
        yield Difference(tensor=name, index=(), values=values, elements=0, relative=math.inf)
    common = {name: tensor for name, tensor in ones.items() if name in others}
    for name, tensor in common.items():
        if (tensor.size, tensor.properties.dtype) != (others[name].size, others[name].properties.dtype):
            raise ValueError(f"checkpoint: {name} has other shapes in {one.path} and {other.path}: of other models")
    # Together: a call for each tensor takes much longer than reading it
    for group in grouped(common, lambda n: math.prod(common[n].size) * common[n].properties.dtype.itemsize, _AT_ONCE):
        a, b = ({n: torch.empty(common[n].size, dtype=common[n].properties.dtype) for n in group} for _ in range(2))
        load(one, a, None)
        load(other, b, None)
        yield from filter(None, (_difference(name, a[name], b[name]) for name in group))


def _of_scales(one: dict[str, float], other: dict[str, float]) -> Iterator[Difference]:
    for name in one.keys() | other.keys():
        values = one.get(name, "absent"), other.get(name, "absent")
        if values[0] != values[1]:
            yield Difference(tensor=f"scaler.{name}", index=(), values=values, elements=1, relative=math.inf)


def _difference(name: str, one: Tensor, other: Tensor) -> Difference | None:
    bits = _BITS[one.element_size()]  # equal numbers are not enough: 0 is -0, and nan is not nan
    differs = one.flatten().view(bits) != other.flatten().view(bits)
    if not differs.any():
        return None
    a, b = one.flatten().double(), other.flatten().double()
    gap = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    place = int(gap.where(differs, -1.0).argmax())
    greatest = float(torch.maximum(a.abs().max(), b.abs().max()))
    relative = float(gap[place]) / greatest if math.isfinite(greatest) and greatest > 0 else math.inf
    index: tuple[Any, ...] = np.unravel_index(place, tuple(one.shape))
    return Difference(
        tensor=name,
        index=tuple(map(int, index)),
        values=(a[place].item(), b[place].item()),
        elements=int(differs.sum()),
        relative=relative,
    )
