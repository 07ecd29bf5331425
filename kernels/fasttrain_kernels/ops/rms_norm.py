"""Root-mean-square norm over the last dimension, alone and fused with the addition of the residual stream.

    rstd = 1 / sqrt(mean(x^2) + eps)        xhat = x * rstd        out = xhat * (offset + weight)
    g    = dout * (offset + weight)
    dx   = rstd * (g - xhat * mean(g * xhat))                      dweight = sum over rows of dout * xhat

`add_rms_norm` norms total = x + residual, rounded, and returns total as the new residual stream. Both summands have the
gradient dx + dtotal, written once.

Rounding follows the models: without offset that of Llama and Qwen3 (xhat is rounded to x.dtype, multiplied by weight
and rounded again), with offset that of Gemma (everything in float32, rounded once).

Elements moved per element of x: rms_norm reads 1 and writes 1, backward reads 2 and writes 1; add_rms_norm reads 2 and
writes 2, backward reads 3 and writes 1. Beside tensors that exist anyway, only rstd is saved. The kernels are
persistent: weight is read, and a program's partial dweight written, once per program; a second kernel sums the partials
in a fixed order.

M rows, N features, P programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels._checks import check_tensors, rows, shape, wide, wide_dtype
from fasttrain_kernels._launch import launch, remembered
from fasttrain_kernels._registration import call, fused_by_compiler, multiprocessor_count, register, warps
from fasttrain_kernels._triton import tl, triton
from fasttrain_kernels.cpp import streaming

_WIDEST = 16384  # features of a row that the registers of one program hold; wider rows take torch ops


def rms_norm_reference(
    x: Tensor,  # (..., N)
    weight: Tensor | None = None,  # (N,)
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Tensor:  # (..., N)
    """The specification: float32 inside, rounded as Llama and Qwen3 do (or, with an offset, as Gemma does)."""
    return _normed(x, weight, eps, offset, x.dtype)


def _normed(x: Tensor, weight: Tensor | None, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    xhat = wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return xhat.to(dtype)
    if offset == 0:
        xhat = wide(xhat.to(dtype))
    return (xhat * (offset + wide(weight))).to(dtype)


def add_rms_norm_reference(
    x: Tensor,  # (..., N)
    residual: Tensor,  # (..., N)
    weight: Tensor | None,  # (N,)
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # (..., N), (..., N)
    """The specification: the sum in the wider dtype of the two, and its norm in the dtype of x."""
    total = x + residual
    return _normed(total, weight, eps, 0.0, x.dtype), total


# Arguments that may be None (residual, weight, dtotal, dx, partials) select the variant at compile time.


@triton.jit
def _load_weight(weight, num_features, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # A tile of which only the first row is loaded. A plain load of (1, BLOCK) would be laid out over the threads in
    # another way than the (ROWS, BLOCK) tiles that it multiplies, and every iteration would exchange data between them.
    col = tl.arange(0, BLOCK)[None, :]
    first = (tl.arange(0, ROWS) == 0)[:, None] & (col < num_features)
    tile = tl.load(weight + tl.zeros([ROWS, 1], tl.int32) + col, mask=first, other=0)
    return tl.sum(tile.to(tl.float32), axis=0)[None, :]


@triton.jit
def _rms_norm_fwd_kernel(
    x,
    residual,
    weight,
    out,
    total,
    rstd,
    x_stride,
    residual_stride,
    num_rows,
    num_features,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    col = tl.arange(0, BLOCK)[None, :]
    if weight is not None:
        scale = OFFSET + _load_weight(weight, num_features, ROWS, BLOCK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < num_rows)[:, None] & (col < num_features)
        h = tl.load(x + (row * x_stride)[:, None] + col, mask=inside, other=0).to(tl.float32)
        if residual is not None:
            h += tl.load(residual + (row * residual_stride)[:, None] + col, mask=inside, other=0).to(tl.float32)
            rounded = h.to(total.dtype.element_ty)
            tl.store(total + (row * num_features)[:, None] + col, rounded, mask=inside)
            h = rounded.to(tl.float32)
        r = tl.rsqrt(tl.sum(h * h, axis=1) / num_features + EPS)
        tl.store(rstd + row, r, mask=row < num_rows)
        y = h * r[:, None]
        if weight is not None:
            if OFFSET == 0:
                y = y.to(out.dtype.element_ty).to(tl.float32)
            y *= scale
        tl.store(out + (row * num_features)[:, None] + col, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_bwd_kernel(
    dout,
    dtotal,
    x,
    weight,
    rstd,
    dx,
    partials,
    dout_stride,
    dtotal_stride,
    x_stride,
    num_rows,
    num_features,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    col = tl.arange(0, BLOCK)[None, :]
    if weight is not None:
        scale = OFFSET + _load_weight(weight, num_features, ROWS, BLOCK)
    if partials is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < num_rows)[:, None] & (col < num_features)
        r = tl.load(rstd + row, mask=row < num_rows, other=0)[:, None]
        xhat = tl.load(x + (row * x_stride)[:, None] + col, mask=inside, other=0).to(tl.float32) * r
        g = tl.load(dout + (row * dout_stride)[:, None] + col, mask=inside, other=0).to(tl.float32)
        if partials is not None:
            dweight += g * xhat
        if dx is not None:
            if weight is not None:
                g *= scale
            d = r * (g - xhat * (tl.sum(g * xhat, axis=1) / num_features)[:, None])
            if dtotal is not None:
                d += tl.load(dtotal + (row * dtotal_stride)[:, None] + col, mask=inside, other=0).to(tl.float32)
            tl.store(dx + (row * num_features)[:, None] + col, d.to(dx.dtype.element_ty), mask=inside)
    if partials is not None:
        here = tl.program_id(0).to(tl.int64) * num_features + tl.arange(0, BLOCK)
        tl.store(partials + here, tl.sum(dweight, axis=0), mask=tl.arange(0, BLOCK) < num_features)


@triton.jit
def _sum_partials_kernel(partials, dweight, num_partials, num_features, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, num_partials, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < num_partials)[:, None] & (col < num_features)[None, :]
        acc += tl.load(partials + row.to(tl.int64)[:, None] * num_features + col[None, :], mask=inside, other=0)
    tl.store(dweight + col, tl.sum(acc, axis=0).to(dweight.dtype.element_ty), mask=col < num_features)


@remembered
def _launch_options(
    M: int,
    N: int,
    sizes: tuple[int, ...],  # bytes of an element of each tensor that an iteration reads
    device: torch.device,
    *,
    min_rows: int,  # for each program, unless that leaves multiprocessors idle
    max_threads: int,  # on a multiprocessor: what its registers and shared memory hold
) -> tuple[tuple[int], dict[str, int]]:
    """Grid and options of a persistent kernel."""
    block = triton.next_power_of_2(N)
    # 16 bf16 or 8 float32 per thread: two 128-bit accesses, or one where three tensors are read (two would spill at
    # N = 2048 on sm_100). Nothing spills up to N = 8192. At 16,384, x, dout, weight and dweight of one row fill the
    # registers of a multiprocessor, and backward spills some; 1,024 threads do too.
    tensor_bytes = 8192 if len(sizes) < 3 else 4096
    tile_rows = max(1, tensor_bytes // (block * sizes[0]))
    threads = 256 if block <= 4096 else 512
    # Bytes in flight hide the latency of memory, some 32 KB for each multiprocessor of an H100. So software
    # pipelining copies the next tiles, 16 to 48 KB, to shared memory while this one is computed. Twice that fits the
    # smallest one (sm_86).
    tile_bytes = sum(sizes) * tile_rows * block
    stages = 3 if tile_bytes <= 16 * 1024 else 2 if tile_bytes <= 48 * 1024 else 1
    sms = multiprocessor_count(device)
    per_sm = min(max_threads // threads, max(1, M // (min_rows * sms)))
    options = {"ROWS": tile_rows, "BLOCK": block, "STAGES": stages, "num_warps": warps(threads, device)}
    return (min(triton.cdiv(M, tile_rows), sms * per_sm),), options


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    if x.shape[-1] > _WIDEST:
        return _forward_torch(x, residual, weight, eps, offset)
    out, rstd = _empty_outputs(x)
    total = None if residual is None else _empty_total(x, residual)
    if x.numel() == 0:
        return out, total, rstd.fill_(torch.nan)  # the mean of nothing; rstd has elements where N = 0
    x, residual = rows(x), None if residual is None else rows(residual)
    M, N = x.shape
    # 16 rows: reading weight once per program then adds at most 1/32 to what the rows move.
    sizes = (x.itemsize,) if residual is None else (x.itemsize, residual.itemsize)
    grid, options = _launch_options(M, N, sizes, x.device, min_rows=16, max_threads=1024 // len(sizes))
    launch(
        _rms_norm_fwd_kernel,
        grid,
        *(x, residual, None if weight is None else weight.contiguous(), out, total, rstd),
        *(x.stride(0), 0 if residual is None else residual.stride(0), M, N),
        EPS=eps,
        OFFSET=offset,
        **options,
    )
    return out, total, rstd


def _backward(
    dout: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    if x.shape[-1] > _WIDEST:
        return _backward_torch(dout, dtotal, x, weight, rstd, offset, need_dx, need_dweight)
    dx, dweight = _empty_grads(x, weight, need_dx, need_dweight)
    if x.numel() == 0:
        return dx, dweight.zero_()
    dout, dtotal, x = rows(dout), None if dtotal is None else rows(dtotal), rows(x)
    M, N = x.shape
    # With dweight, a program reads weight, writes a row of float32, and that is read again: 10 bytes per column beside
    # at least 6 per row and column, so that 64 rows keep it below 3 %.
    sizes = (dout.itemsize, x.itemsize) if dtotal is None else (dout.itemsize, x.itemsize, dtotal.itemsize)
    grid, options = _launch_options(M, N, sizes, x.device, min_rows=64 if need_dweight else 16, max_threads=512)
    partials = torch.empty(grid[0], N, dtype=torch.float32, device=x.device) if need_dweight else None
    launch(
        _rms_norm_bwd_kernel,
        grid,
        *(dout, dtotal, x, None if weight is None else weight.contiguous(), rstd, dx if need_dx else None, partials),
        *(dout.stride(0), 0 if dtotal is None else dtotal.stride(0), x.stride(0), M, N),
        OFFSET=offset,
        **options,
    )
    if need_dweight:
        block = 32  # narrow: 128 bytes per row, so that many multiprocessors share the work
        launch(
            _sum_partials_kernel,
            (triton.cdiv(N, block),),
            partials,
            dweight,
            grid[0],
            N,
            ROWS=32,
            BLOCK=block,
            num_warps=4,
        )
    return dx, dweight


def _forward_cpu(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    if not streaming.handles(x, residual, weight):
        return _forward_torch(x, residual, weight, eps, offset)
    out, rstd = _empty_outputs(x)
    total = None if residual is None else _empty_total(x, residual)
    x, residual = rows(x), None if residual is None else rows(residual)
    streaming.rms_norm_forward(x, residual, weight, total, out, rstd, eps=eps, offset=offset)
    return out, total, rstd


def _backward_cpu(
    dout: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    if not streaming.handles(dout, dtotal, x, weight, rstd):
        return _backward_torch(dout, dtotal, x, weight, rstd, offset, need_dx, need_dweight)
    dx, dweight = _empty_grads(x, weight, need_dx, need_dweight)
    dout, dtotal, x = rows(dout), None if dtotal is None else rows(dtotal), rows(x)
    wanted = (dx if need_dx else None, dweight if need_dweight else None)
    streaming.rms_norm_backward(dout, dtotal, x, weight, rstd, *wanted, offset=offset)
    return dx, dweight


def _forward_torch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rounds as the reference does, with one buffer of float32."""
    total = None if residual is None else (x + residual).contiguous()
    h = wide(x if total is None else total).contiguous()
    buffer = h.square()
    rstd = torch.rsqrt(buffer.mean(-1, keepdim=True) + eps)
    xhat = torch.mul(h, rstd, out=buffer)
    if weight is None:
        out = xhat.to(x.dtype)
    elif offset == 0:
        out = xhat.to(x.dtype).mul_(weight)
    else:
        out = xhat.mul_(offset + wide(weight)).to(x.dtype)
    return out, total, rstd.squeeze(-1)


def _backward_torch(
    dout: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx, dweight = _empty_grads(x, weight, need_dx, need_dweight)
    g, rstd = wide(dout), rstd.unsqueeze(-1)
    xhat = wide(x) * rstd
    g_xhat = g * xhat
    if need_dweight:
        dweight.copy_(g_xhat.flatten(0, -2).sum(0))
    if need_dx:
        if weight is not None:
            scale = offset + wide(weight)
            g, g_xhat = g * scale, g_xhat.mul_(scale)
        d = torch.addcmul(g, xhat, g_xhat.mean(-1, keepdim=True), value=-1).mul_(rstd)
        dx.copy_(d if dtotal is None else d.add_(dtotal))
    return dx, dweight


def _empty_outputs(x: Tensor) -> tuple[Tensor, Tensor]:  # out, rstd
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape[:-1], dtype=wide_dtype(x.dtype), device=x.device),
    )


def _empty_total(x: Tensor, residual: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)


def _empty_grads(x: Tensor, weight: Tensor | None, need_dx: bool, need_dweight: bool) -> tuple[Tensor, Tensor]:
    like = x if weight is None else weight
    return (
        torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device),
        torch.empty(like.shape if need_dweight else (0,), dtype=like.dtype, device=x.device),
    )


def _plain(full: Callable[..., tuple[Tensor, Tensor | None, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A forward without a residual stream, as the op rms_norm returns it."""

    def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        out, _, rstd = full(x, None, weight, eps, offset)
        return out, rstd

    return forward


_rms_norm_backward = register(
    "rms_norm_backward(Tensor dout, Tensor x, Tensor? weight, Tensor rstd, float offset, bool need_dx, "
    "bool need_dweight) -> (Tensor, Tensor)",
    triton=lambda dout, *rest: _backward(dout, None, *rest),
    cpu=lambda dout, *rest: _backward_cpu(dout, None, *rest),
    fake=lambda dout, x, weight, rstd, offset, *needs: _empty_grads(x, weight, *needs),
    inlined=True,
)
_add_rms_norm_backward = register(
    "add_rms_norm_backward(Tensor dnormed, Tensor? dtotal, Tensor total, Tensor? weight, Tensor rstd, bool need_dx, "
    "bool need_dweight) -> (Tensor, Tensor)",
    triton=lambda dnormed, dtotal, total, weight, rstd, *needs: _backward(
        dnormed, dtotal, total, weight, rstd, 0.0, *needs
    ),
    cpu=lambda dnormed, dtotal, total, weight, rstd, *needs: _backward_cpu(
        dnormed, dtotal, total, weight, rstd, 0.0, *needs
    ),
    fake=lambda dnormed, dtotal, total, weight, rstd, *needs: _empty_grads(total, weight, *needs),
    inlined=True,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, offset = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.offset = offset
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor | None, drstd: None) -> tuple[Tensor | None, ...]:
    need_dx, need_dweight = ctx.needs_input_grad[:2]
    if dout is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = call(_rms_norm_backward, dout, x, weight, rstd, ctx.offset, need_dx, need_dweight)
    return dx if need_dx else None, dweight if need_dweight else None, None, None


def _add_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _ = inputs
    _, total, rstd = output
    ctx.save_for_backward(total, weight, rstd)
    ctx.dtypes = x.dtype, residual.dtype
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _add_gradient(ctx: Any, dnormed: Tensor | None, dtotal: Tensor | None, drstd: None) -> tuple[Tensor | None, ...]:
    need_x, need_residual, need_dweight = ctx.needs_input_grad[:3]
    d, dweight = dtotal, None  # where only the new residual stream has been used, its gradient passes through
    if dnormed is not None:
        need_d = need_x or need_residual
        d, dweight = call(_add_rms_norm_backward, dnormed, dtotal, *ctx.saved_tensors, need_d, need_dweight)
    if d is None:
        return None, None, dweight if need_dweight else None, None
    dx, dresidual = (d if d.dtype == dtype else d.to(dtype) for dtype in ctx.dtypes)
    return dx if need_x else None, dresidual if need_residual else None, dweight if need_dweight else None, None


_rms_norm = register(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)",
    triton=_plain(_forward),
    cpu=_plain(_forward_cpu),
    fake=lambda x, weight, eps, offset: _empty_outputs(x),
    backward=_gradient,
    setup_context=_setup_context,
    inlined=True,
)
_add_rms_norm = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor, Tensor)",
    triton=lambda x, residual, weight, eps: _forward(x, residual, weight, eps, 0.0),
    cpu=lambda x, residual, weight, eps: _forward_cpu(x, residual, weight, eps, 0.0),
    fake=lambda x, residual, weight, eps: (_empty_outputs(x)[0], _empty_total(x, residual), _empty_outputs(x)[1]),
    backward=_add_gradient,
    setup_context=_add_setup_context,
    inlined=True,
)


def _check(op: str, x: Tensor, weight: Tensor | None) -> None:
    if x.dim() == 0:
        raise ValueError(f"{op}: x () has no dimension to norm over; give it at least one")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight {shape(weight)} must have the shape ({x.shape[-1]},) of the last dimension of x"
        )


def rms_norm(
    x: Tensor,  # (..., N)
    weight: Tensor | None = None,  # (N,), of any floating dtype
    *,
    eps: float = 1e-6,
    offset: float = 0.0,  # 1.0: Gemma's convention, weight around 0
) -> Tensor:  # (..., N), in x.dtype
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in one pass."""
    check_tensors("rms_norm", x=x, weight=weight)
    _check("rms_norm", x, weight)
    if weight is None and offset != 0:
        raise ValueError(f"rms_norm: offset {offset} is added to a weight, and weight is None; pass one or drop offset")
    if fused_by_compiler(x):
        return rms_norm_reference(x, weight, eps=eps, offset=offset)
    return call(_rms_norm, x, weight, float(eps), float(offset))[0]


def add_rms_norm(
    x: Tensor,  # (..., N)
    residual: Tensor,  # (..., N)
    weight: Tensor | None,  # (N,), of any floating dtype
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # (..., N) in x.dtype, (..., N) in the wider dtype of the two
    """(rms_norm(x + residual, weight), x + residual), in one pass: the norm, and the new residual stream.

    The stream may be wider than x, as it is under autocast: it stays so, and the norm comes in the dtype of x.
    """
    check_tensors("add_rms_norm", x=x, residual=residual, weight=weight)
    if x.shape != residual.shape:
        raise ValueError(f"add_rms_norm: x {shape(x)} and residual {shape(residual)} must have the same shape")
    _check("add_rms_norm", x, weight)
    if fused_by_compiler(x):
        return add_rms_norm_reference(x, residual, weight, eps=eps)
    normed, total, _ = call(_add_rms_norm, x, residual, weight, float(eps))
    return normed, total
