"""Whole float32 weights on every rank, with low-precision copies and gradients that are summed over ranks.

    forward, backward:  the model has the copies, all cast in one pass; gradients are of their dtype
    otherwise:          the model has the float32 weights, with gradients summed over micro-batches in float32,
                        and after the last one over ranks: while earlier units still have their backward

fully_shard does the same, with a copy and a cast of its own for every weight, and hooks around every unit: more
launches, and more time of the host, than the rest of a small model's step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET = 2**24  # elements


class UnshardedWeights:
    """Makes forward and backward of a model, and methods without a gradient, use copies of its weights in a dtype.

    A unit's gradients are turned into float32, and their memory freed, as soon as they are complete: those of one graph
    come together, so that more units would be more launches and no less memory. A float32 model has no copies.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        units: Sequence[Sequence[nn.Module]] = (),  # the rest of the model is one more
        methods: Sequence[str] = (),  # beside forward
        ranks: dist.ProcessGroup | None = None,  # that have other batches and the same weights
    ) -> None:
        self.reduces = True  # whether the coming backward is the last before the gradients are used
        self._model, self._dtype, self._units, self._ranks = model, dtype, units, ranks
        self._places: list[tuple[nn.Module, str]] = []
        self._weights: list[nn.Parameter] = []
        self._copies: list[nn.Parameter] = []
        self._num_units = self._pending = 0  # in all, and without their gradients of this backward
        self._work: list[dist.Work] = []
        for method in ("forward", *methods):
            setattr(model, method, self._casting(getattr(model, method), differentiated=method == "forward"))

    def _casting(self, method: Callable[..., Any], *, differentiated: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def cast(*args: Any, **kwargs: Any) -> Any:
            if not self._weights:
                self._make_copies()
            if self._copies[0] is self._weights[0]:
                return method(*args, **kwargs)
            with torch.no_grad():
                torch._foreach_copy_(tuple(self._copies), tuple(self._weights))
            self._put(self._copies)
            backward_follows = False
            try:
                result = method(*args, **kwargs)
                backward_follows = differentiated and torch.is_grad_enabled()
            finally:
                if not backward_follows:
                    self._put(self._weights)
            return result

        return cast

    def _put(self, parameters: list[nn.Parameter]) -> None:
        for (module, name), parameter in zip(self._places, parameters, strict=True):
            module._parameters[name] = parameter

    def _make_copies(self) -> None:
        """At the first use: a model on the meta device gets its weights after it has been prepared."""
        unit_of = {id(m): n for n, unit in enumerate(self._units) for part in unit for m in part.modules()}
        members: dict[int, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
        for module in self._model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    same = weight.dtype == self._dtype
                    copy = weight if same else nn.Parameter(torch.empty_like(weight, dtype=self._dtype))
                    self._places.append((module, name))
                    self._weights.append(weight)
                    self._copies.append(copy)
                    weights, copies = members.setdefault(unit_of.get(id(module), -1), ([], []))
                    weights.append(weight)
                    copies.append(copy)
        self._num_units = self._pending = len(members)
        for weights, copies in members.values():
            _Gradients(weights, copies, self._unit_done)

    def _unit_done(self, gradients: _Gradients) -> None:
        among_ranks = self._ranks is not None and self.reduces
        if among_ranks or gradients.are_cast:
            buckets = gradients.to_buckets(last=self.reduces)
            if among_ranks:
                self._work += [dist.all_reduce(bucket, group=self._ranks, async_op=True) for bucket in buckets]
        self._pending -= 1
        if not self._pending:  # the end of backward: until here, blocks may have been computed again
            self._pending = self._num_units
            self._put(self._weights)
            for work in self._work:
                work.wait()  # the device, not the host
            self._work.clear()


class _Gradients:
    """A unit's gradients, counted as they come and moved together."""

    def __init__(
        self, weights: list[nn.Parameter], copies: list[nn.Parameter], on_complete: Callable[[_Gradients], None]
    ) -> None:
        self._weights, self._copies, self._on_complete = weights, copies, on_complete
        self.are_cast = weights[0] is not copies[0]
        self._missing = len(copies)
        self._sums: list[Tensor] = []  # of micro-batches so far
        # One allocation for many gradients, but for no more than fit where activations have been.
        self._buckets: list[tuple[int, list[Tensor]]] = []
        for weight in weights:
            if not self._buckets or self._buckets[-1][0] + weight.numel() > _BUCKET:
                self._buckets.append((0, []))
            numel, members = self._buckets[-1]
            self._buckets[-1] = numel + weight.numel(), [*members, weight]
        for copy in copies:
            copy.register_post_accumulate_grad_hook(self._count)

    def _count(self, _: Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self._missing = len(self._copies)
            self._on_complete(self)

    def to_buckets(self, *, last: bool) -> list[Tensor]:
        """The gradients, with those of earlier micro-batches, in float32: each a part of a few flat tensors."""
        buckets = [weights[0].new_empty(numel) for numel, weights in self._buckets]
        gradients: list[Tensor] = []
        for bucket, (_, weights) in zip(buckets, self._buckets, strict=True):
            gradients += torch._C._nn.unflatten_dense_tensors(bucket, weights)
        torch._foreach_copy_(gradients, [copy.grad for copy in self._copies if copy.grad is not None])
        for copy in self._copies:
            copy.grad = None
        if self._weights[0].grad is None:
            self._sums = buckets
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.grad = gradient
        elif self._sums:
            torch._foreach_add_(self._sums, buckets)
        else:  # a loop that names no last micro-batch
            torch._foreach_add_([weight.grad for weight in self._weights if weight.grad is not None], gradients)
        sums = self._sums
        if last:  # the gradients alone hold the memory from now on
            self._sums = []
        return sums
