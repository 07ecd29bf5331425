"""The streaming ops in C++: against float64, for any number of threads, and what they leave to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttrain_kernels import (
    add_rms_norm,
    add_rms_norm_reference,
    cpp,
    qk_norm_rope,
    qk_norm_rope_reference,
    rms_norm,
    rms_norm_reference,
    rotary_table,
    swiglu,
    swiglu_reference,
)
from fasttrain_kernels.cpp import streaming
from fasttrain_kernels.testing import assert_accurate_over_seeds

pytestmark = pytest.mark.skipif(bool(cpp.missing()), reason=cpp.missing())


def tensor(*shape: int, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape) * scale).requires_grad_()


def heads(D: int, **more: Any) -> dict[str, Any]:
    cos, sin = rotary_table(9, max(D - D % 4, 2), theta=100.0)
    weights = dict(q_weight=tensor(D, scale=1.0), k_weight=tensor(D, scale=1.0))
    return dict(q=tensor(2, 9, 3, D), k=tensor(2, 9, 1, D), cos=cos, sin=sin) | weights | more


def packed(gate_up: Tensor) -> Tensor:
    return swiglu_reference(*gate_up.chunk(2, dim=-1))


# One element, less than a vector, a vector and one, many and a rest
WIDTHS = [1, 7, 17, 100, 1000]
OPS: dict[str, tuple[Any, Any, Any]] = {
    "rms_norm": (rms_norm, rms_norm_reference, lambda n: dict(x=tensor(70, n), weight=tensor(n, scale=1.0))),
    "rms_norm, offset": (
        lambda x, weight: rms_norm(x, weight, offset=1.0),
        lambda x, weight: rms_norm_reference(x, weight, offset=1.0),
        lambda n: dict(x=tensor(3, n), weight=tensor(n, scale=0.1)),
    ),
    "rms_norm, no weight": (rms_norm, rms_norm_reference, lambda n: dict(x=tensor(3, n))),
    "add_rms_norm": (
        add_rms_norm,
        add_rms_norm_reference,
        lambda n: dict(x=tensor(70, n), residual=tensor(70, n), weight=tensor(n, scale=1.0)),
    ),
    "swiglu": (swiglu, swiglu_reference, lambda n: dict(gate=tensor(5, n), up=tensor(5, n))),
    "swiglu, packed": (lambda gate_up: swiglu(gate_up), packed, lambda n: dict(gate_up=tensor(5, 2 * n))),
}


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """The C++ functions that were called."""
    called, function = set(), streaming._function
    monkeypatch.setattr(streaming, "_function", lambda name: called.add(name) or function(name))
    return called


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("name", OPS)
def test_rows_are_as_accurate_as_eager(name, n, used):
    if "norm" in name and n == 1:
        n = 2  # with one feature, terms of dx cancel: test_rms_norm
    op, reference, inputs = OPS[name]
    assert_accurate_over_seeds(op, reference, lambda: inputs(n), seeds=range(10))
    kind = name.partition(",")[0].removeprefix("add_")
    assert used - {"part_rows"} == {f"{kind}_forward", f"{kind}_backward"}


@pytest.mark.parametrize("more", [{}, dict(q_weight=None, k_weight=None), dict(positions=torch.arange(9).flip(0))])
@pytest.mark.parametrize("D", [2, 6, 32, 100])
def test_heads_are_as_accurate_as_eager(D, more, used):
    assert_accurate_over_seeds(qk_norm_rope, qk_norm_rope_reference, lambda: heads(D, **more), seeds=range(10))
    assert {"qk_norm_rope_forward", "qk_norm_rope_backward"} <= used


def test_positions_of_each_row_and_views_of_a_packed_projection(used):
    cos, sin = rotary_table(9, 8, theta=100.0)
    positions = torch.randint(9, (2, 7))
    qkv = torch.randn(2, 7, 5, 8, requires_grad=True)
    weights = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    both = []
    for op in (qk_norm_rope, qk_norm_rope_reference):
        q, k, _ = qkv.split((3, 1, 1), dim=-2)
        out = torch.cat(op(q, k, *weights, cos, sin, positions=positions), dim=2)
        both.append([out, *torch.autograd.grad(out.square().sum(), (qkv, *weights))])
    torch.testing.assert_close(*both)
    assert "qk_norm_rope_backward" in used


@pytest.mark.parametrize("name", [*OPS, "qk_norm_rope"])
def test_threads_change_no_bit(name):
    torch.manual_seed(0)
    op, inputs = (qk_norm_rope, lambda n: heads(32)) if name == "qk_norm_rope" else (OPS[name][0], OPS[name][2])
    given = {key: x.detach().tile(32, *[1] * (x.dim() - 1)) if key in ROWS else x for key, x in inputs(513).items()}
    given = {key: x.requires_grad_() if key not in ("cos", "sin") else x for key, x in given.items()}
    found = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            outs = op(**given)
            outs = outs if isinstance(outs, tuple) else (outs,)
            grads = [x for x in given.values() if x.requires_grad]
            found.append([*outs, *torch.autograd.grad(sum(out.sin().sum() for out in outs), grads)])
        finally:
            torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


ROWS = {"x", "residual", "gate", "up", "gate_up", "q", "k"}


@pytest.mark.parametrize(
    "given",
    [
        dict(x=torch.randn(3, 8).bfloat16()),
        dict(x=torch.randn(3, 8).double()),
        dict(x=torch.randn(0, 8)),
        dict(x=torch.randn(3, 8), weight=torch.randn(8).half()),
    ],
)
def test_other_dtypes_and_empty_tensors_are_torchs(given, used):
    rms_norm(**given)
    swiglu(given["x"], given["x"])
    assert "swiglu_forward" not in used or given["x"].dtype == torch.float32
    assert "rms_norm_forward" not in used


def test_without_a_compiler_torch_computes_it(used, monkeypatch):
    monkeypatch.setattr(cpp, "missing", lambda: "there is no C++ compiler (g++)")
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(rms_norm(x, weight), rms_norm_reference(x, weight))
    qk_norm_rope(**heads(8), positions=torch.arange(9))
    assert not used


def test_gates_of_any_size_give_no_nan_where_torch_gives_none():
    gate = torch.tensor([[-3e38, -100.0, -88.0, -0.0, 0.0, 20.0, 100.0, 3e38]], requires_grad=True)
    up = torch.ones_like(gate)
    for made, expected in zip(
        (swiglu(gate, up), *torch.autograd.grad(swiglu(gate, up).sum(), gate)),
        (swiglu_reference(gate, up), *torch.autograd.grad(swiglu_reference(gate, up).sum(), gate)),
        strict=True,
    ):
        torch.testing.assert_close(made, expected, atol=1e-36, rtol=1e-6)
    assert swiglu(torch.full((1, 3), torch.nan), up[:, :3]).isnan().all()
