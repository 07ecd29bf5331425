"""Ignored tokens, wrong targets, token weights, and the stats of evaluation."""

import pytest
import torch
import torch.nn.functional as F

from fasttrain_kernels import linear_cross_entropy, linear_cross_entropy_stats, linear_cross_entropy_stats_reference
from fasttrain_kernels.testing import interpret
from tests.kernels.linear_cross_entropy.problems import both_implementations, check, gradients, problem


@both_implementations
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_tokens_have_no_loss_and_exactly_no_gradient(implementation, reduction):
    inputs = problem(10, 16, 50, reduction=reduction, z_loss=0.1, label_smoothing=0.1)
    inputs["target"][:7] = -100
    without = inputs | dict(hidden=inputs["hidden"][7:].detach().requires_grad_(), target=inputs["target"][7:])
    with implementation():
        loss, dhidden, dweight = gradients(
            linear_cross_entropy, inputs, torch.ones(10) if reduction == "none" else None
        )
        fewer = gradients(linear_cross_entropy, without, torch.ones(3) if reduction == "none" else None)
    assert dhidden[:7].eq(0).all()
    torch.testing.assert_close((loss[7:] if reduction == "none" else loss), fewer[0])
    torch.testing.assert_close(dweight, fewer[2])
    if reduction == "none":
        assert loss[:7].eq(0).all()


@both_implementations
def test_all_ignored_has_nan_mean_and_zero_gradients(implementation):
    inputs = problem(6, 8, 20)
    inputs["target"][:] = -100
    assert F.cross_entropy(torch.randn(6, 20), inputs["target"]).isnan()  # what we follow
    with implementation():
        loss, dhidden, dweight = gradients(linear_cross_entropy, inputs)
        assert gradients(linear_cross_entropy, inputs | dict(reduction="sum"))[0] == 0
    assert loss.isnan()
    assert dhidden.eq(0).all()
    assert dweight.eq(0).all()


@both_implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zero_token_weight_silences_a_token(implementation, dtype):
    inputs = problem(6, 8, 20, dtype, ignored=False, token_weight=True)
    inputs["token_weight"][2] = 0
    with implementation():
        check(inputs)
        _, dhidden, _ = gradients(linear_cross_entropy, inputs)
    assert dhidden[2].eq(0).all()


def test_target_outside_the_vocabulary_raises_on_cpu():
    inputs = problem((2, 3), 4, 10, ignored=False)
    inputs["target"][1, 0] = 10
    expected = (
        r"linear_cross_entropy: target 10 at position 3 is outside the vocabulary \[0, 10\) and is not ignore_index"
    )
    for function in (linear_cross_entropy, linear_cross_entropy_stats):
        with pytest.raises(ValueError, match=expected):
            function(**inputs)


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_target_outside_the_vocabulary_is_nan_in_the_kernel(wrong):
    inputs = problem(4, 4, 10, ignored=False, reduction="none")
    inputs["target"][2] = wrong
    with interpret():
        loss, dhidden, dweight = gradients(linear_cross_entropy, inputs, torch.ones(4))
        assert linear_cross_entropy(**inputs | dict(reduction="mean")).isnan()
    assert loss.isnan().tolist() == [False, False, True, False]
    assert dhidden.isnan().all(1).tolist() == [False, False, True, False]
    assert dweight.isnan().all()


@both_implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [dict(), dict(z_loss=0.1, label_smoothing=0.2, softcap=5.0, ignore_index=3)])
def test_stats(implementation, dtype, options, short_chunks):
    inputs = problem((2, 35), 24, 101, dtype, **options)
    # Half of the tokens hit, but for those that are ignored.
    inputs["hidden"].data[:, ::2] = 3 * inputs["weight"].data[inputs["target"][:, ::2].clamp(min=0)]
    truth = linear_cross_entropy_stats_reference(
        **inputs | dict(hidden=inputs["hidden"].double(), weight=inputs["weight"].double())
    )
    with implementation() as launches:
        stats = linear_cross_entropy_stats(**inputs)
    assert stats.correct.dtype == torch.bool
    assert torch.equal(stats.correct, truth.correct)
    assert 0.2 < truth.correct.float().mean() < 0.8
    for name in ("loss", "lse", "entropy"):
        ours = getattr(stats, name)
        assert ours.shape == (2, 35)
        assert not ours.requires_grad
        torch.testing.assert_close(ours.double(), getattr(truth, name), rtol=2e-6, atol=2e-5)
    if launches:  # evaluation writes a few bytes per token, never logits
        assert launches[0].stored == 13 * launches[0].grid[0]


@both_implementations
def test_equal_logits_count_the_first_as_the_guess(implementation):
    hidden, weight = torch.ones(3, 4), torch.ones(200, 4)
    with implementation():
        stats = linear_cross_entropy_stats(hidden, weight, torch.tensor([0, 1, 199]))
    assert stats.correct.tolist() == [True, False, False]
