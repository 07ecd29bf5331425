"""Depth 4: the registered ops keep torch's contract, and errors say what to do."""

import pytest
import torch

from fasttrain_kernels import _registration, attention, attention_reference, document_bounds

CU_SEQLENS = torch.tensor([0, 4, 4, 14], dtype=torch.int32)
DOCUMENTS = document_bounds(CU_SEQLENS, 14)
OPTIONS = {
    "causal": ("attention", None, True, None, None, 0.25),
    "documents, window, softcap": ("attention", DOCUMENTS, False, 5, 3.0, 0.25),
    "cpp, causal": ("attention_cpp", None, True, None, None, 0.25),
    "cpp, documents, window": ("attention_cpp", DOCUMENTS, False, 5, None, 0.25),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_opcheck(options, make):
    name, *rest = options
    op, backward_op = (
        getattr(getattr(torch.ops.fasttrain, each), f"v{_registration._VERSION}") for each in (name, f"{name}_backward")
    )
    q, k, v = make(batch=2, queries=7, heads=4, kv_heads=2).values()
    torch.library.opcheck(op, (q, k, v, *rest))
    out, lse = op(q, k, v, *rest)
    tensors = tuple(x.detach() for x in (torch.ones_like(out), q, k, v, out, lse))
    for need in [(True, True, True), (True, False, False)]:
        torch.library.opcheck(backward_op, (*tensors, *rest, *need))


@pytest.mark.parametrize(
    "options",
    [dict(backend="sdpa"), dict(window=4, backend="blocked"), dict(backend="cpp"), dict(window=4)],
    ids=["sdpa", "op", "cpp", "auto"],
)
def test_compiles_whole_and_once_for_all_lengths(options, make):
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (9, 12, 17):
            inputs = make(batch=2, queries=length)
            out = compiled(**inputs, **options)
            actual = torch.autograd.grad(out.square().sum(), list(inputs.values()))
            reference = attention_reference(**inputs, window=options.get("window"))
            expected = torch.autograd.grad(reference.square().sum(), list(inputs.values()))
            torch.testing.assert_close((out, *actual), (reference, *expected), atol=1e-5, rtol=1e-4)


def test_compiles_with_documents(make):
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for ends in ([0, 3, 10], [0, 1, 1, 6, 10]):
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)
        inputs = make(batch=2, queries=5) | dict(cu_seqlens=cu_seqlens)
        torch.testing.assert_close(compiled(**inputs), attention_reference(**inputs), atol=1e-5, rtol=1e-4)


def test_gradcheck():
    inputs = [torch.randn(2, 5, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, window=3, softcap=2.0), inputs)


@pytest.mark.parametrize(("backend", "name"), [("blocked", "attention"), ("cpp", "attention_cpp")])
def test_double_backward_raises(backend, name, make):
    inputs = make(queries=8)
    (dq,) = torch.autograd.grad(attention(**inputs, backend=backend).sum(), inputs["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=f"^{name}_backward: the gradient of this op is not implemented"):
        dq.sum().backward()


def test_autocast_chooses_the_dtype(make):
    inputs = make(queries=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for window in (None, 4):
            out = attention(**inputs, window=window)
            assert out.dtype == torch.bfloat16
            grads = torch.autograd.grad(out.float().sum(), list(inputs.values()))
            assert all(grad.dtype == torch.float32 for grad in grads)


def test_activation_checkpointing_changes_nothing(make):
    inputs = make(queries=8)

    def run(function):
        return torch.autograd.grad(function(**inputs, window=4).square().sum(), list(inputs.values()))

    def checkpointed(**arguments):
        return torch.utils.checkpoint.checkpoint(attention, use_reentrant=False, **arguments)

    assert all(map(torch.equal, run(checkpointed), run(attention)))


def tensors(q=(1, 4, 2, 8), k=(1, 4, 2, 8), v=None, dtype=torch.float32):
    return torch.zeros(q, dtype=dtype), torch.zeros(k), torch.zeros(k if v is None else v)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            dict(q=(4, 2, 8)),
            {},
            ValueError,
            "attention: q (4, 2, 8), k (1, 4, 2, 8) and v (1, 4, 2, 8) must be (batch, tokens, heads, head_dim)",
        ),
        (
            dict(v=(1, 4, 2, 4)),
            {},
            ValueError,
            "attention: k (1, 4, 2, 8) and v (1, 4, 2, 4) must have the same shape",
        ),
        (
            dict(q=(2, 4, 2, 8)),
            {},
            ValueError,
            "attention: q (2, 4, 2, 8) and k (1, 4, 2, 8) must have the same batch and head dimension",
        ),
        (
            dict(q=(1, 4, 3, 8)),
            {},
            ValueError,
            "attention: the 3 heads of q must be a multiple of the 2 heads of k and v",
        ),
        (
            dict(dtype=torch.bfloat16),
            {},
            TypeError,
            "attention: q is torch.bfloat16, k torch.float32 and v torch.float32; cast them to one dtype",
        ),
        (
            dict(dtype=torch.int32),
            {},
            TypeError,
            "attention: q has dtype torch.int32; supported are float32, bfloat16 and float16",
        ),
        (
            {},
            dict(window=0),
            ValueError,
            "attention: window=0 must be at least 1, which is the query's own position, or None",
        ),
        ({}, dict(softcap=-1.0), ValueError, "attention: softcap=-1.0 must be a positive number, or None"),
        ({}, dict(scale=0.0), ValueError, "attention: scale=0.0 must be a positive number, or None"),
        (
            {},
            dict(cu_seqlens=torch.tensor([0, 4])),
            TypeError,
            "attention: cu_seqlens must be a 1-D tensor of dtype torch.int32: 0 and the end of each document",
        ),
        (
            {},
            dict(cu_seqlens=torch.tensor([0], dtype=torch.int32)),
            ValueError,
            "attention: cu_seqlens needs at least two values, 0 and the number of tokens",
        ),
        (
            {},
            dict(cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)),
            ValueError,
            "attention: cu_seqlens must rise from 0 to the 4 tokens of the batch, got [0, 3]",
        ),
        (
            dict(q=(1, 2, 2, 8)),
            dict(cu_seqlens=torch.tensor([0, 4], dtype=torch.int32)),
            ValueError,
            "attention: with cu_seqlens, q (1, 2, 2, 8) and k (1, 4, 2, 8) must have the same number of tokens",
        ),
    ],
)
def test_errors_name_the_values_and_the_remedy(arguments, options, error, message):
    with pytest.raises(error) as raised:
        attention(*tensors(**arguments), **options)
    assert str(raised.value) == message


def test_dtensor_is_refused():
    """Trap 8."""

    class DTensor(torch.Tensor):
        pass

    q, k, v = tensors()
    with pytest.raises(TypeError, match="attention: k is a DTensor"):
        attention(q, k.as_subclass(DTensor), v)


@pytest.mark.parametrize("backend", ["auto", "blocked", "cpp"])
def test_bounds_of_documents_are_as_good_as_their_ends(backend, make):
    """Layers that share them compute them once."""
    inputs = make(batch=2, queries=7)
    expected = attention(**inputs, cu_seqlens=CU_SEQLENS, backend=backend)
    made = attention(**inputs, documents=document_bounds(CU_SEQLENS, 14), backend=backend)
    assert torch.equal(made, expected)
    gradients = [torch.autograd.grad(out.square().sum(), list(inputs.values())) for out in (made, expected)]
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    "documents", [torch.zeros(2, 13, dtype=torch.int32), torch.zeros(2, 14), torch.zeros(14, dtype=torch.int32)]
)
def test_bounds_of_documents_have_one_shape(documents, make):
    with pytest.raises(ValueError, match=r"^attention: documents \(.*must be \(2, B \* T\) of torch.int32; docum"):
        attention(**make(batch=2, queries=7), documents=documents)
