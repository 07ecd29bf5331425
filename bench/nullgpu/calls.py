"""What a call of each op costs the host, beside torch's and (where installed) Liger's: CPU microseconds as JSON.

    python -m bench.nullgpu bench/nullgpu/calls.py

Forward and backward in bf16, one after the other in one thread: what is measured is Python, dispatcher, autograd and
launches, for on the null GPU nothing is computed. Then the same in compiled graphs of ten calls, beside the formula in
plain torch, with matmuls between calls as in a model: otherwise ten formulas would be one kernel.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fasttrain_kernels as ft

M, C, WIDTH, V, B, T, H, D = 4096, 768, 2048, 50_304, 4, 1024, 12, 64
CALLS, ROUNDS, WARM_UP = 100, 9, 10

Call = Callable[[], Any]


def calls() -> dict[str, dict[str, Call]]:
    """By op and implementation."""

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    x, residual, weight = tensor(M, C), tensor(M, C), tensor(C)
    gate, up, head, target = tensor(M, WIDTH), tensor(M, WIDTH), tensor(V, C), torch.zeros(M, dtype=torch.int64).cuda()
    q, k, v = (tensor(B, T, H, D) for _ in range(3))
    qkv, q_weight, k_weight = tensor(B, T, 3 * H, D), tensor(D), tensor(D)
    cos, sin = (table.cuda() for table in ft.rotary_table(T, D))

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)

    def qk_norm_rope() -> tuple[Tensor, Tensor]:
        return ft.qk_norm_rope(qkv[:, :, :H], qkv[:, :, H : 2 * H], q_weight, k_weight, cos, sin)

    found: dict[str, dict[str, Call]] = {
        "rms_norm": {"fasttrain": lambda: ft.rms_norm(x, weight), "torch": lambda: F.rms_norm(x, (C,), weight, 1e-6)},
        "add_rms_norm": {"fasttrain": lambda: ft.add_rms_norm(x, residual, weight)},
        "swiglu": {"fasttrain": lambda: ft.swiglu(gate, up)},
        "qk_norm_rope": {"fasttrain": qk_norm_rope},
        "attention": {"fasttrain": lambda: ft.attention(q, k, v, backend="triton"), "torch": sdpa},
        "linear_cross_entropy": {"fasttrain": lambda: ft.linear_cross_entropy(x, head, target)},
    }
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError:
        return found
    found["rms_norm"]["Liger"] = lambda: liger.liger_rms_norm(x, weight, 1e-6)
    found["add_rms_norm"]["Liger"] = lambda: liger.liger_fused_add_rms_norm(x, residual, weight, 1e-6)
    found["swiglu"]["Liger"] = lambda: liger.liger_swiglu(gate, up)
    found["linear_cross_entropy"]["Liger"] = lambda: liger.liger_fused_linear_cross_entropy(x, head, target)
    return found


def both_ways(call: Call) -> Call:
    """With gradients of everything, from dense ones."""
    given = [torch.ones_like(out) for out in _outputs(call())]

    def run() -> None:
        torch.autograd.backward(_outputs(call()), given)

    return run


def _outputs(result: Any) -> list[Tensor]:
    outputs = result if isinstance(result, tuple) else (result,)
    return [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]


def measure(implementations: dict[str, Call]) -> dict[str, float]:
    """The median of the rounds, which are interleaved."""
    spent: dict[str, list[float]] = {name: [] for name in implementations}
    for call in implementations.values():
        for _ in range(WARM_UP):
            call()
    for _ in range(ROUNDS):
        for name, call in implementations.items():
            start = time.process_time()
            for _ in range(CALLS):
                call()
            spent[name].append((time.process_time() - start) / CALLS * 1e6)
    return {name: statistics.median(taken) for name, taken in spent.items()}


State = tuple[Tensor, Tensor]  # (M, C) each: activations, and what goes beside them


def chains() -> dict[str, dict[str, Callable[[State], State]]]:
    """By op and implementation: from matmul to matmul."""

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    weight, matrix, wide, head_weight = tensor(C), tensor(C, C), tensor(C, 2 * C), tensor(D)
    cos, sin = (table.cuda() for table in ft.rotary_table(T, D))

    def heads(x: Tensor) -> Tensor:
        return x.view(B, T, H, D)

    def rotated(x: Tensor) -> Tensor:
        a, b = F.rms_norm(x, (D,), head_weight, 1e-6).chunk(2, dim=-1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1).type_as(x)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def added(x: Tensor, residual: Tensor) -> State:
        residual = x + residual
        return F.rms_norm(residual, (C,), weight, 1e-6), residual

    def sdpa(q: Tensor) -> Tensor:
        q = q.transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)

    def of_x(op: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
        return lambda state: (op(state[0]) @ matrix, state[1])

    def of_wide(op: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
        return lambda state: (op(state[0] @ wide) @ matrix, state[1])

    def of_both(op: Callable[[Tensor, Tensor], State]) -> Callable[[State], State]:
        def step(state: State) -> State:
            x, residual = op(*state)
            return x @ matrix, residual

        return step

    def of_heads(op: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[State], State]:
        def step(state: State) -> State:
            q, k = op(heads(state[0]), heads(state[1]))
            return q.reshape(M, C) @ matrix, k.reshape(M, C) @ matrix

        return step

    return {
        "rms_norm": {
            "fasttrain": of_x(lambda x: ft.rms_norm(x, weight)),
            "formula": of_x(lambda x: F.rms_norm(x, (C,), weight, 1e-6)),
        },
        "add_rms_norm": {
            "fasttrain": of_both(lambda x, residual: ft.add_rms_norm(x, residual, weight)),
            "formula": of_both(added),
        },
        "swiglu": {
            "fasttrain": of_wide(lambda x: ft.swiglu(*x.chunk(2, dim=-1))),
            "formula": of_wide(gated),
        },
        "qk_norm_rope": {
            "fasttrain": of_heads(lambda q, k: ft.qk_norm_rope(q, k, head_weight, head_weight, cos, sin)),
            "formula": of_heads(lambda q, k: (rotated(q), rotated(k))),
        },
        "attention": {
            "fasttrain": of_x(lambda x: ft.attention(*[heads(x)] * 3, backend="triton").reshape(M, C)),
            "formula": of_x(lambda x: sdpa(heads(x)).reshape(M, C)),
        },
    }


def in_graphs() -> dict[str, dict[str, float]]:
    """Microseconds of a call and its matmuls in a graph of ten, forward and backward."""
    x, residual = (torch.zeros(M, C, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

    def graph(step: Callable[[State], State]) -> Call:
        def ten(x: Tensor, residual: Tensor) -> State:
            state = x, residual
            for _ in range(10):
                state = step(state)
            return state

        torch._dynamo.reset()
        compiled = torch.compile(ten, fullgraph=True)
        return both_ways(lambda: compiled(x, residual))

    found = {op: measure({name: graph(step) for name, step in steps.items()}) for op, steps in chains().items()}
    return {op: {name: spent / 10 for name, spent in graphs.items()} for op, graphs in found.items()}


def main() -> None:
    torch.autograd.set_multithreading_enabled(False)
    table = {}
    for op, implementations in calls().items():
        with torch.no_grad():
            forward = measure(implementations)
        both = measure({name: both_ways(call) for name, call in implementations.items()})
        table[op] = {name: {"forward": forward[name], "forward and backward": both[name]} for name in both}
    torch.autograd.set_multithreading_enabled(True)
    print(json.dumps([table, in_graphs()]))


if __name__ == "__main__":
    main()
