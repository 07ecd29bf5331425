"""The torch op: opcheck, torch.compile, checkpointing, double backward, and wrong calls."""

import contextlib
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fasttrain_kernels import linear_cross_entropy, linear_cross_entropy_reference
from fasttrain_kernels.ops.linear_cross_entropy import op
from fasttrain_kernels.ops.linear_cross_entropy.chunked import chunked_forward
from fasttrain_kernels.testing import interpret
from tests.kernels.linear_cross_entropy.problems import IMPLEMENTATIONS, both_implementations, gradients, problem


def is_float(value):
    return torch.is_tensor(value) and value.is_floating_point()


@pytest.mark.parametrize("name", ["_linear_cross_entropy", "_tokens_op", "_tokens_backward_op", "_stats_op"])
def test_opcheck(name):
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    target = torch.tensor([1, -100, 3, 19, 0])
    options = (-100, 0.1, 0.1, 5.0)
    arguments: dict[str, tuple[Any, ...]] = {
        "_linear_cross_entropy": (hidden, weight, target, torch.rand(5), *options, True, True, True),
        "_tokens_op": (hidden, weight, target, None, *options),
        "_tokens_backward_op": (
            *(torch.rand(5), hidden.detach(), weight.detach(), target, None),
            *(*options, True, False),
        ),
        "_stats_op": (hidden.detach(), weight.detach(), target, *options),
    }
    # In float32 backward scales the op's outputs in place, which test_aot_dispatch would report; nobody holds them.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    for dtype, test_utils in {torch.float32: utils, torch.bfloat16: (*utils, "test_aot_dispatch_dynamic")}.items():
        converted = [
            a.detach().to(dtype).requires_grad_(a.requires_grad) if is_float(a) else a for a in arguments[name]
        ]
        torch.library.opcheck(getattr(op, name), tuple(converted), test_utils=test_utils)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_whole_and_once_for_all_lengths(reduction):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(hidden, weight, target):
        return linear_cross_entropy(hidden * 2, weight, target, z_loss=0.1, reduction=reduction).square().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for M in (6, 9, 12):
        inputs = problem(M, 8, 30)
        for _ in range(2):
            for a, b in zip(gradients(compiled, inputs), gradients(step, inputs), strict=True):
                torch.testing.assert_close(a, b)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


def test_compiles_with_inductor():
    torch._dynamo.reset()
    inputs = problem(6, 8, 30)
    compiled = torch.compile(lambda **k: linear_cross_entropy(**k) * 3, fullgraph=True)
    expected = gradients(lambda **k: linear_cross_entropy(**k) * 3, inputs)
    for a, b in zip(gradients(compiled, inputs), expected, strict=True):
        torch.testing.assert_close(a, b)


@both_implementations
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(implementation, use_reentrant):
    inputs = problem(6, 8, 30)

    def checkpointed(hidden, weight, target):
        return checkpoint(linear_cross_entropy, hidden, weight, target, use_reentrant=use_reentrant)

    with implementation():
        expected = gradients(linear_cross_entropy, inputs)
        hidden, weight = (inputs[k].detach().requires_grad_() for k in ("hidden", "weight"))
        loss = checkpointed(hidden, weight, inputs["target"])
        loss.backward()
    for a, b in zip((loss, hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_second_backward_raises_in_float32_and_works_in_bf16():
    """Never a wrong gradient: float32 ones are scaled in place and given away, 16-bit ones rounded into new tensors."""
    inputs = problem(4, 8, 20)
    loss = linear_cross_entropy(**inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    inputs = problem(4, 8, 20, torch.bfloat16)
    loss = linear_cross_entropy(**inputs)
    first = torch.autograd.grad(loss, inputs["weight"], torch.tensor(3.0), retain_graph=True)[0]
    second = torch.autograd.grad(loss, inputs["weight"], torch.tensor(3.0))[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [(contextlib.nullcontext, torch.float32), (interpret, torch.bfloat16)],
    ids=["cpu", "triton"],
)
def test_the_weight_gradient_is_not_copied(implementation, dtype, monkeypatch):
    pointers = []
    forward = chunked_forward

    def spy(*args, **kwargs):
        found = forward(*args, **kwargs)
        pointers.append(found.dweight.data_ptr())
        return found

    monkeypatch.setattr(op, "chunked_forward", spy)
    inputs = problem(4, 8, 20, dtype)
    with implementation():
        linear_cross_entropy(**inputs).backward()
    assert pointers == [inputs["weight"].grad.data_ptr()]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_raises(reduction):
    inputs = problem(4, 8, 20, reduction=reduction)
    loss = (
        linear_cross_entropy(**inputs).square().sum()
    )  # squared, so that the upstream gradient has a graph of its own

    def twice():
        torch.autograd.grad(loss, inputs["hidden"], create_graph=True)[0].sum().backward()

    with pytest.raises(NotImplementedError, match="linear_cross_entropy.* for double backward use"):
        twice()


def test_gradients_accumulate_over_micro_batches_and_a_tied_embedding():
    weight = torch.randn(30, 8, requires_grad=True)
    tokens, target = torch.randint(30, (2, 6)), torch.randint(30, (2, 6))

    def grad_of(loss_function):
        weight.grad = None
        for x, y in zip(tokens, target, strict=True):
            loss_function(F.embedding(x, weight), weight, y).backward()
        return weight.grad

    torch.testing.assert_close(grad_of(linear_cross_entropy), grad_of(linear_cross_entropy_reference))


ONE_INDEX = "target (3, 1) must have one index per vector of hidden (3, 4), that is (3,)"
HEAD = "hidden (3, 4) must be (..., H) and weight ({}, {}) (V, H), with V at least 1"
DTYPE = "hidden is torch.float32 and weight torch.float16; cast one, or use torch.autocast"
GRAD = "token_weight requires grad, but gets no gradient; pass token_weight.detach(), or multiply"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(target=torch.zeros(3, 1).long()), ValueError, ONE_INDEX),
        (dict(target=torch.zeros(3)), TypeError, "target has dtype torch.float32; class indices are int64 or int32"),
        (dict(weight=torch.ones(5, 3)), ValueError, HEAD.format(5, 3)),
        (dict(weight=torch.ones(0, 4)), ValueError, HEAD.format(0, 4)),
        (dict(weight=torch.ones(5, 4).half()), TypeError, DTYPE),
        (dict(token_weight=torch.ones(4)), ValueError, "token_weight (4,) and target (3,) must have the same shape"),
        (dict(token_weight=torch.ones(3, requires_grad=True)), ValueError, GRAD),
        (dict(reduction="avg"), ValueError, "reduction 'avg' must be 'mean', 'sum' or 'none'"),
        (dict(label_smoothing=1.5), ValueError, "label_smoothing 1.5 must be between 0 and 1"),
        (dict(softcap=0.0), ValueError, "softcap 0.0 must be positive; None means no cap"),
        (dict(hidden=torch.ones(3, 4).long()), TypeError, "hidden has dtype torch.int64"),
    ],
)
def test_errors_name_the_values_and_the_remedy(change, error, message):
    with pytest.raises(error) as caught:
        linear_cross_entropy(**problem(3, 4, 5, ignored=False) | change)
    assert str(caught.value).startswith("linear_cross_entropy: " + message)


def test_int32_targets():
    inputs = problem(6, 8, 30)
    expected = gradients(linear_cross_entropy, inputs)
    inputs["target"] = inputs["target"].int()
    for implementation in IMPLEMENTATIONS.values():
        with implementation():
            for a, b in zip(gradients(linear_cross_entropy, inputs), expected, strict=True):
                torch.testing.assert_close(a, b)
