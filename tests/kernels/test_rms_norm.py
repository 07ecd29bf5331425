from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasttrain_kernels import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from fasttrain_kernels.ops import rms_norm as module
from fasttrain_kernels.testing import assert_accurate, assert_accurate_over_seeds, interpret

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensor(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return dict(x=tensor(*shape, dtype=dtype), weight=tensor(shape[-1], dtype=dtype, scale=1.0))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def few_programs(monkeypatch):
    """A GPU of 3 multiprocessors: each program stays for many rows."""
    monkeypatch.setattr(module, "multiprocessor_count", lambda device: 3)


# Numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (1, 63), (2, 3, 1000), (300, 64), (3, 4097), (64,)])
def test_the_kernels_are_as_accurate_as_eager(shape, dtype):
    given = inputs(*shape, dtype=dtype)
    with interpret():
        assert_accurate(rms_norm, rms_norm_reference, given)
        assert_accurate(add_rms_norm, add_rms_norm_reference, dict(residual=tensor(*shape, dtype=dtype), **given))


def test_a_single_feature_is_its_sign_and_has_no_gradient():
    """Apart from eps. The terms of dx cancel, so that its error is one of rounding, relative to them."""
    given = inputs(3, 1)
    with interpret():
        out = rms_norm(**given)
        (dx,) = torch.autograd.grad(out.sum(), given["x"])
    torch.testing.assert_close(out, given["x"].sign() * given["weight"], rtol=1e-5, atol=0)
    torch.testing.assert_close(dx, torch.zeros(3, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(weight="same", eps=0.5),
        dict(weight="same", offset=1.0),
        dict(weight="other"),
        dict(weight="other", offset=-0.5),
        dict(weight=None, residual=True),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_options_are_as_accurate_as_eager(options, dtype):
    def given():
        other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
        found = options | dict(x=tensor(5, 100, dtype=dtype))
        if options.get("weight"):
            found["weight"] = tensor(100, dtype=dtype if options["weight"] == "same" else other)
        if options.get("residual"):
            found["residual"] = tensor(5, 100, dtype=dtype)
        return found

    op, reference = (add_rms_norm, add_rms_norm_reference) if "residual" in options else (rms_norm, rms_norm_reference)
    with interpret():
        assert_accurate_over_seeds(op, reference, given, seeds=range(10))


@pytest.mark.parametrize("M", [1, 2, 7, 64, 301])  # fewer rows than programs, and many more; ragged last tiles
def test_any_number_of_rows_per_program(M, few_programs):
    with interpret() as launches:
        assert_accurate(rms_norm, rms_norm_reference, inputs(M, 1000, dtype=torch.bfloat16))
    # One for each tile of 4 rows while that gives work to fewer than 3 multiprocessors; then 1 to 4 on each.
    assert launches[0].grid[0] == {1: 1, 2: 1, 7: 2, 64: 3, 301: 12}[M]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=st.integers(0, 5), features=st.just(0) | st.integers(2, 1100), dtype=st.sampled_from(DTYPES))
def test_any_shape_works_trap_16_empty_ones_too(rows, features, dtype):
    x, residual, weight = tensor(rows, features, dtype=dtype), tensor(rows, features, dtype=dtype), tensor(features)

    def check():
        assert_accurate(rms_norm, rms_norm_reference, dict(x=x, weight=weight))
        assert_accurate(add_rms_norm, add_rms_norm_reference, dict(x=x, residual=residual, weight=weight))

    check()
    with interpret():
        check()


def test_trap_16_the_weight_of_an_empty_batch_gets_zeros():
    given = inputs(0, 8)
    with interpret():
        rms_norm(**given).sum().backward()
    assert given["weight"].grad.tolist() == [0.0] * 8


def test_rows_wider_than_a_program_holds_take_the_torch_form():
    given = inputs(2, module._WIDEST + 1)
    with interpret() as launches:
        assert_accurate(rms_norm, rms_norm_reference, given)
        assert_accurate(add_rms_norm, add_rms_norm_reference, dict(residual=tensor(*given["x"].shape), **given))
        assert not launches
        assert_accurate(rms_norm, rms_norm_reference, inputs(2, module._WIDEST))
        assert launches


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("x", ["zeros", "tiny", "large", "outlier"])
def test_extreme_values(x, offset):
    rows = {
        "zeros": torch.zeros(2, 96),
        "tiny": torch.full((2, 96), 6e-8),  # the smallest fp16
        "large": torch.full((2, 96), 1e4),  # whose square overflows fp16
        "outlier": torch.randn(2, 96).index_fill(1, torch.tensor([5]), 6e4),
    }[x]
    x, weight = rows.half().requires_grad_(), tensor(96, dtype=torch.float16)
    with interpret():
        out = rms_norm(x, weight, offset=offset)
        assert out.isfinite().all()
        assert_accurate(rms_norm, rms_norm_reference, dict(x=x, weight=weight, offset=offset))


@pytest.mark.parametrize("eps", [1e-5, np.float64(1e-5), np.float32(1e-5), torch.tensor(1e-5, dtype=torch.float64)])
def test_trap_1_a_double_eps_promotes_nothing(eps):
    given = inputs(3, 64, dtype=torch.bfloat16)
    expected = rms_norm_reference(**given, eps=1e-5)
    with interpret():
        out = rms_norm(**given, eps=eps)
        _, rstd = module._rms_norm(*given.values(), eps, 0.0)
        normed, total = add_rms_norm(given["x"], given["x"], given["weight"], eps=eps)
    assert (out.dtype, normed.dtype, total.dtype, rstd.dtype) == (*[torch.bfloat16] * 3, torch.float32)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)


def hf(name: str, weight: Tensor) -> torch.nn.Module:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = {"llama": LlamaRMSNorm, "qwen3": Qwen3RMSNorm, "gemma": GemmaRMSNorm}[name](len(weight), eps=1e-5)
    norm.weight.data = weight.detach()
    return norm


@pytest.mark.parametrize("on_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "offset"), [("llama", 0.0), ("qwen3", 0.0), ("gemma", 1.0)])
def test_trap_14_rounding_and_eps_are_those_of_the_models(name, offset, dtype, on_kernels):
    given = inputs(64, 320, dtype=dtype)
    expected = hf(name, given["weight"])(given["x"])
    if on_kernels:
        with interpret():
            out = rms_norm(**given, eps=1e-5, offset=offset)
    else:
        out = rms_norm(**given, eps=1e-5, offset=offset)
    assert out.dtype == expected.dtype
    different = (out != expected).float().mean()
    assert different < 1e-3  # float32 sums in another order: rarely, rstd differs by one unit and a rounding by one
    torch.testing.assert_close(out, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_trap_14_the_other_rounding_order_would_fail():
    """Otherwise the test above would prove nothing."""
    given = inputs(64, 320, dtype=torch.bfloat16)
    rounded_once = rms_norm(given["x"], given["weight"].detach() - 1, offset=1.0)
    assert (rounded_once != hf("llama", given["weight"])(given["x"])).float().mean() > 0.05


@pytest.mark.parametrize("on_kernels", [True, False])
def test_float32_equals_torch(on_kernels):
    given = inputs(5, 200)
    expected = torch.nn.functional.rms_norm(given["x"], (200,), given["weight"], eps=1e-6)
    if on_kernels:
        with interpret():
            out = rms_norm(**given)
    else:
        out = rms_norm(**given)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_add_is_rms_norm_of_the_rounded_sum():
    x, residual = tensor(4, 96, dtype=torch.bfloat16), tensor(4, 96, dtype=torch.bfloat16)
    weight = tensor(96, dtype=torch.bfloat16)
    for context in (interpret(), torch.enable_grad()):
        with context:
            normed, total = add_rms_norm(x, residual, weight)
            assert torch.equal(total, x + residual)
            assert torch.equal(normed, rms_norm(total, weight))


def views(x: Tensor) -> dict[str, Tensor]:
    """The same (4, 6, 32) values in other layouts, and broadcasts."""
    return {
        "transposed": x.transpose(0, 2).contiguous().transpose(0, 2),
        "permuted": x.transpose(0, 1).contiguous().transpose(0, 1),
        "slice of a packed projection": torch.cat([x, x], -1)[..., :32],
        "every second column": x.repeat_interleave(2, -1)[..., ::2],
        "broadcast rows": x[:1, :1].expand(4, 6, 32),
        "broadcast columns": x[..., :1].expand(4, 6, 32),
    }


LAYOUTS = list(views(torch.zeros(4, 6, 32)))


@pytest.mark.parametrize("on_kernels", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trap_12_any_strides_of_inputs_and_upstream_gradients(layout, on_kernels):
    x, residual, dout, dtotal = (views(torch.randn(4, 6, 32))[layout] for _ in range(4))
    x.requires_grad_(), residual.requires_grad_()
    weight = torch.randn(64)[::2].requires_grad_()

    def gradients(norm, add_norm):
        return [
            *torch.autograd.grad(norm(x, weight), (x, weight), dout),
            *torch.autograd.grad(add_norm(x, residual, weight), (x, residual, weight), (dout, dtotal)),
        ]

    if on_kernels:
        with interpret():
            got = gradients(rms_norm, add_rms_norm)
    else:
        got = gradients(rms_norm, add_rms_norm)
    torch.testing.assert_close(got, gradients(rms_norm_reference, add_rms_norm_reference))


@pytest.mark.parametrize("on_kernels", [True, False])
def test_trap_3_upstream_gradients_are_not_written_and_gradients_share_no_memory(on_kernels):
    x, residual, weight = tensor(4, 64), tensor(4, 64), tensor(64)
    upstream = torch.randn(4, 64), torch.randn(4, 64)
    before = [g.clone() for g in upstream]
    with interpret() if on_kernels else torch.enable_grad():
        torch.autograd.backward(add_rms_norm(x, residual, weight), upstream)
    assert all(map(torch.equal, upstream, before))
    x.grad += 1  # as gradient clipping does
    assert torch.equal(x.grad, residual.grad + 1)


def test_trap_2_every_element_of_every_output_is_written(few_programs):
    """interpret() fills what is not initialised with NaN."""
    with interpret():
        x, residual, weight = tensor(37, 100), tensor(37, 100), tensor(100)
        outputs = add_rms_norm(x, residual, weight)
        gradients = torch.autograd.grad(outputs, (x, residual, weight), [torch.ones(37, 100)] * 2)
        _, rstd = module._rms_norm(x, None, 1e-6, 0.0)
    assert all(t.isfinite().all() for t in (*outputs, *gradients, rstd))


def test_trap_9_addresses_are_64_bit():
    """Rows 2^31 and more elements apart; only the touched pages exist."""
    far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((2, 32), (2**31 + 32, 1))
    far.copy_(torch.randn(2, 32))
    near = far.clone()
    weight = tensor(32)
    with interpret(poison=False):
        x = far.detach().requires_grad_()
        got = torch.autograd.grad((rms_norm(x, weight), *add_rms_norm(x, far, weight)), (x, weight), [far] * 3)
        x = near.detach().requires_grad_()
        expected = torch.autograd.grad((rms_norm(x, weight), *add_rms_norm(x, near, weight)), (x, weight), [near] * 3)
    assert all(map(torch.equal, got, expected))


def test_the_result_does_not_depend_on_the_order_of_programs(few_programs):
    x, residual, weight = tensor(50, 500), tensor(50, 500), tensor(500)
    results = []
    for order in (None, "reverse", 7):
        with interpret(order=order):
            outputs = add_rms_norm(x, residual, weight)
            results.append([*outputs, *torch.autograd.grad(outputs, (x, residual, weight), [x.detach()] * 2)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


def test_dweight_of_many_rows_keeps_float32_accuracy(few_programs):
    """In bf16, adding up 2,048 ones would stop at 256."""
    x = torch.ones(2048, 16, dtype=torch.bfloat16)
    weight = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    with interpret():
        rms_norm(x, weight).sum().backward()
    assert weight.grad.tolist() == [2048.0] * 16


# Memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "N"), [(16384, 1024), (8192, 4096)])
def test_issued_bytes_are_within_5_percent_of_the_physical_limit(tokens, N, dtype, monkeypatch):
    """Two multiprocessors of an H100 with their share of the tokens: as many rows for each program, in less time."""
    monkeypatch.setattr(module, "multiprocessor_count", lambda device: 2)
    M = tokens * 2 // 132
    x, residual, weight = tensor(M, N, dtype=dtype), tensor(M, N, dtype=dtype), tensor(N, dtype=dtype)
    row, tile, rstd = N * x.element_size(), M * N * x.element_size(), M * 4
    with interpret() as launches:
        rms_norm(x, weight).backward(x.detach())
    forward, *backward = launches
    assert forward.moved <= 1.05 * (2 * tile + row + rstd)
    assert sum(launch.moved for launch in backward) <= 1.05 * (3 * tile + 2 * row + rstd)
    with interpret() as launches:
        torch.autograd.backward(add_rms_norm(x, residual, weight), [x.detach()] * 2)
    forward, *backward = launches
    assert forward.moved <= 1.05 * (4 * tile + row + rstd)
    assert sum(launch.moved for launch in backward) <= 1.05 * (4 * tile + 2 * row + rstd)


def test_trap_17_a_gradient_nobody_asked_for_costs_nothing():
    M, N = 8, 128
    x, residual, weight, dout = tensor(M, N), tensor(M, N), tensor(N), torch.randn(M, N)
    tile, row = M * N * 4, N * 4

    def moved(function, *frozen, gradients=(dout,)):
        for t in (x, residual, weight):
            t.requires_grad_(not any(t is f for f in frozen))
        with interpret():
            outputs = function()
        outputs = [o for o, g in zip(outputs, gradients, strict=True) if g is not None]
        with interpret() as launches:
            torch.autograd.backward(outputs, [g for g in gradients if g is not None])
        assert all(t.grad is None for t in frozen)
        x.grad = residual.grad = weight.grad = None
        return {n: t.moved for launch in launches if "rms" in launch.kernel for n, t in launch.arguments.items()}

    plain = lambda: (rms_norm(x, weight),)  # noqa: E731
    both = lambda: add_rms_norm(x, residual, weight)  # noqa: E731
    rstd = M * 4
    dx_only = dict(dout=tile, x=tile, weight=row, rstd=rstd, dx=tile)
    assert moved(plain, residual, weight) == dx_only
    assert moved(plain, residual, x) == dict(dout=tile, x=tile, weight=row, rstd=rstd, partials=row)
    assert moved(both, weight, gradients=(dout, None)) == dx_only
    assert moved(both, weight, gradients=(dout, dout)) == dx_only | dict(dtotal=tile)
    assert moved(both, gradients=(None, dout)) == {}
    assert moved(both, x, residual, gradients=(dout, None)) == dict(
        dout=tile, x=tile, weight=row, rstd=rstd, partials=row
    )


# Contract


@pytest.mark.parametrize("weight", [torch.randn(32, requires_grad=True), None], ids=["weight", "no weight"])
@pytest.mark.parametrize("layout", ["slice of a packed projection", "transposed", "broadcast columns"])
def test_opcheck(layout, weight):
    x = views(torch.randn(4, 6, 32))[layout]
    a, b = x.detach().requires_grad_(), x.detach().requires_grad_()
    torch.library.opcheck(module._rms_norm, (a, weight, 1e-6, 0.0))
    torch.library.opcheck(module._add_rms_norm, (a, b, weight, 1e-6))
    rstd = torch.randn(4, 6)
    for needs in [(True, False)] if weight is None else [(True, True), (False, True), (True, False)]:
        for op, arguments in (
            (module._rms_norm_backward, (x, x, weight, rstd, 0.0)),
            (module._add_rms_norm_backward, (x, x, x, weight, rstd)),
            (module._add_rms_norm_backward, (x, None, x, weight, rstd)),
        ):
            torch.library.opcheck(op, (*arguments, *needs), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_form_is_as_accurate_as_the_reference(dtype):
    given, residual = inputs(7, 130, dtype=dtype), tensor(7, 130, dtype=dtype)
    assert_accurate(rms_norm, rms_norm_reference, given)
    assert_accurate(rms_norm, rms_norm_reference, given | dict(offset=1.0))
    assert_accurate(rms_norm, rms_norm_reference, given | dict(weight=None))
    assert_accurate(add_rms_norm, add_rms_norm_reference, given | dict(residual=residual))


def test_gradcheck_on_the_cpu_form():
    x, residual = (torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    for offset in (0.0, 1.0):
        assert torch.autograd.gradcheck(lambda x, w, o=offset: rms_norm(x, w, offset=o), (x, weight))
    assert torch.autograd.gradcheck(rms_norm, (x,))
    assert torch.autograd.gradcheck(add_rms_norm, (x, residual, weight))
    assert torch.autograd.gradcheck(lambda x, r, w: add_rms_norm(x, r, w)[1], (x, residual, weight))


def test_compiles_into_one_graph_for_all_lengths():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def block(x, residual, weight):
        normed, residual = add_rms_norm(rms_norm(x, weight, offset=1.0), residual, weight)
        return normed * residual

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for length in (8, 13):
        x, residual, weight = tensor(2, length, 32), tensor(2, length, 32), tensor(32)
        arguments = (x, residual, weight)
        got = torch.autograd.grad(compiled(*arguments).sum(), arguments)
        torch.testing.assert_close(got, torch.autograd.grad(block(*arguments).sum(), arguments))
        frames.append(counter.frame_count)
    assert frames[0] == frames[1]


def test_autocast_keeps_the_dtype_of_x():
    x, weight = tensor(4, 32, dtype=torch.bfloat16), tensor(32)
    with torch.autocast("cpu", torch.bfloat16):
        out = rms_norm(x, weight)
        out.sum().backward()
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_double_backward_raises():
    x, weight = tensor(2, 8), tensor(8)
    (dx,) = torch.autograd.grad(rms_norm(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^rms_norm_backward: .* use the plain rms_norm_reference$"):
        dx.sum().backward()
    (dx,) = torch.autograd.grad(add_rms_norm(x, x, weight)[0].sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^add_rms_norm_backward: .* use the plain add_rms_norm_reference$"):
        dx.sum().backward()


def test_errors_name_the_op_the_values_and_the_remedy():
    x, weight = torch.randn(8, 16), torch.randn(16)
    shape = r"^rms_norm: weight \(8,\) must have the shape \(16,\) of the last dimension of x$"
    with pytest.raises(ValueError, match=shape):
        rms_norm(x, weight[:8])
    with pytest.raises(ValueError, match=r"^rms_norm: x \(\) has no dimension to norm over; give it at least one$"):
        rms_norm(x[0, 0])
    with pytest.raises(
        ValueError, match=r"^rms_norm: offset 1.0 is added to a weight, and weight is None; pass one or drop offset$"
    ):
        rms_norm(x, offset=1.0)
    with pytest.raises(
        ValueError, match=r"^add_rms_norm: x \(8, 16\) and residual \(4, 16\) must have the same shape$"
    ):
        add_rms_norm(x, x[:4], weight)
    with pytest.raises(TypeError, match=r"^rms_norm: weight has dtype torch.int64; supported are "):
        rms_norm(x, weight.long())
    with pytest.raises(ValueError, match=r"^rms_norm: x is on cpu and weight on meta; move them to one device$"):
        rms_norm(x, weight.to("meta"))
    with (
        interpret(),
        pytest.raises(TypeError, match=r"^rms_norm: x is float64; .* use rms_norm_reference for float64$"),
    ):
        rms_norm(x.double(), weight)


def test_trap_8_dtensors_are_rejected():
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        x = torch.randn(4, 8)
        sharded = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match=r"^rms_norm: weight is a DTensor; .* pass weight.to_local\(\)$"):
            rms_norm(x, sharded)
        with pytest.raises(TypeError, match=r"^add_rms_norm: weight is a DTensor; "):
            add_rms_norm(x, x, sharded)
        torch.testing.assert_close(rms_norm(x, sharded.to_local()), rms_norm_reference(x))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (4096, 1024), (5000, 4096), (100, 16384)])
def test_on_a_gpu(shape, dtype):
    x, residual = (tensor(*shape, dtype=dtype).detach().cuda().requires_grad_() for _ in range(2))
    weight = tensor(shape[-1], dtype=dtype).detach().cuda().requires_grad_()
    assert_accurate(rms_norm, rms_norm_reference, dict(x=x, weight=weight))
    assert_accurate(add_rms_norm, add_rms_norm_reference, dict(x=x, residual=residual, weight=weight))


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
@pytest.mark.parametrize("weight", [None, torch.float32, torch.bfloat16])
def test_a_wider_residual_stream_stays_wide(implementation, weight):
    """Under autocast x is bf16 and the stream float32."""
    inputs: dict[str, Any] = dict(
        x=torch.randn(5, 300).bfloat16().requires_grad_(),
        residual=torch.randn(5, 300).requires_grad_(),
        weight=None if weight is None else torch.randn(300).to(weight).requires_grad_(),
    )
    with interpret() if implementation == "triton" else torch.enable_grad():
        normed, total = add_rms_norm(**inputs)
        assert (normed.dtype, total.dtype) == (torch.bfloat16, torch.float32)
        assert_accurate(add_rms_norm, add_rms_norm_reference, inputs)
    torch.library.opcheck(module._add_rms_norm, (*inputs.values(), 1e-6))
