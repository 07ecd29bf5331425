"""Global memory as a launch sees it: the tensors that it was given, every access checked and counted.

Every pointer in the interpreter knows which argument it was derived from. An address is checked against that argument,
not against all memory: an overrun from one tensor into its neighbour is an error too. The bounds are those of the view
that was passed, so that a kernel which leaves the columns of its part of a packed projection is caught as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttrain_kernels.testing.interpreter.launches import Launch, OutOfBounds, Traffic, WriteRace

_LARGEST_GAP_MAP = 1 << 24  # elements; of views with larger strides only the ends are checked


class Argument:
    """A tensor that a launch was given: the memory from its first to its last element, and what happened there."""

    def __init__(self, name: str, tensor: Tensor, writers: dict[tuple[int, int], np.ndarray]) -> None:
        self.name = name
        self.traffic = Traffic()
        self.itemsize = tensor.element_size()
        self.low = tensor.data_ptr()
        self.size = _span(tensor)
        self._tensor = tensor
        self._bytes = _bytes_of(tensor, self.size * self.itemsize)
        self._elements: dict[int, np.ndarray] = {}
        self._inside = _gap_map(tensor, self.size)
        self._read: np.ndarray | None = None
        self._written: np.ndarray | None = None
        self._writers = writers

    @property
    def high(self) -> int:
        return self.low + self.size * self.itemsize

    def elements(self, itemsize: int) -> np.ndarray:
        """The memory as unsigned integers of a width."""
        if itemsize not in self._elements:
            whole = self._bytes.size // itemsize * itemsize
            self._elements[itemsize] = self._bytes[:whole].view(f"uint{8 * itemsize}")
        return self._elements[itemsize]

    def index(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Addresses as indices of elements(itemsize), or OutOfBounds with the reason."""
        offsets = addresses - self.low
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (itemsize - 1):
            raise OutOfBounds(f"addresses are not multiples of {itemsize} bytes from the start of {self.name}")
        index = offsets >> (itemsize.bit_length() - 1)
        size = self.elements(itemsize).size
        if index.min() < 0 or index.max() >= size:
            outside = index[(index < 0) | (index >= size)]
            raise OutOfBounds(f"{outside.size} lane(s); first is {self.name}[{outside[0]}] of {size} elements")
        if self._inside is not None:
            own = self._own(index, itemsize)
            inside = self._inside[own]
            if not inside.all():
                outside = own[~inside]
                raise OutOfBounds(
                    f"{outside.size} lane(s); first is {self.name}[{outside[0]}], in a gap of the view of shape "
                    f"{tuple(self._tensor.shape)} with strides {self._tensor.stride()}"
                )
        return index

    def mark_read(self, index: np.ndarray, itemsize: int) -> None:
        if self._read is None:
            self._read = np.zeros(self.size, bool)
        self._read[self._own(index, itemsize)] = True

    def mark_written(self, index: np.ndarray, itemsize: int) -> None:
        if self._written is None:
            self._written = np.zeros(self.size, bool)
        self._written[self._own(index, itemsize)] = True

    def claim(self, index: np.ndarray, itemsize: int, program: int) -> tuple[int, int] | None:
        """Enter a program (from 1) as the writer; (element, other program) where another one has written before."""
        storage = self._tensor.untyped_storage()
        key = (storage.data_ptr(), self.itemsize)  # shared by all views of a storage
        if key not in self._writers:
            self._writers[key] = np.zeros(storage.nbytes() // self.itemsize + 1, np.int32)
        writers = self._writers[key]
        shift = (self.low - storage.data_ptr()) // self.itemsize
        places = self._own(index, itemsize) + shift
        earlier = writers[places]
        if earlier.any():
            other = (earlier != 0) & (earlier != program)
            if other.any():
                where = other.argmax()
                return int(places.flat[where]) - shift, int(earlier.flat[where])
        writers[places] = program
        return None

    def close(self) -> None:
        """Count the distinct bytes."""
        marks = [marks for marks in (self._read, self._written) if marks is not None]
        self.traffic.unique = self.itemsize * sum(int(np.count_nonzero(touched)) for touched in marks)

    def _own(self, index: np.ndarray, itemsize: int) -> np.ndarray:
        """Indices of an access as indices of the tensor's own elements; they differ for a pointer that was cast."""
        if itemsize == self.itemsize:
            return index
        if itemsize < self.itemsize:
            return index // (self.itemsize // itemsize)
        ratio = itemsize // self.itemsize
        return (index[..., None] * ratio + np.arange(ratio)).reshape(-1)


class _Part(NamedTuple):
    """The active lanes of an access that fall into one argument."""

    argument: Argument
    places: np.ndarray  # in argument.elements
    lanes: np.ndarray | None  # a mask over the shape of the access; None for all


class GlobalMemory:
    """Executes the loads and stores of a launch."""

    def __init__(self, launch: Launch, tensors: Iterable[tuple[str, Tensor]], *, locks: bool = False) -> None:
        self.launch = launch
        self.locks = locks
        self.program = (0, 0, 0)
        writers: dict[tuple[int, int], np.ndarray] = {}
        self.arguments = [Argument(name, tensor, writers) for name, tensor in tensors]
        launch.arguments = {argument.name: argument.traffic for argument in self.arguments}

    def load(
        self,
        addresses: np.ndarray,
        mask: np.ndarray | None,
        fill: np.ndarray,  # of the lanes that are masked: unsigned integers as wide as an element
        origin: int | None,  # the argument that the pointers come from
    ) -> np.ndarray:
        itemsize = fill.dtype.itemsize
        parts = self._locate("load", addresses, mask, itemsize, origin)
        for argument, places, _ in parts:
            argument.traffic.loaded += places.size * itemsize
            argument.mark_read(places, itemsize)
        if len(parts) == 1 and parts[0].lanes is None:
            return parts[0].argument.elements(itemsize)[parts[0].places]
        values = np.empty(addresses.shape, fill.dtype)
        values[...] = fill
        for argument, places, lanes in parts:
            values[lanes] = argument.elements(itemsize)[places]
        return values

    def store(self, addresses: np.ndarray, mask: np.ndarray | None, values: np.ndarray, origin: int | None) -> None:
        itemsize = values.dtype.itemsize
        for argument, places, lanes in self._locate("store", addresses, mask, itemsize, origin):
            argument.traffic.stored += places.size * itemsize
            argument.mark_written(places, itemsize)
            clash = None if self.locks else argument.claim(places, itemsize, self._number())
            if clash:
                element, other = clash
                raise WriteRace(
                    f"{self.launch.kernel}: programs {self._coordinates(other)} and {self.program} both store to "
                    f"{argument.name}[{element}]"
                )
            argument.elements(itemsize)[places] = values if lanes is None else values[lanes]

    def count_atomic(self, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int, origin: int | None) -> None:
        """Check and count an atomic, which the builder executes."""
        for argument, places, _ in self._locate("atomic", addresses, mask, itemsize, origin):
            argument.traffic.atomic += places.size * itemsize
            argument.mark_read(places, itemsize)
            argument.mark_written(places, itemsize)

    def close(self) -> None:
        for argument in self.arguments:
            argument.close()

    def _locate(
        self, access: str, addresses: np.ndarray, mask: np.ndarray | None, itemsize: int, origin: int | None
    ) -> list[_Part]:
        addresses = addresses.view(np.int64)  # numpy is slow to index with unsigned integers
        lanes = None if mask is None or mask.all() else mask
        active = addresses if lanes is None else addresses[lanes]
        if active.size == 0:
            return []
        try:
            if origin is None:
                return self._by_address(addresses, lanes, itemsize)
            argument = self.arguments[origin]
            return [_Part(argument, argument.index(active, itemsize), lanes)]
        except OutOfBounds as error:
            raise OutOfBounds(
                f"{self.launch.kernel}: out-of-bounds {access} in program {self.program}: {error}"
            ) from None

    def _by_address(self, addresses: np.ndarray, lanes: np.ndarray | None, itemsize: int) -> list[_Part]:
        # Pointers whose origin is unknown: chosen by tl.where among several arguments, or made from integers.
        parts = []
        left = np.ones(addresses.shape, bool) if lanes is None else lanes.copy()
        for argument in self.arguments:
            here = left & (addresses >= argument.low) & (addresses < argument.high)
            if here.any():
                parts.append(_Part(argument, argument.index(addresses[here], itemsize), here))
                left &= ~here
        if left.any():
            lost = addresses[left]
            raise OutOfBounds(f"{lost.size} lane(s) at addresses in no argument; first is {int(lost[0]):#x}")
        return parts

    def _number(self) -> int:
        """The program as one number, from 1."""
        (x, y, z), (width, height, _) = self.program, self.launch.grid
        return 1 + x + width * (y + height * z)

    def _coordinates(self, number: int) -> tuple[int, int, int]:
        width, height, _ = self.launch.grid
        return (number - 1) % width, (number - 1) // width % height, (number - 1) // (width * height)


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes_of(tensor: Tensor, size: int) -> np.ndarray:
    storage = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    return storage[start : start + size].numpy()


def _gap_map(tensor: Tensor, size: int) -> np.ndarray | None:
    """The elements of its span that belong to a view with gaps, as a mask; None without gaps."""
    distinct = math.prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    if distinct >= size or size > _LARGEST_GAP_MAP:
        return None
    inside = np.zeros(size, bool)
    np.lib.stride_tricks.as_strided(inside, tuple(tensor.shape), tensor.stride())[...] = True
    return inside
