import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fasttrain_kernels import linear, swiglu, swiglu_linear, swiglu_linear_reference, swiglu_reference
from fasttrain_kernels.ops.swiglu import (
    _swiglu,
    _swiglu_backward,
    _swiglu_packed,
    _swiglu_packed_backward,
    _swiglu_packed_backward_again,
)
from fasttrain_kernels.testing import assert_accurate, interpret

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def eager(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def packed(function):
    return lambda gate: function(*gate.chunk(2, dim=-1))


def tensor(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()  # 3: outliers that saturate the sigmoid


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 3, 1000), (2, 1025), (64,)])
def test_the_kernel_is_as_accurate_as_eager(shape, dtype):
    with interpret():
        assert_accurate(
            swiglu,
            swiglu_reference,
            dict(gate=tensor(*shape, dtype=dtype), up=tensor(*shape, dtype=dtype)),
            eager=eager,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2), (2, 5, 126), (3, 4096)])
def test_a_packed_projection_is_the_same(shape, dtype):
    with interpret():
        inputs = dict(gate=tensor(*shape, dtype=dtype))
        assert_accurate(swiglu, packed(swiglu_reference), inputs, eager=packed(eager))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=st.integers(0, 5), features=st.integers(0, 1100), dtype=st.sampled_from(DTYPES))
def test_any_shape_works_trap_16_empty_ones_too(rows, features, dtype):
    gate, up = tensor(rows, features, dtype=dtype), tensor(rows, features, dtype=dtype)
    assert_accurate(swiglu, swiglu_reference, dict(gate=gate, up=up), eager=eager)
    with interpret():
        assert_accurate(swiglu, swiglu_reference, dict(gate=gate, up=up), eager=eager)


@pytest.mark.parametrize("value", [1e4, -1e4, 6e4, -6e4])
def test_large_values_do_not_overflow(value):
    with interpret():
        gate = torch.full((1, 8), value, dtype=torch.float16)
        torch.testing.assert_close(swiglu(gate, gate / value), swiglu_reference(gate, gate / value))


def views(x: Tensor) -> dict[str, Tensor]:
    """Trap 12: the same (4, 6, 32) values in other layouts, and a broadcast."""
    return {
        "transposed": x.transpose(0, 2).contiguous().transpose(0, 2),
        "permuted": x.transpose(0, 1).contiguous().transpose(0, 1),
        "slice of a packed projection": torch.cat([x, x], -1)[..., :32],
        "every second column": x.repeat_interleave(2, -1)[..., ::2],
        "broadcast rows": x[:1, :1].expand(4, 6, 32),
        "broadcast columns": x[..., :1].expand(4, 6, 32),
    }


@pytest.mark.parametrize("layout", views(torch.zeros(4, 6, 32)))
def test_trap_12_any_strides_of_inputs_and_upstream_gradient(layout):
    torch.manual_seed(0)
    gate, up, dout = (views(torch.randn(4, 6, 32))[layout] for _ in range(3))
    with interpret():
        assert_accurate(swiglu, swiglu_reference, dict(gate=gate.requires_grad_(), up=up.requires_grad_()))
        got = torch.autograd.grad(swiglu(gate, up), (gate, up), dout)
    expected = torch.autograd.grad(swiglu_reference(gate, up), (gate, up), dout)
    torch.testing.assert_close(got, expected)


def test_trap_3_the_upstream_gradient_is_not_written():
    gate, up, dout = tensor(2, 8), tensor(2, 8), torch.randn(2, 8)
    before = dout.clone()
    with interpret():
        swiglu(gate, up).backward(dout)
    assert torch.equal(dout, before)


def test_trap_9_addresses_are_64_bit():
    """Rows 2^31 and more elements apart; only the touched pages exist."""
    far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((2, 32), (2**31 + 32, 1))
    with interpret(poison=False):
        far.copy_(torch.randn(2, 32))
        torch.testing.assert_close(swiglu(far, far), swiglu_reference(far, far))
        gate = far.detach().requires_grad_()
        swiglu(gate, far).backward(far)
    assert gate.grad.isfinite().all()


@pytest.mark.parametrize(("frozen", "tensors_read"), [("up", 3), ("gate", 2)])  # dup needs dout and gate only
def test_trap_17_a_frozen_operand_costs_nothing(frozen, tensors_read):
    inputs = dict(gate=tensor(4, 512), up=tensor(4, 512))
    inputs[frozen].requires_grad_(False)
    with interpret() as launches:
        swiglu(**inputs).backward(torch.ones(4, 512))
    nbytes = 4 * 512 * 4
    assert (launches[-1].loaded, launches[-1].stored) == (tensors_read * nbytes, nbytes)
    assert [name for name, value in inputs.items() if value.grad is None] == [frozen]


@pytest.mark.parametrize("packed_projection", [False, True])
def test_bytes_are_the_physical_limit(packed_projection):
    M, F, size = 64, 3072, 2
    with interpret() as launches:
        if packed_projection:
            out = swiglu(tensor(M, 2 * F, dtype=torch.bfloat16))
        else:
            out = swiglu(tensor(M, F, dtype=torch.bfloat16), tensor(M, F, dtype=torch.bfloat16))
        out.backward(torch.ones_like(out))
    forward, backward = launches
    assert forward.moved == 3 * M * F * size
    assert backward.moved == 5 * M * F * size


def test_the_result_does_not_depend_on_the_order_of_programs():
    gate, up = tensor(3, 2048), tensor(3, 2048)
    results = []
    for order in (None, "reverse", 7):
        with interpret(order=order):
            out = swiglu(gate, up)
            results.append([out, *torch.autograd.grad(out, (gate, up), torch.ones_like(out))])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("layout", [None, *views(torch.zeros(4, 6, 32))])
def test_opcheck(layout):
    x = torch.randn(4, 6, 32) if layout is None else views(torch.randn(4, 6, 32))[layout]
    gate, up = x.detach().requires_grad_(), x.detach().requires_grad_()
    torch.library.opcheck(_swiglu, (gate, up))
    torch.library.opcheck(_swiglu_packed, (gate,))
    torch.library.opcheck(_swiglu_backward, (x, x, x, True, True), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(_swiglu_backward, (x, x, x, True, False), test_utils=("test_schema", "test_faketensor"))
    for op in (_swiglu_packed_backward, _swiglu_packed_backward_again):
        torch.library.opcheck(op, (x[..., :16], x), test_utils=("test_schema", "test_faketensor"))


def test_gradcheck_on_the_cpu_form():
    inputs = [torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(swiglu, inputs)
    assert torch.autograd.gradcheck(swiglu, inputs[:1])


def test_double_backward_raises():
    gate, up = tensor(2, 8), tensor(2, 8)
    (dgate,) = torch.autograd.grad(swiglu(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(NotImplementedError, match="swiglu_backward: .* use the plain swiglu_reference"):
        dgate.sum().backward()


def test_errors_name_the_op_the_values_and_the_remedy():
    x = torch.randn(8, 16)
    with pytest.raises(ValueError, match=r"^swiglu: gate \(8, 16\) and up \(4, 16\) must have the same shape$"):
        swiglu(x, x[:4])
    with pytest.raises(
        TypeError, match=r"^swiglu: gate is torch.float32 and up torch.bfloat16; cast them to one dtype$"
    ):
        swiglu(x, x.bfloat16())
    with pytest.raises(ValueError, match=r"^swiglu: packed gate and up \(8, 15\) must have an even last dimension$"):
        swiglu(x[:, :15])
    with pytest.raises(TypeError, match=r"^swiglu: gate has dtype torch.int64; supported are "):
        swiglu(x.long(), x.long())
    with pytest.raises(ValueError, match=r"^swiglu: gate is on cpu and up on meta; move them to one device$"):
        swiglu(x, x.to("meta"))
    with pytest.raises(TypeError, match=r"^swiglu: up must be a tensor, got int$"):
        swiglu(x, 3)  # type: ignore[arg-type]
    with interpret(), pytest.raises(TypeError, match=r"^swiglu: gate is float64; .* use swiglu_reference for float64$"):
        swiglu(x.double(), x.double())


# With the projection that follows


def two_calls(gate_up: Tensor, weight: Tensor) -> Tensor:
    return linear(swiglu(gate_up), weight)


def gradients(function, gate_up: Tensor, weight: Tensor, dout: Tensor) -> list[Tensor]:
    out = function(gate_up, weight)
    return [out, *torch.autograd.grad(out, [x for x in (gate_up, weight) if x.requires_grad], dout)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "F", "N"), [((1,), 1, 1), ((3,), 63, 5), ((2, 5), 1025, 7), ((0,), 8, 3)])
def test_with_the_projection_it_has_the_bits_of_two_calls(rows, F, N, dtype):
    gate_up, weight = tensor(*rows, 2 * F, dtype=dtype), tensor(N, F, dtype=dtype, scale=F**-0.5)
    dout = torch.randn(*rows, N).to(dtype)
    with interpret():
        expected = gradients(two_calls, gate_up, weight, dout)
        torch.testing.assert_close(gradients(swiglu_linear, gate_up, weight, dout), expected, rtol=0, atol=0)
    on_cpu = gradients(two_calls, gate_up, weight, dout)
    torch.testing.assert_close(gradients(swiglu_linear, gate_up, weight, dout), on_cpu, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_projection_it_is_as_accurate_as_eager(dtype):
    inputs = dict(gate_up=tensor(2, 33, 128, dtype=dtype), weight=tensor(24, 64, dtype=dtype, scale=0.1))
    with interpret():
        assert_accurate(
            swiglu_linear,
            swiglu_linear_reference,
            inputs,
            eager=lambda gate_up, weight: torch.nn.functional.linear(packed(eager)(gate_up), weight),
        )


@pytest.mark.parametrize("layout", views(torch.zeros(4, 6, 32)))
def test_trap_12_with_the_projection(layout):
    gate_up, dout = (views(torch.randn(4, 6, 32))[layout].detach().requires_grad_() for _ in range(2))
    weight = tensor(16, 32).t().detach().requires_grad_()  # (32, 16), columns contiguous
    with interpret():
        expected = gradients(two_calls, gate_up, weight, dout)
        torch.testing.assert_close(gradients(swiglu_linear, gate_up, weight, dout), expected, rtol=0, atol=0)


def test_only_the_inputs_are_saved_and_backward_writes_the_output_again():
    M, F, size = 64, 3072, 2
    gate_up, weight = tensor(M, 2 * F, dtype=torch.bfloat16), tensor(16, F, dtype=torch.bfloat16)
    saved: list[Tensor] = []
    with interpret() as launches, torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        swiglu_linear(gate_up, weight).sum().backward()
    assert {x.data_ptr() for x in saved} == {gate_up.data_ptr(), weight.data_ptr()}
    forward, backward = launches
    assert forward.moved == 3 * M * F * size
    assert backward.moved == 6 * M * F * size  # one more than without the projection


@pytest.mark.parametrize(
    ("frozen", "kernels", "stored"),
    [("weight", ["fwd", "bwd"], 2), ("gate_up", ["fwd", "fwd"], 1), ("both", ["fwd"], 1)],
)
def test_trap_17_a_frozen_operand_of_the_projection_costs_nothing(frozen, kernels, stored):
    gate_up, weight = tensor(4, 1024), tensor(8, 512)
    gate_up.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "gate_up")
    with interpret() as launches:
        out = swiglu_linear(gate_up, weight)
        if out.requires_grad:
            out.sum().backward()
    assert [launch.kernel for launch in launches] == [f"_swiglu_{kind}_kernel" for kind in kernels]
    assert launches[-1].stored == stored * 4 * 512 * 4
    assert (gate_up.grad is None, weight.grad is None) == (frozen != "weight", frozen != "gate_up")


def test_selective_recomputation_sees_the_matmul():
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    seen: list[str] = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(f"{op} again" if ctx.is_recompute else str(op))
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    gate_up, weight, dout = tensor(6, 64), tensor(8, 32), torch.randn(6, 8)
    with interpret():
        expected = gradients(swiglu_linear, gate_up, weight, dout)

        def recomputed(*inputs):
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            return checkpoint(swiglu_linear, *inputs, use_reentrant=False, context_fn=contexts)

        torch.testing.assert_close(gradients(recomputed, gate_up, weight, dout), expected, rtol=0, atol=0)
    assert seen.count("aten.mm.default") == 1
    assert any("swiglu_packed" in name for name in seen)


def test_autocast_and_errors_of_the_projection():
    gate_up, weight = tensor(4, 64), tensor(8, 32)
    with interpret(), torch.autocast("cpu", torch.bfloat16):
        out = swiglu_linear(gate_up, weight)
        assert out.dtype == torch.bfloat16
        assert out.equal(two_calls(gate_up, weight))
        out.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"^swiglu_linear: gate_up \(4, 64\) must be twice as wide as weight \(8, 31\)$"
    ):
        swiglu_linear(gate_up, weight[:, :31])
    with pytest.raises(
        ValueError, match=r"^swiglu_linear: gate_up is on cpu and weight on meta; move them to one device$"
    ):
        swiglu_linear(gate_up, weight.to("meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (4096, 3072)])
def test_on_a_gpu(shape, dtype):
    gate, up = (tensor(*shape, dtype=dtype).detach().cuda().requires_grad_() for _ in range(2))
    assert_accurate(swiglu, swiglu_reference, dict(gate=gate, up=up), eager=eager)
