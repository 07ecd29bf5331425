"""Low-precision copies of float32 weights on one device, where there is nothing to shard.

    forward, backward:  the model has the copies, all cast in one pass; gradients are of their dtype
    otherwise:          the model has the float32 weights, with gradients summed over micro-batches in float32

fully_shard does the same, to the bit, with a copy and a cast of its own for every weight: more launches, and more time
of the host, than the rest of a small model's step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PIECE = 2**24  # elements


def cast_weights(model: nn.Module, dtype: torch.dtype, *, units: Sequence[nn.Module], methods: Sequence[str]) -> None:
    """Make forward and backward, and other methods without a gradient, use copies of a model's weights in a dtype.

    A unit's gradients are turned into float32, and their memory freed, as soon as they are complete: those of one graph
    come together, so that more units would be more launches and no less memory.
    """
    weights = _CastWeights(model, dtype, units)
    for method in ("forward", *methods):
        setattr(model, method, weights.casting(getattr(model, method), differentiated=method == "forward"))


class _CastWeights:
    def __init__(self, model: nn.Module, dtype: torch.dtype, units: Sequence[nn.Module]) -> None:
        self._model, self._dtype, self._units = model, dtype, units
        self._places: list[tuple[nn.Module, str]] = []
        self._weights: list[nn.Parameter] = []
        self._copies: list[nn.Parameter] = []
        self._num_units = self._pending = 0  # in all, and without their gradients of this backward

    def casting(self, method: Callable[..., Any], *, differentiated: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def cast(*args: Any, **kwargs: Any) -> Any:
            if not self._copies:
                self._make_copies()
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
        unit_of = {id(module): number for number, unit in enumerate(self._units) for module in unit.modules()}
        members: dict[int, tuple[list[nn.Parameter], list[nn.Parameter]]] = {}
        for module in self._model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    copy = nn.Parameter(torch.empty_like(weight, dtype=self._dtype))
                    self._places.append((module, name))
                    self._weights.append(weight)
                    self._copies.append(copy)
                    weights, copies = members.setdefault(unit_of.get(id(module), -1), ([], []))
                    weights.append(weight)
                    copies.append(copy)
        self._num_units = self._pending = len(members)
        for weights, copies in members.values():
            _Gradients(weights, copies, self._unit_done)

    def _unit_done(self) -> None:
        self._pending -= 1
        if not self._pending:  # the end of backward: until here, blocks may have been computed again
            self._pending = self._num_units
            self._put(self._weights)


class _Gradients:
    """A unit's gradients, counted as they come and moved together."""

    def __init__(
        self, weights: list[nn.Parameter], copies: list[nn.Parameter], on_complete: Callable[[], None]
    ) -> None:
        self._weights, self._copies, self._on_complete = weights, copies, on_complete
        self._missing = len(copies)
        # One allocation for many gradients, but for no more than fit where activations have been.
        self._pieces: list[tuple[int, list[Tensor]]] = []
        for weight in weights:
            if not self._pieces or self._pieces[-1][0] + weight.numel() > _PIECE:
                self._pieces.append((0, []))
            numel, members = self._pieces[-1]
            self._pieces[-1] = numel + weight.numel(), [*members, weight]
        for copy in copies:
            copy.register_post_accumulate_grad_hook(self._count)

    def _count(self, _: Tensor) -> None:
        self._missing -= 1
        if self._missing:
            return
        self._missing = len(self._copies)
        gradients: list[Tensor] = []
        for numel, weights in self._pieces:
            gradients += torch._C._nn.unflatten_dense_tensors(weights[0].new_empty(numel), weights)
        torch._foreach_copy_(gradients, [copy.grad for copy in self._copies if copy.grad is not None])
        if self._weights[0].grad is None:
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.grad = gradient
        else:
            torch._foreach_add_([weight.grad for weight in self._weights if weight.grad is not None], gradients)
        for copy in self._copies:
            copy.grad = None
        self._on_complete()
