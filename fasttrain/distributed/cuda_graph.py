"""A step as one CUDA graph: captured once, then replayed with other batches.

    the first steps     eager, on the graph's stream: compiled code, workspaces and the optimizer's state come to exist
    the next one        captured, which computes nothing, and replayed
    all others          copies of the batch and one launch, in the place of hundreds

A graph has addresses inside. Where weights, moments or a learning rate are found at others than before (a rollback
loads new ones), the first steps begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fasttrain.config import ParallelConfig
from fasttrain.distributed.runtime import Runtime

EAGER = 2  # steps since the last change of an address


class StepGraph:
    """A function of tensors, called with other values at every step; its result is overwritten by the next call."""

    def __init__(self, device: torch.device) -> None:
        # A capture needs a stream of its own. All work is in it from now on: autograd adds a gradient in the stream
        # where it was first added, and a captured stream cannot wait for one that is not.
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._device = device
        self._inputs: list[Tensor | None] = []
        self._addresses: list[int] = []
        self._eager = EAGER
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None

    def __call__(self, work: Callable[..., Tensor], inputs: Sequence[Tensor | None], used: Iterable[Tensor]) -> Tensor:
        """work(*inputs), with inputs of the same shapes at every call; used: what else it reads and writes."""
        if not self._inputs:
            self._inputs = [None if x is None else torch.empty_like(x, device=self._device) for x in inputs]
        addresses = [tensor.data_ptr() for tensor in used]
        if addresses != self._addresses:
            self._addresses, self._eager, self._graph, self._output = addresses, EAGER, None, None
        for fixed, given in zip(self._inputs, inputs, strict=True):
            if fixed is not None and given is not None:
                fixed.copy_(given, non_blocking=True)
        if self._eager:
            self._eager -= 1
            return work(*self._inputs)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            # thread_local: others may allocate meanwhile, such as the thread that pins the next batches
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._output = work(*self._inputs)
        self._graph.replay()
        assert self._output is not None
        return self._output


def make_graph(parallel: ParallelConfig, runtime: Runtime) -> StepGraph | None:
    """The graph of a run's steps, where parallel.cuda_graph asks for one; an error where there can be none."""
    if not parallel.cuda_graph:
        return None
    reasons = {
        f"the device is {runtime.device.type}": runtime.device.type != "cuda",
        f"there are {runtime.world_size} ranks": runtime.world_size > 1,
        "fp16 decides on the host whether a step counts": runtime.precision == "fp16",
    }
    if wrong := [reason for reason, holds in reasons.items() if holds]:
        why = " and ".join(wrong)
        raise ValueError(f"parallel.cuda_graph needs one GPU and bf16 or fp32, and {why}; set it to false")
    return StepGraph(runtime.device)
