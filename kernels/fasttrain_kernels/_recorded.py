"""Calls of an op, recorded: what it allocates and launches for tensors of such shapes, strides and dtypes.

Between its arguments and its launches an op computes strides, grids and tiles in Python, every time the same. That
takes the host longer than the launches. So the second call of a kind is watched, and all later ones repeat what it did:

    empty outputs  ->  launches, with addresses in the place of tensors  ->  outputs

Only what an op did by empty tensors, views and launches alone is repeated; one that calls other ops of torch runs as it
is written. Kernels read no value on the host, so a kind of call decides about all of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain_kernels._triton import triton

_MOST = 4096  # kinds of calls that are remembered: shapes may change for ever

# A launch: Triton's launcher, grid, function, its metadata, and arguments: all, and which of them are addresses.
Launch = tuple[Callable[..., None], tuple[int, int, int], Any, Any, list[Any], list[tuple[int, int, int]]]


class _Recording:
    """What one kind of call allocates, launches and returns."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.empty: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        self.launches: list[Launch] = []
        self.outputs: list[int | None] = []  # which of the empty tensors
        self.is_tuple = False
        self.is_whole = True  # nothing else was done
        self.is_usual = True  # no launch was the first of its kind, or watched by a profiler
        self.inputs = sum(isinstance(a, Tensor) for a in args)
        # The tensor that each one is a view of, by number: inputs, then empty ones. Kept alive, for ids are reused.
        self._roots: dict[int, tuple[int, Tensor]] = {}
        self._addresses: list[int] = []
        for number, tensor in enumerate(a for a in args if isinstance(a, Tensor)):
            self._roots.setdefault(id(tensor), (number, tensor))
            self._addresses.append(tensor.data_ptr())

    def allocated(self, tensor: Tensor) -> None:
        self._roots[id(tensor)] = len(self._addresses), tensor
        self._addresses.append(tensor.data_ptr())
        self.empty.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))

    def viewed(self, tensor: Tensor, view: Tensor) -> None:
        root = self._roots.get(id(tensor))
        if root is None:
            self.is_whole = False
        else:
            self._roots.setdefault(id(view), (root[0], view))

    def launched(
        self, run: Any, grid: tuple[int, int, int], function: Any, metadata: Any, args: tuple[Any, ...]
    ) -> None:
        places = []
        for place, argument in enumerate(args):
            if isinstance(argument, Tensor):
                root = self._roots.get(id(argument))
                if root is None:
                    self.is_whole = False
                    return
                places.append((place, root[0], argument.data_ptr() - self._addresses[root[0]]))
        fixed = [None if isinstance(a, Tensor) else a for a in args]
        self.launches.append((run, grid, function, metadata, fixed, places))

    def returned(self, result: Any) -> None:
        self.is_tuple = isinstance(result, tuple)
        for output in result if self.is_tuple else (result,):
            number = None
            if output is not None:
                number = self._roots[id(output)][0] - self.inputs if id(output) in self._roots else -1
                layout = (tuple(output.shape), output.stride(), output.dtype)
                if number < 0 or self.empty[number] != layout:
                    self.is_whole = False
                    return
            self.outputs.append(number)

    def ended(self) -> _Recording:
        """Without its tensors."""
        self._roots.clear()
        return self

    def repeat(self, addresses: list[int], device: int) -> Any:
        """Do it for inputs at other addresses, a list that this call may change."""
        made = [_empty(size, stride, dtype) for size, stride, dtype in self.empty]
        addresses += [tensor.data_ptr() for tensor in made]
        stream = torch._C._cuda_getCurrentRawStream(device)
        for run, (x, y, z), function, metadata, fixed, places in self.launches:
            given = fixed.copy()
            for place, number, offset in places:
                given[place] = addresses[number] + offset
            run(x, y, z, stream, function, metadata, None, None, None, *given)
        if not self.is_tuple:
            return None if self.outputs[0] is None else made[self.outputs[0]]
        return tuple([None if number is None else made[number] for number in self.outputs])


# torch.empty without its parser, as Inductor's code calls it: 0.5 us instead of 2.5
_empty: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
_current = threading.local()


class _Watching(TorchDispatchMode):
    """Tells a recording of empty tensors and views, and that it is not whole after any other op."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op in _ALLOCATIONS and result.is_cuda and not result.is_pinned():
            self._recording.allocated(result)
        elif op.is_view:
            for view in result if isinstance(result, list | tuple) else (result,):
                self._recording.viewed(args[0], view)
        elif op is not _aten.promote_types.default:  # which computes nothing
            self._recording.is_whole = False
        return result


_aten = torch.ops.aten
_ALLOCATIONS = {
    *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default),
}


def launched(run: Any, grid: tuple[int, int, int], function: Any, metadata: Any, args: tuple[Any, ...]) -> None:
    """Tell the call that is being recorded, if one is, of a launch."""
    recording = getattr(_current, "recording", None)
    if recording is not None:
        recording.launched(run, grid, function, metadata, args)


def launched_by_triton() -> None:
    """Tell it of a launch that Triton itself made: the next call may be another matter."""
    recording = getattr(_current, "recording", None)
    if recording is not None:
        recording.is_usual = False


def is_observed() -> bool:
    """Whether somebody wants to be told of launches (a profiler), which only Triton's own launch does."""
    hooks = triton.knobs.runtime
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def recorded(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """An op's launcher on the device of its tensors, repeated from recordings where that is possible."""
    known: dict[tuple[Any, ...], _Recording | bool | None] = {}
    elsewhere = on_device(launcher)

    def launch(*args: Any) -> Any:
        device = torch._C._cuda_getDevice()
        kind: list[Any] = [device]
        addresses = []
        for a in args:
            if isinstance(a, Tensor):
                if a.get_device() != device:
                    return elsewhere(*args)
                addresses.append(address := a.data_ptr())
                kind += a.shape, a.stride(), a.dtype, address & 15  # what launches, and Triton, decide by
            else:
                kind.append(tuple(a) if type(a) is list else a)
        key = tuple(kind)
        recording = known.get(key, False)
        if isinstance(recording, _Recording) and not is_observed():
            return recording.repeat(addresses, device)
        if recording is True:  # not the first call: with that, kernels may have been compiled
            result, known[key] = _record(launcher, args)
            return result
        if recording is False:
            if len(known) >= _MOST:
                known.clear()
            known[key] = True
        return launcher(*args)

    return launch


def on_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher on the device of its tensors: Triton launches on the current one, which need not be the same."""

    def launch(*args: Any) -> Any:
        with torch.cuda.device(next(a.device for a in args if isinstance(a, Tensor))):
            return launcher(*args)

    return launch


def _record(launcher: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, _Recording | bool | None]:
    recording, outer = _Recording(args), getattr(_current, "recording", None)
    _current.recording = recording
    try:
        with _Watching(recording):
            result = launcher(*args)
    finally:
        _current.recording = outer
    recording.returned(result)
    if not recording.is_whole:
        return result, None
    return result, recording.ended() if recording.is_usual else True
