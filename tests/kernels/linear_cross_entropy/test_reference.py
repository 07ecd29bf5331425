"""Loss and gradients against float64, with eager PyTorch as the measure, in both implementations."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain_kernels import linear_cross_entropy, linear_cross_entropy_reference
from fasttrain_kernels.testing import interpret
from tests.kernels.linear_cross_entropy.problems import (
    DTYPES,
    OPTIONS,
    both_implementations,
    check,
    check_over_seeds,
    gradients,
    problem,
)
from tests.kernels.numbers import eager


@both_implementations
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "H", "V"), [(1, 1, 1), ((2, 3), 63, 1000), (7, 16, 8193), ((), 8, 17)])
def test_is_as_accurate_as_eager(implementation, M, H, V, dtype):
    with implementation():
        check(problem(M, H, V, dtype))


@both_implementations
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_options_match_the_specification(implementation, reduction, options, short_chunks):
    """Trap 4 as well: with "none" assert_accurate's upstream gradients differ from token to token."""
    with implementation():
        check_over_seeds(15, 24, 101, **options, reduction=reduction)


@both_implementations
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_options_hold_in_low_precision(implementation, dtype):
    with implementation():
        for reduction in ("mean", "none"):
            check(problem(11, 24, 101, dtype, **OPTIONS[-1], reduction=reduction))


@both_implementations
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_agrees_with_torch_cross_entropy(implementation, reduction, label_smoothing):
    inputs = problem(12, 16, 33)

    def plain(hidden, weight, target):
        logits = hidden @ weight.t()
        return F.cross_entropy(logits, target, reduction=reduction, label_smoothing=label_smoothing)

    expected = gradients(plain, inputs, torch.ones(12) if reduction == "none" else None)
    options = dict(reduction=reduction, label_smoothing=label_smoothing)
    with implementation():
        actual = gradients(linear_cross_entropy, inputs | options, torch.ones(12) if reduction == "none" else None)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@both_implementations
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    M=st.integers(0, 9),
    H=st.integers(1, 40),
    V=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    options=st.sampled_from(OPTIONS),
    reduction=st.sampled_from(["sum", "none"]),
)
def test_any_shape(implementation, M, H, V, dtype, options, reduction):
    with implementation():
        check_over_seeds(M, H, V, dtype, **(options | dict(ignore_index=-1)), reduction=reduction)


@both_implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits_stay_finite(implementation, dtype):
    with implementation():
        check(problem(5, 32, 200, dtype, spread=300.0, z_loss=1e-4))


@both_implementations
def test_result_does_not_depend_on_the_order_of_programs_or_on_the_run(implementation, short_chunks):
    inputs = problem(70, 8, 65)
    with implementation():
        first = gradients(linear_cross_entropy, inputs)
    with interpret(order="reverse") if implementation is interpret else implementation():
        second = gradients(linear_cross_entropy, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_gradients_do_not_underflow(reduction):
    """p is about 1e-4. Times 1/64 (mean) or an upstream gradient of 2**-10, float16 has 5 bits or 1 bit of it left."""
    inputs = problem(64, 8, 8192, ignored=False, spread=0.1, reduction=reduction)
    inputs["hidden"].data = inputs["hidden"].data.abs().half().float()  # abs: rounding errors cannot cancel signs
    inputs["target"][:] = 0
    upstream = torch.tensor(1.0) if reduction == "mean" else torch.full((64,), 2.0**-10)
    double = {k: inputs[k].detach().double().requires_grad_() for k in ("hidden", "weight")}
    truth = gradients(linear_cross_entropy_reference, inputs | double, upstream.double())[2]
    with interpret(), torch.autocast("cpu", torch.float16):  # a float32 weight, so that its gradient shows every bit
        dweight = gradients(linear_cross_entropy, inputs, upstream)[2]
    error = (dweight.double() - truth).abs().amax(-1) / truth.abs().amax(-1)  # per row: those of rare tokens are small
    assert error.max() < 2**-9


@both_implementations
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_casts_hidden_and_keeps_the_weight_gradient_wide(implementation, reduction):
    inputs = problem(6, 16, 40, reduction=reduction)
    upstream = torch.ones(6) if reduction == "none" else None
    with implementation(), torch.autocast("cpu", torch.bfloat16):
        loss, dhidden, dweight = gradients(linear_cross_entropy, inputs, upstream)
    rounded = inputs | dict(hidden=inputs["hidden"].detach().bfloat16().float().requires_grad_())
    truth = gradients(linear_cross_entropy_reference, rounded, upstream)
    assert (loss.dtype, dhidden.dtype, dweight.dtype) == (torch.float32,) * 3
    assert not torch.equal(dweight, dweight.bfloat16().float())
    for a, b in zip((loss, dhidden, dweight), truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_on_gpu(dtype, options):
    inputs = problem(5000, 256, 50_257, dtype, **options)
    inputs = {
        k: v.detach().cuda().requires_grad_(v.requires_grad) if torch.is_tensor(v) else v for k, v in inputs.items()
    }
    for reduction in ("mean", "none"):
        upstream = torch.rand(5000, device="cuda") if reduction == "none" else None
        truth = gradients(linear_cross_entropy_reference, inputs | dict(reduction=reduction), upstream)
        plain = gradients(eager.linear_cross_entropy, inputs | dict(reduction=reduction), upstream)
        actual = gradients(linear_cross_entropy, inputs | dict(reduction=reduction), upstream)
        for ours, eagers, true in zip(actual, plain, truth, strict=True):
            allowed = 2 * (eagers.float() - true.float()).norm() + 1e-5 * true.float().norm()
            assert (ours.float() - true.float()).norm() <= allowed
