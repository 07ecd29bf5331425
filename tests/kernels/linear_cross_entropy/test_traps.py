"""The traps of kernels that compute the right numbers in the common case (6 and 9: test_chunks.py)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain_kernels import linear_cross_entropy, linear_cross_entropy_stats
from fasttrain_kernels.ops.linear_cross_entropy import chunked, op
from fasttrain_kernels.testing import interpret
from tests.kernels.linear_cross_entropy.problems import both_implementations, gradients, problem


@both_implementations
def test_trap_2_every_output_is_written(implementation, short_chunks):
    """interpret() fills what empty() returns with NaN; no NaN may survive, padding of odd vocabularies included."""
    with implementation():
        results = [
            *gradients(linear_cross_entropy, problem(70, 8, 33)),
            *gradients(linear_cross_entropy, problem(70, 8, 33, reduction="none"), torch.ones(70)),
            *linear_cross_entropy_stats(**problem(70, 8, 33)),
        ]
    assert not any(result.isnan().any() for result in results)


@both_implementations
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_trap_3_upstream_gradients_are_not_written(implementation, reduction):
    inputs = problem(5, 8, 20, reduction=reduction)
    upstream = torch.full((5,), 2.0) if reduction == "none" else torch.tensor(2.0)
    with implementation():
        gradients(linear_cross_entropy, inputs, upstream)
    assert upstream.eq(2).all()


@both_implementations
def test_trap_5_gradient_of_a_sure_target_survives_bf16(implementation):
    """p = 0.9991 is 1.0 in bf16: rounded before 1 is subtracted, the gradient would vanish."""
    hidden = torch.full((1, 1), 3.5, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16, requires_grad=True)
    with implementation():
        _, dhidden, _ = gradients(linear_cross_entropy, dict(hidden=hidden, weight=weight, target=torch.tensor([0])))
    expected = -2 * torch.sigmoid(torch.tensor(-7.0))
    torch.testing.assert_close(dhidden.float().squeeze(), expected, rtol=1e-2, atol=0)


class ForbidSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"), f"{name} syncs"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_trap_7_the_kernel_path_never_syncs(dtype):
    inputs = problem(5, 8, 20, dtype, token_weight=True)
    hidden, weight, target, token_weight = tensors = tuple(
        inputs[k].detach() for k in ("hidden", "weight", "target", "token_weight")
    )
    options = (-100, 0.1, 0.1, 5.0)
    with interpret(), ForbidSync():
        op._forward(hidden, weight, target, token_weight, *options, True, True, True, use_triton=True)
        op._tokens(*tensors, *options, use_triton=True)
        op._tokens_backward(torch.ones(5), *tensors, *options, True, True, use_triton=True)
        op._stats(*tensors[:3], *options, use_triton=True)


def test_trap_8_dtensors_are_rejected():
    DTensor = type("DTensor", (torch.Tensor,), {})
    inputs = problem(3, 4, 5)
    for name in ("hidden", "weight", "target"):
        wrapped = inputs[name].detach().as_subclass(DTensor)
        with pytest.raises(TypeError, match=f"linear_cross_entropy: {name} is a DTensor"):
            linear_cross_entropy(**inputs | {name: wrapped})


@both_implementations
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_trap_12_strides_do_not_matter(implementation, reduction):
    options = dict(reduction=reduction)
    embedding = torch.randn(16, 37, requires_grad=True)  # a tied head held transposed
    hidden = torch.randn(1, 16).expand(6, 16).requires_grad_()
    target = torch.tensor(4).expand(6)
    every_other = torch.randn(12, 16)[::2].requires_grad_()
    columns = torch.randn(16, 6).t().requires_grad_()
    upstream = torch.tensor(0.5).expand(6) if reduction == "none" else torch.tensor(0.5)
    for h in (hidden, every_other, columns):
        strided = dict(hidden=h, weight=embedding.t(), target=target)
        dense = {name: value.detach().contiguous().requires_grad_(name != "target") for name, value in strided.items()}
        with implementation():
            actual = gradients(linear_cross_entropy, strided | options, upstream)
            expected = gradients(linear_cross_entropy, dense | options, upstream.contiguous())
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)


@both_implementations
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_trap_16_empty_tensors(implementation, reduction):
    inputs = problem((2, 0), 8, 20, reduction=reduction)
    with implementation():
        loss, dhidden, dweight = gradients(
            linear_cross_entropy, inputs, torch.ones(2, 0) if reduction == "none" else None
        )
        assert linear_cross_entropy_stats(inputs["hidden"], inputs["weight"], inputs["target"]).entropy.shape == (2, 0)
    assert dhidden.shape == (2, 0, 8)
    assert dweight.eq(0).all()
    assert loss.isnan() if reduction == "mean" else loss.sum() == 0


def test_hidden_size_zero():
    loss = linear_cross_entropy(torch.empty(3, 0), torch.empty(7, 0), torch.tensor([0, 1, 6]))
    torch.testing.assert_close(loss, torch.tensor(7.0).log())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_trap_17_a_frozen_operand_costs_no_matmul(frozen, reduction, monkeypatch):
    shapes = []
    matmul = chunked._matmul

    def counted(a, b, *, out, accumulate=False):
        shapes.append(tuple(out.shape))
        matmul(a, b, out=out, accumulate=accumulate)

    monkeypatch.setattr(chunked, "_matmul", counted)
    inputs = problem(5, 8, 20, reduction=reduction)
    inputs[frozen] = inputs[frozen].detach()
    gradients(linear_cross_entropy, inputs, torch.ones(5) if reduction == "none" else None)
    other = {"hidden": (20, 8), "weight": (5, 8)}[frozen]
    assert shapes == [(5, 20)] * (2 if reduction == "none" else 1) + [other]


def test_trap_17_no_grad_computes_only_the_loss(monkeypatch):
    inputs = problem(5, 8, 20)
    with torch.no_grad(), interpret() as launches:
        loss = linear_cross_entropy(**inputs)
    assert not loss.requires_grad
    assert launches[0].stored == 4 * 5  # one float32 per token
    torch.testing.assert_close(loss, linear_cross_entropy(**inputs).detach())
