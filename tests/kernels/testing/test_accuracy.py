import pytest
import torch

from fasttrain_kernels.testing import assert_accurate, compare


def reference(x, weight):
    return (torch.softmax(x, -1) * weight).to(x.dtype)


def inputs(dtype=torch.float32):
    return dict(x=torch.randn(4, 63).to(dtype).requires_grad_(), weight=torch.randn(63).to(dtype).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_accurate_op_passes_and_every_output_and_gradient_is_compared(dtype):
    comparisons = compare(reference, reference, inputs(dtype))
    assert [comparison.name for comparison in comparisons] == ["output 0", "dx", "dweight"]
    assert all(comparison.ok and comparison.error == comparison.eager_error for comparison in comparisons)
    assert_accurate(reference, reference, inputs(dtype))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return reference(x, weight)

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            dx, dweight = torch.autograd.grad(reference(x, weight), (x, weight), dout)
        return dx, dweight * 1.001


def test_a_wrong_gradient_is_named_with_its_error_and_the_allowance():
    with pytest.raises(AssertionError, match=r"^dweight: error .*, eager .*, allowed .*: WRONG$"):
        assert_accurate(WrongGradient.apply, reference, inputs())


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (lambda x, weight: reference(x, weight) * 1.001, "output 0: error"),
        (
            lambda x, weight: reference(x, weight).bfloat16(),
            "output 0 has dtype torch.bfloat16, expected torch.float32",
        ),
        (lambda x, weight: reference(x, weight)[:2], r"output 0 has shape \(2, 63\), expected \(4, 63\)"),
        (lambda x, weight: reference(x, weight).where(torch.arange(63) != 5, torch.nan), "output 0: error nan"),
    ],
    ids=["value", "dtype", "shape", "nan"],
)
def test_a_wrong_output_is_named(op, message):
    with pytest.raises(AssertionError, match=message):
        assert_accurate(op, reference, inputs())


def test_an_op_that_computes_in_a_narrower_dtype_than_eager_fails():
    def narrow(x, weight):
        return reference(x.bfloat16(), weight.bfloat16()).float()

    with pytest.raises(AssertionError, match="output 0"):
        assert_accurate(narrow, reference, inputs())


def test_the_measure_is_the_given_eager_form():
    """With a worse eager form, an op that is as bad as that is accurate enough."""

    def worse(x, weight):
        return reference(x, weight) * (1 + 1e-3)

    def bad(x, weight):
        return reference(x, weight) * (1 + 1.9e-3)

    assert_accurate(bad, reference, inputs(), eager=worse)
    with pytest.raises(AssertionError):
        assert_accurate(bad, reference, inputs())


def test_inputs_that_need_no_gradient_and_other_values_are_passed_on():
    def scaled(x, index, *, factor):
        return x[index] * factor

    names = [c.name for c in compare(scaled, scaled, dict(x=torch.randn(4), index=torch.tensor([1, 2]), factor=3.0))]
    assert names == ["output 0"]
