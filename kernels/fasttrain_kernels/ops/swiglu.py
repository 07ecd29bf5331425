"""silu(gate) * up in one pass.

    out   = gate * sigmoid(gate) * up
    dgate = dout * up * (sigmoid(gate) + silu(gate) * (1 - sigmoid(gate)))
    dup   = dout * silu(gate)

Elements moved per element of out: forward reads 2 and writes 1, backward reads 3 and writes 2; eager PyTorch, which
also writes and reads silu(gate), 5 and 8. Backward recomputes the sigmoid, so that only the inputs are saved.

swiglu_linear does the same for the projection that follows: its weight's gradient needs out, which backward writes
beside dgate and dup, with everything for it in registers: 3 elements instead of 2, and nothing kept from forward.

M rows, F features, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels._checks import autocast_dtype, check_tensors, empty_like_contiguous, rows, shape, wide
from fasttrain_kernels._launch import launch
from fasttrain_kernels._registration import call, fused_by_compiler, register, runs_triton, warps
from fasttrain_kernels._triton import tl, triton
from fasttrain_kernels.cpp import streaming
from fasttrain_kernels.ops.linear import linear

_BLOCK = 1024
_THREADS = 128  # x 8 bf16: one 128-bit access per thread and tensor


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:  # (..., F), (..., F) -> (..., F)
    """The specification: computed in float32, rounded once."""
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype)


def swiglu_linear_reference(gate_up: Tensor, weight: Tensor) -> Tensor:  # (..., 2F), (N, F) -> (..., N)
    """The specification: swiglu and the matmul in float32, rounded once."""
    return (swiglu_reference(*wide(gate_up).chunk(2, dim=-1)) @ wide(weight).t()).to(gate_up.dtype)


@triton.jit
def _swiglu_fwd_kernel(gate, up, out, gate_stride, up_stride, num_features, num_tiles, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    col = (tl.program_id(0) % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = col < num_features
    g = tl.load(gate + row * gate_stride + col, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_stride + col, mask=inside).to(tl.float32)
    tl.store(out + row * num_features + col, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_bwd_kernel(
    dout,
    gate,
    up,
    dgate,
    dup,  # None: beside dgate, in the same rows
    out,  # None: not asked for
    dout_stride,
    gate_stride,
    up_stride,
    grad_stride,
    num_features,
    num_tiles,
    BLOCK: tl.constexpr,
    NEED_DGATE: tl.constexpr,
    NEED_DUP: tl.constexpr,
):
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    col = (tl.program_id(0) % num_tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = col < num_features
    do = tl.load(dout + row * dout_stride + col, mask=inside).to(tl.float32)
    g = tl.load(gate + row * gate_stride + col, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    if NEED_DGATE:
        u = tl.load(up + row * up_stride + col, mask=inside).to(tl.float32)
        dg = do * u * (sigmoid + silu * (1 - sigmoid))
        tl.store(dgate + row * grad_stride + col, dg.to(dgate.dtype.element_ty), mask=inside)
        if out is not None:
            tl.store(out + row * num_features + col, (silu * u).to(out.dtype.element_ty), mask=inside)
    if NEED_DUP:
        if dup is None:
            dup = dgate + num_features
        tl.store(dup + row * grad_stride + col, (do * silu).to(dup.dtype.element_ty), mask=inside)


def _tiles(F: int) -> tuple[int, int]:
    block = min(_BLOCK, triton.next_power_of_2(F))
    return triton.cdiv(F, block), block


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    out = empty_like_contiguous(gate)
    if out.numel() == 0:
        return out
    gate, up = rows(gate), rows(up)
    M, F = gate.shape
    num_tiles, block = _tiles(F)
    launch(
        _swiglu_fwd_kernel,
        (M * num_tiles,),
        gate,
        up,
        out,
        gate.stride(0),
        up.stride(0),
        F,
        num_tiles,
        BLOCK=block,
        num_warps=warps(_THREADS, out.device),
    )
    return out


def _launch_backward(
    dout: Tensor,
    gate: Tensor,
    up: Tensor,
    dgate: Tensor,
    dup: Tensor | None,
    out: Tensor | None = None,
    *,
    grad_stride: int,  # from row to row of dgate and dup
    need_dgate: bool = True,
    need_dup: bool = True,
) -> None:
    if dout.numel() == 0:
        return
    dout, gate, up = rows(dout), rows(gate), rows(up)
    M, F = gate.shape
    num_tiles, block = _tiles(F)
    launch(
        _swiglu_bwd_kernel,
        (M * num_tiles,),
        *(dout, gate, up, dgate, dup, out),
        *(dout.stride(0), gate.stride(0), up.stride(0), grad_stride),
        *(F, num_tiles),
        BLOCK=block,
        NEED_DGATE=need_dgate,
        NEED_DUP=need_dup,
        num_warps=warps(_THREADS, dout.device),
    )


def _backward(dout: Tensor, gate: Tensor, up: Tensor, need_dgate: bool, need_dup: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = _empty_grads(dout, gate, up, need_dgate, need_dup)
    stride = gate.shape[-1]
    _launch_backward(dout, gate, up, dgate, dup, grad_stride=stride, need_dgate=need_dgate, need_dup=need_dup)
    return dgate, dup


def _backward_packed(dout: Tensor, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    dgate_up = empty_like_contiguous(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    _launch_backward(dout, gate, up, dgate_up, None, out, grad_stride=gate_up.shape[-1])
    return dgate_up


def _backward_packed_again(dout: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    out = _empty_packed(gate_up)
    return _backward_packed(dout, gate_up, out), out


def _forward_cpu(gate: Tensor, up: Tensor) -> Tensor:
    if not streaming.handles(gate, up):
        return swiglu_reference(gate, up).contiguous()
    out = empty_like_contiguous(gate)
    streaming.swiglu_forward(rows(gate), rows(up), out)
    return out


def _backward_cpu(
    dout: Tensor, gate: Tensor, up: Tensor, need_dgate: bool = True, need_dup: bool = True
) -> tuple[Tensor, Tensor]:
    if streaming.handles(dout, gate, up):
        dgate, dup = _empty_grads(dout, gate, up, need_dgate, need_dup)
        grads = (rows(dgate) if need_dgate else None, rows(dup) if need_dup else None)
        streaming.swiglu_backward(rows(dout), rows(gate), rows(up), *grads)
        return dgate, dup
    do, g, u = wide(dout), wide(gate), wide(up)
    dgate = torch.ops.aten.silu_backward(do * u, g) if need_dgate else gate.new_empty(0)  # one pass over both
    dup = torch.nn.functional.silu(g).mul_(do) if need_dup else up.new_empty(0)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


def _backward_packed_cpu(dout: Tensor, gate_up: Tensor) -> Tensor:
    if not streaming.handles(dout, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.cat(_backward_cpu(dout, gate, up), dim=-1)
    grads = empty_like_contiguous(gate_up)
    streaming.swiglu_backward(rows(dout), *rows(gate_up).chunk(2, dim=1), *rows(grads).chunk(2, dim=1))
    return grads


def _forward_packed_cpu(gate_up: Tensor) -> Tensor:
    return _forward_cpu(*gate_up.chunk(2, dim=-1))


def _empty_packed(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _empty_grads(dout: Tensor, gate: Tensor, up: Tensor, need_dgate: bool, need_dup: bool) -> tuple[Tensor, Tensor]:
    return (
        empty_like_contiguous(gate) if need_dgate else gate.new_empty(0),
        empty_like_contiguous(up) if need_dup else up.new_empty(0),
    )


_swiglu_backward = register(
    "swiglu_backward(Tensor dout, Tensor gate, Tensor up, bool need_dgate, bool need_dup) -> (Tensor, Tensor)",
    triton=_backward,
    cpu=_backward_cpu,
    fake=_empty_grads,
    inlined=True,
)
_swiglu_packed_backward = register(
    "swiglu_packed_backward(Tensor dout, Tensor gate_up) -> Tensor",
    triton=_backward_packed,
    cpu=_backward_packed_cpu,
    fake=lambda dout, gate_up: empty_like_contiguous(gate_up),
    inlined=True,
)
_swiglu_packed_backward_again = register(
    "swiglu_packed_backward_again(Tensor dout, Tensor gate_up) -> (Tensor, Tensor)",
    triton=_backward_packed_again,
    cpu=lambda dout, gate_up: (_backward_packed_cpu(dout, gate_up), _forward_packed_cpu(gate_up)),
    fake=lambda dout, gate_up: (empty_like_contiguous(gate_up), _empty_packed(gate_up)),
    inlined=True,
)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
    need_dgate, need_dup = ctx.needs_input_grad
    dgate, dup = call(_swiglu_backward, dout, *ctx.saved_tensors, need_dgate, need_dup)
    return dgate if need_dgate else None, dup if need_dup else None


def _packed_gradient(ctx: Any, dout: Tensor) -> Tensor:
    return call(_swiglu_packed_backward, dout, *ctx.saved_tensors)


_swiglu = register(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    triton=_forward,
    cpu=_forward_cpu,
    fake=lambda gate, up: empty_like_contiguous(gate),
    backward=_gradient,
    setup_context=_setup_context,
    inlined=True,
)
_swiglu_packed = register(
    "swiglu_packed(Tensor gate_up) -> Tensor",
    triton=lambda gate_up: _forward(*gate_up.chunk(2, dim=-1)),
    cpu=_forward_packed_cpu,
    fake=_empty_packed,
    backward=_packed_gradient,
    setup_context=_setup_context,
    inlined=True,
)


def swiglu(
    gate: Tensor,  # (..., F), or (..., 2F) without up
    up: Tensor | None = None,  # (..., F)
) -> Tensor:  # (..., F)
    """silu(gate) * up, in one pass. Without `up`, `gate` is a packed projection that holds gate and then up."""
    check_tensors("swiglu", gate=gate, up=up)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"swiglu: packed gate and up {shape(gate)} must have an even last dimension")
        return swiglu_reference(*gate.chunk(2, dim=-1)) if fused_by_compiler(gate) else call(_swiglu_packed, gate)
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate {shape(gate)} and up {shape(up)} must have the same shape")
    if gate.dtype != up.dtype:
        raise TypeError(f"swiglu: gate is {gate.dtype} and up {up.dtype}; cast them to one dtype")
    return swiglu_reference(gate, up) if fused_by_compiler(gate) else call(_swiglu, gate, up)


class _SwigluLinear(torch.autograd.Function):
    """Of torch ops and ours, not an op itself: who selects matmuls, or counts them, sees them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return linear(call(_swiglu_packed, gate_up), weight)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate_up, weight = ctx.saved_tensors
        need_dgate_up, need_dweight = ctx.needs_input_grad
        dgate_up, out = None, None
        if need_dgate_up and need_dweight:
            dgate_up, out = call(_swiglu_packed_backward_again, dout @ weight, gate_up)
        elif need_dgate_up:
            dgate_up = call(_swiglu_packed_backward, dout @ weight, gate_up)
        else:
            out = call(_swiglu_packed, gate_up)
        return dgate_up, None if out is None else dout.flatten(0, -2).t() @ out.flatten(0, -2)


def swiglu_linear(
    gate_up: Tensor,  # (..., 2F): gate, then up
    weight: Tensor,  # (N, F)
) -> Tensor:  # (..., N)
    """linear(swiglu(gate_up), weight). On a GPU nothing but its arguments is kept for backward."""
    check_tensors("swiglu_linear", gate_up=gate_up, weight=None if type(weight).__name__ == "DTensor" else weight)
    if gate_up.shape[-1] != 2 * weight.shape[-1]:
        raise ValueError(f"swiglu_linear: gate_up {shape(gate_up)} must be twice as wide as weight {shape(weight)}")
    differentiated = torch.is_grad_enabled() and (gate_up.requires_grad or weight.requires_grad)
    # On a CPU, computing out again takes time that nobody can spare, and memory is not what is short.
    if not (runs_triton(gate_up) and differentiated) or autocast_dtype(gate_up) or type(weight).__name__ == "DTensor":
        return linear(swiglu(gate_up), weight)
    return _SwigluLinear.apply(gate_up, weight)
