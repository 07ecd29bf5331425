import pytest
import torch

from fasttrain_kernels.testing import assert_accurate, assert_accurate_over_seeds, compare, compare_over_seeds


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


def test_a_wrong_gradient_is_named_with_its_error_and_the_tolerance():
    with pytest.raises(AssertionError, match=r"^dweight: error .*, eager .*, tolerance .*: FAILED$"):
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
    """With a worse eager implementation, an op that is as bad as that is accurate enough."""

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


# Over seeds


def over_seeds(op, **options):
    return {c.name: c for c in compare_over_seeds(op, reference, inputs, **dict(seeds=range(8)) | options)}


def test_over_seeds_every_seed_draws_other_inputs_and_upstream_gradients():
    drawn = []

    def op(x, weight):
        drawn.append(x)
        return reference(x, weight)

    before = torch.get_rng_state()
    found = over_seeds(op)
    assert list(found) == ["output 0", "dx", "dweight"]
    assert all(
        c.ok and c.ratio == 1 and c.typical == 1 and c.seeds == 8 and c.failed_seeds == 0 for c in found.values()
    )
    assert len({x.sum().item() for x in drawn}) == 8
    assert torch.equal(torch.get_rng_state(), before)
    assert_accurate_over_seeds(reference, reference, inputs, seeds=range(8))


def test_over_seeds_one_bad_element_of_one_seed_fails():
    calls = iter(range(8))

    def op(x, weight):
        bad = torch.zeros(4, 63)
        bad[1, 2] = 1e-6 if next(calls) == 3 else 0.0
        return reference(x, weight) + bad

    found = over_seeds(op)["output 0"]
    assert not found.ok
    assert found.ratio > 2 > found.typical
    assert found.failed_seeds == 1


def test_over_seeds_what_most_seeds_have_in_common_fails_though_one_of_eager_is_bad():
    def eager(x, weight):
        return reference(x, weight) + (1e-2 if x.sum() == first else 0.0)

    torch.manual_seed(0)
    first = inputs()["x"].sum()
    found = over_seeds(lambda x, weight: reference(x, weight) * (1 + 1e-4), eager=eager)["output 0"]
    assert not found.ok
    assert found.ratio < 2 < found.typical


def test_over_seeds_several_eager_forms_are_averaged():
    def off(by):
        return lambda x, weight: reference(x, weight) * (1 + by)

    found = over_seeds(off(1e-3), eager=[off(0.0), off(1e-3)])["output 0"]
    assert found.ratio == pytest.approx(2**0.5, rel=1e-2)
    assert found.typical == pytest.approx(2**0.5, rel=1e-2)


def test_over_seeds_errors_below_a_rounding_are_no_reason_to_fail():
    """Eager exact, and the op off by one rounding, in the mean of ratios: half a unit counts as none."""

    def exact(x):
        return x * 2

    def rounded(x):
        return exact(x).mul(1 + 2**-24)

    given = dict(x=torch.ones(3))
    (found,) = compare_over_seeds(rounded, exact, lambda: given, seeds=range(3))
    assert (found.error, found.ratio, found.typical) == (0.0, 0.0, 1.0)
    assert found.ok


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (lambda x, weight: reference(x, weight).where(torch.arange(63) != 5, torch.nan), "output 0: error nan"),
        (
            lambda x, weight: reference(x, weight) * 1.001,
            r"output 0: .* \(over 2 seeds; geometric mean .* times eager's\)",
        ),
        (lambda x, weight: (reference(x, weight),) * 2, "the op gives output 0, output 1, dx, dweight; the reference"),
    ],
    ids=["nan", "value", "number"],
)
def test_over_seeds_a_wrong_output_is_named(op, message):
    with pytest.raises(AssertionError, match=message):
        assert_accurate_over_seeds(op, reference, inputs, seeds=range(2))
