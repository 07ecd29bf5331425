"""The registered torch ops, their gradients, and the public functions.

"mean" and "sum" compute both gradients in forward, and backward only multiplies them by the upstream scalar, in place.
"none" knows its upstream gradients only in backward: its forward computes the loss alone, its backward repeats the
chunked forward with gradients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels._checks import autocast_dtype, check_tensors, shape, wide_dtype
from fasttrain_kernels._registration import call, register, runs_triton
from fasttrain_kernels.ops.linear_cross_entropy.chunked import chunked_forward
from fasttrain_kernels.ops.linear_cross_entropy.chunks import dweight_dtype
from fasttrain_kernels.ops.linear_cross_entropy.reference import LossOptions, TokenStats

_OP = "linear_cross_entropy"
_OPTIONS = "int ignore_index, float z_loss, float label_smoothing, float? softcap"


def _token_weights(target: Tensor, token_weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    counted = target != ignore_index
    return counted.to(dtype) if token_weight is None else torch.where(counted, token_weight.to(dtype), 0)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    ignore_index: int,
    z_loss: float,
    label_smoothing: float,
    softcap: float | None,
    mean: bool,
    need_dhidden: bool,
    need_dweight: bool,
    *,
    use_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not use_triton:
        _check_targets(target, weight.shape[0], ignore_index)
    options = LossOptions(ignore_index, z_loss, label_smoothing, softcap)
    counted = _token_weights(target, token_weight, ignore_index, wide_dtype(hidden.dtype))
    # The mean's factor is applied to float32 sums. In 16 bits the sums may be rounded themselves: it comes before them.
    early = mean and hidden.dtype.itemsize == 2
    with torch.autocast(hidden.device.type, enabled=False):  # the matmuls' dtypes are chosen here
        chunked = chunked_forward(
            *(hidden, weight, target, options),
            use_triton=use_triton,
            coef=_averaged(counted, counted) if early else counted,
            need_dhidden=need_dhidden,
            need_dweight=need_dweight,
        )
    loss = (chunked.tokens[0] * counted).sum(dtype=torch.float64)
    if mean:
        loss = loss / counted.sum()
    scale = _averaged(chunked.grad_scale, counted) if mean and not early else chunked.grad_scale
    return loss.to(counted.dtype), chunked.dhidden, chunked.dweight, scale


def _averaged(x: Tensor, counted: Tensor) -> Tensor:
    """x / the number of counted tokens. Without any, the mean is NaN as in F.cross_entropy, but gradients are zero."""
    denominator = counted.sum()
    return torch.where(denominator == 0, 0, x / denominator)


def _fake(hidden: Tensor, weight: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, need_dhidden, need_dweight = options
    empty = partial(torch.empty, device=hidden.device)
    (M, H), V = hidden.shape, weight.shape[0]
    wide = wide_dtype(hidden.dtype)
    summed = getattr(torch, dweight_dtype(M, H, V, hidden.dtype, weight.dtype, runs_triton(hidden)))
    return (
        empty((), dtype=wide),
        empty((M if need_dhidden else 0, H), dtype=wide),
        empty((V if need_dweight else 0, H), dtype=summed),
        empty((), dtype=wide),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype


def _gradient(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():  # create_graph=True, but the saved gradients are constants to autograd
        raise NotImplementedError(
            f"{_OP}: its gradient cannot be differentiated again; for double backward use {_OP}_reference"
        )
    nothing = (None,) * 9
    if dloss is None:
        return None, None, *nothing
    dhidden, dweight, scale = ctx.saved_tensors
    scale = scale * dloss
    return (
        _finished(dhidden, scale, ctx.dtypes[0]) if ctx.needs_input_grad[0] else None,
        _finished(dweight, scale, ctx.dtypes[1]) if ctx.needs_input_grad[1] else None,
        *nothing,
    )


def _finished(grad: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if type(grad) is not Tensor:  # torch.compile is tracing: it wants no mutation, and reuses memory by itself
        return (grad * scale).to(dtype)
    if grad.dtype == dtype:
        # In place: a parameter's .grad becomes this very tensor. A second backward finds it changed, and raises.
        return grad.mul_(scale)
    return torch.mul(grad, scale, out=torch.empty(grad.shape, dtype=dtype, device=grad.device))


def _tokens(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    *options: Any,
    use_triton: bool,
) -> Tensor:
    if not use_triton:
        _check_targets(target, weight.shape[0], options[0])
    with torch.autocast(hidden.device.type, enabled=False):
        loss = chunked_forward(hidden, weight, target, LossOptions(*options), use_triton=use_triton).tokens[0]
    return loss if token_weight is None else loss * _token_weights(target, token_weight, options[0], loss.dtype)


def _tokens_backward(
    dout: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    *options: Any,
    use_triton: bool,
) -> tuple[Tensor, Tensor]:
    *loss_options, need_dhidden, need_dweight = options
    wide = wide_dtype(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        chunked = chunked_forward(
            *(hidden, weight, target, LossOptions(*loss_options)),
            use_triton=use_triton,
            coef=dout.to(wide) * _token_weights(target, token_weight, loss_options[0], wide),
            need_dhidden=need_dhidden,
            need_dweight=need_dweight,
        )
    return (
        _finished(chunked.dhidden, chunked.grad_scale, hidden.dtype),
        _finished(chunked.dweight, chunked.grad_scale, weight.dtype),
    )


def _tokens_backward_fake(
    dout: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    *_, need_dhidden, need_dweight = options
    M, H = hidden.shape
    return (
        torch.empty((M if need_dhidden else 0, H), dtype=hidden.dtype, device=hidden.device),
        torch.empty((weight.shape[0] if need_dweight else 0, H), dtype=weight.dtype, device=hidden.device),
    )


def _tokens_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weight, target, token_weight, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, target, token_weight)


def _tokens_gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    need_dhidden, need_dweight, *_ = ctx.needs_input_grad
    dhidden, dweight = call(_tokens_backward_op, dout, *ctx.saved_tensors, *ctx.options, need_dhidden, need_dweight)
    return (dhidden if need_dhidden else None, dweight if need_dweight else None, *(None,) * 6)


def _stats(hidden: Tensor, weight: Tensor, target: Tensor, *options: Any, use_triton: bool) -> tuple[Tensor, ...]:
    if not use_triton:
        _check_targets(target, weight.shape[0], options[0])
    with torch.autocast(hidden.device.type, enabled=False):
        return chunked_forward(hidden, weight, target, LossOptions(*options), use_triton=use_triton, stats=True).tokens


def _stats_fake(hidden: Tensor, weight: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
    empty = partial(torch.empty, target.shape, device=hidden.device)
    wide = wide_dtype(hidden.dtype)
    return empty(dtype=wide), empty(dtype=wide), empty(dtype=wide), empty(dtype=torch.bool)


_linear_cross_entropy = register(
    f"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? token_weight, {_OPTIONS}, bool mean, "
    "bool need_dhidden, bool need_dweight) -> (Tensor loss, Tensor dhidden, Tensor dweight, Tensor scale)",
    triton=partial(_forward, use_triton=True),
    cpu=partial(_forward, use_triton=False),
    fake=_fake,
    backward=_gradient,
    setup_context=_setup_context,
)
_tokens_backward_op = register(
    "linear_cross_entropy_tokens_backward(Tensor dout, Tensor hidden, Tensor weight, Tensor target, "
    f"Tensor? token_weight, {_OPTIONS}, bool need_dhidden, bool need_dweight) -> (Tensor, Tensor)",
    triton=partial(_tokens_backward, use_triton=True),
    cpu=partial(_tokens_backward, use_triton=False),
    fake=_tokens_backward_fake,
)
_tokens_op = register(
    "linear_cross_entropy_tokens(Tensor hidden, Tensor weight, Tensor target, Tensor? token_weight, "
    f"{_OPTIONS}) -> Tensor",
    triton=partial(_tokens, use_triton=True),
    cpu=partial(_tokens, use_triton=False),
    fake=lambda hidden, weight, target, *_: torch.empty(
        target.shape, dtype=wide_dtype(hidden.dtype), device=hidden.device
    ),
    backward=_tokens_gradient,
    setup_context=_tokens_setup_context,
)
_stats_op = register(
    f"linear_cross_entropy_stats(Tensor hidden, Tensor weight, Tensor target, {_OPTIONS}) -> "
    "(Tensor loss, Tensor lse, Tensor entropy, Tensor correct)",
    triton=partial(_stats, use_triton=True),
    cpu=partial(_stats, use_triton=False),
    fake=_stats_fake,
)


def linear_cross_entropy(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (...) int64 or int32
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    token_weight: Tensor | None = None,  # (...)
    reduction: str = "mean",
) -> Tensor:  # () or, with reduction="none", (...); float32 for 16-bit operands
    """Cross entropy of hidden @ weight.T, in chunks that never hold all logits; forward computes the gradients too.

    A token whose target is `ignore_index` has no loss and no gradient. `token_weight` multiplies the loss of a token,
    and the mean is the weighted one. `z_loss` adds z_loss * lse^2. `softcap` bounds logits: softcap * tanh(y/softcap).
    """
    _check(hidden, weight, target, token_weight, label_smoothing, softcap)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{_OP}: reduction {reduction!r} must be 'mean', 'sum' or 'none'")
    rows, labels = _flat(hidden, target)
    weights = None if token_weight is None else token_weight.reshape(-1)
    options = (ignore_index, z_loss, label_smoothing, softcap)
    if reduction == "none":
        return call(_tokens_op, rows, weight, labels, weights, *options).reshape(target.shape)
    # Asked here, not in the op: under no_grad the op would otherwise compute unused gradients.
    grad = torch.is_grad_enabled()
    needs = (grad and hidden.requires_grad, grad and weight.requires_grad)
    return call(_linear_cross_entropy, rows, weight, labels, weights, *options, reduction == "mean", *needs)[0]


@torch.no_grad()
def linear_cross_entropy_stats(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    target: Tensor,  # (...) int64 or int32
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> TokenStats:
    """Loss, lse, entropy and hit of every token, for evaluation: no gradients, and float32 logits."""
    _check(hidden, weight, target, None, label_smoothing, softcap)
    rows, labels = _flat(hidden, target)
    columns = call(_stats_op, rows, weight, labels, ignore_index, z_loss, label_smoothing, softcap)
    return TokenStats(*(column.reshape(target.shape) for column in columns))


def _flat(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        # The weight is cast inside the op, so that its gradient is rounded once, to its own dtype.
        hidden = hidden.to(dtype)
    return hidden.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)


def _check(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    token_weight: Tensor | None,
    label_smoothing: float,
    softcap: float | None,
) -> None:
    check_tensors(_OP, hidden=hidden, weight=weight, token_weight=token_weight)
    if type(target).__name__ == "DTensor":
        raise TypeError(f"{_OP}: target is a DTensor; kernels work on one device's memory: pass target.to_local()")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{_OP}: target has dtype {target.dtype}; class indices are int64 or int32")
    if target.device != hidden.device:
        raise ValueError(f"{_OP}: hidden is on {hidden.device} and target on {target.device}; move them to one device")
    if weight.dim() != 2 or weight.shape[0] == 0 or hidden.dim() == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{_OP}: hidden {shape(hidden)} must be (..., H) and weight {shape(weight)} (V, H), with V at least 1"
        )
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"{_OP}: target {shape(target)} must have one index per vector of hidden {shape(hidden)}, "
            f"that is {shape(hidden)[:-1]}"
        )
    if hidden.dtype != weight.dtype and autocast_dtype(hidden) is None:
        raise TypeError(f"{_OP}: hidden is {hidden.dtype} and weight {weight.dtype}; cast one, or use torch.autocast")
    if token_weight is not None and token_weight.shape != target.shape:
        raise ValueError(
            f"{_OP}: token_weight {shape(token_weight)} and target {shape(target)} must have the same shape"
        )
    if token_weight is not None and token_weight.requires_grad:
        raise ValueError(
            f"{_OP}: token_weight requires grad, but gets no gradient; pass token_weight.detach(), or multiply "
            "the losses of reduction='none' by it"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{_OP}: label_smoothing {label_smoothing} must be between 0 and 1")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{_OP}: softcap {softcap} must be positive; None means no cap")


def _check_targets(target: Tensor, V: int, ignore_index: int) -> None:
    wrong = ((target < 0) | (target >= V)) & (target != ignore_index)
    if wrong.any():
        position = int(wrong.nonzero()[0])
        raise ValueError(
            f"{_OP}: target {int(target[position])} at position {position} is outside the vocabulary [0, {V}) "
            f"and is not ignore_index ({ignore_index})"
        )
