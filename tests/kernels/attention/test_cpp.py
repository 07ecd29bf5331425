"""The implementation in C++ against the specification in float64; what it may not depend on; and its other builds."""

import contextlib
import platform
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain_kernels import attention, attention_reference, cpp
from fasttrain_kernels.ops.attention.reference import visible_keys
from fasttrain_kernels.testing import assert_accurate, assert_accurate_over_seeds
from tests.kernels.numbers import cases

by_cpp = partial(attention, backend="cpp")


def leaves(batch, queries, keys, heads, kv_heads, dim, layout="contiguous"):
    """Tensors to differentiate by, and q, k and v as views of them."""
    if layout == "packed" and queries == keys:
        packed = torch.randn(batch, queries, heads + 2 * kv_heads, dim, requires_grad=True)
        return [packed], lambda packed: packed.split([heads, kv_heads, kv_heads], dim=2)
    shapes = [(batch, tokens, h, dim) for tokens, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads))]
    if layout == "heads first":
        made = [torch.randn(b, h, t, d, requires_grad=True) for b, t, h, d in shapes]
        return made, lambda *x: [each.transpose(1, 2) for each in x]
    if layout == "elements apart":
        made = [torch.randn(b, t, d, h, requires_grad=True) for b, t, h, d in shapes]
        return made, lambda *x: [each.transpose(2, 3) for each in x]
    return [torch.randn(shape, requires_grad=True) for shape in shapes], lambda *x: x


def upstream(kind, shape):
    if kind == "a sum's":
        return torch.ones(1).expand(shape)  # stride 0
    if kind == "of a mean over tokens":
        return torch.randn(shape[0], 1, *shape[2:]).expand(shape)
    return torch.randn(shape)


def results(function, tensors, views, dout, **options):
    """out and the gradients of the tensors."""
    out = function(*views(*tensors), **options)
    return out.detach(), *torch.autograd.grad(out, tensors, dout.to(out))


def in_double(tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


@st.composite
def problems(draw, longest=200):
    documents = draw(st.booleans())
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3]))
    queries = draw(st.integers(2, longest))
    keys = queries if documents or draw(st.booleans()) else draw(st.integers(1, longest))
    dim = draw(st.sampled_from([1, 5, 16, 20, 33, 64]))
    options = dict(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, longest)),
        scale=draw(st.none() | st.floats(0.1, 2)),
    )
    if options["scale"]:
        options["scale"] *= dim**-0.5
    if documents:
        ends = sorted(draw(st.lists(st.integers(0, batch * queries), max_size=5)))
        options["cu_seqlens"] = torch.tensor([0, *ends, batch * queries], dtype=torch.int32)
    torch.manual_seed(draw(st.integers(0, 99)))
    layout = draw(st.sampled_from(["packed", "contiguous", "heads first", "elements apart"]))
    tensors, views = leaves(batch, queries, keys, group * kv_heads, kv_heads, dim, layout)
    kind = draw(st.sampled_from(["of its own", "a sum's", "of a mean over tokens"]))
    return tensors, views, upstream(kind, (batch, queries, group * kv_heads, dim)), options


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problem=problems())
def test_cpp_implementation_is_the_reference(problem):
    tensors, views, dout, options = problem
    actual = results(by_cpp, tensors, views, dout, **options)
    expected = results(attention_reference, in_double(tensors), views, dout, **options)
    torch.testing.assert_close([x.double() for x in actual], list(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (dict(batch=2, queries=200, heads=3), {}),
        (dict(queries=130, dim=80), dict(causal=False, window=30)),
        (dict(queries=63, keys=200, size=3.0), dict(window=90)),
        (dict(queries=200, keys=63, size=3.0), {}),
    ],
)
def test_cpp_implementation_is_as_accurate_as_eager(shapes, options, make, eager):
    assert_accurate(by_cpp, attention_reference, make(**shapes) | options, eager=eager)


def test_documents_see_only_themselves(make, cu_seqlens, eager):
    inputs = make(batch=2, queries=200, heads=3) | dict(cu_seqlens=cu_seqlens)
    assert_accurate(by_cpp, attention_reference, inputs, eager=eager)


@pytest.mark.parametrize("shapes", [dict(queries=300, heads=16), dict(queries=700, heads=1)])
def test_long_sums_are_as_accurate_as_eager(shapes):
    """dk and dv are summed over all queries and heads of a group: in one chain they round up to 15 times as much."""
    assert_accurate_over_seeds(
        by_cpp,
        attention_reference,
        partial(cases.qkv, torch.float32, causal=False, **shapes),
        seeds=range(4),
        eager=cases.in_four_orders(cases.eager.attention),
    )


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [(200, 63, {}), (150, 20, dict(causal=False, window=7)), (70, 70, dict(causal=False, window=1))],
)
def test_a_query_that_sees_nothing_gives_zeros(queries, keys, options, make):
    inputs = make(queries=queries, keys=keys)
    out = by_cpp(**inputs, **options)
    dq, dk, dv = torch.autograd.grad(out, list(inputs.values()), torch.randn_like(out))
    seen = visible_keys(queries, keys, options.get("causal", True), options.get("window"), None, out.device)
    blind = ~seen.any(1)
    assert blind.any() == (queries != keys)
    assert not out[:, blind].any()
    assert not dq[:, blind].any()
    assert out[:, ~blind].all()
    assert not dk[:, ~seen.any(0)].any()
    assert not dv[:, ~seen.any(0)].any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("token", [0, 69, 130])
@pytest.mark.parametrize("options", [{}, dict(causal=False, window=20), dict(cu_seqlens=[0, 69, 70, 100, 280])])
def test_nan_and_inf_reach_the_outputs_that_see_them(options, token, name, value, make):
    inputs = {n: x.detach() for n, x in make(batch=2, queries=140, heads=4, kv_heads=2, dim=20).items()}
    if "cu_seqlens" in options:
        options = dict(cu_seqlens=torch.tensor(options["cu_seqlens"], dtype=torch.int32))
    inputs[name][0, token, 1, 3] = value
    actual, expected = by_cpp(**inputs, **options), attention_reference(**inputs, **options)
    if name != "v":
        assert torch.equal(actual.isfinite(), expected.isfinite())
        return
    # The reference multiplies every value, if only by 0; here those within the tiles of 16 keys that a query needs.
    assert not (expected.isfinite() & ~actual.isfinite()).any()
    tokens = 280 if "cu_seqlens" in options else 140
    options = dict(causal=True, window=None, cu_seqlens=None, device=actual.device) | options
    seeing = visible_keys(tokens, tokens, **options)[:140, token]
    assert not actual[0, seeing, 2:, 3].isfinite().any()


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("options", [{}, dict(causal=False, window=20)], ids=str)
def test_nan_stays_in_its_sequence_and_group(options, name, make):
    """Though buffers are used again: for the second group of the first sequence, and both of the second."""
    inputs = make(batch=2, queries=140, heads=4, kv_heads=2)
    tensors, dout = list(inputs.values()), torch.randn(2, 140, 4, 16)
    clean = results(by_cpp, tensors, lambda *x: x, dout, **options)
    with torch.no_grad():
        (inputs | dict(dout=dout))[name][0, :, 0] = torch.nan
    spoiled = results(by_cpp, tensors, lambda *x: x, dout, **options)
    for x, y in zip(clean, spoiled, strict=True):
        assert torch.equal(x[1], y[1])
        assert torch.equal(x[0, :, x.shape[2] // 2 :], y[0, :, x.shape[2] // 2 :])


def test_threads_and_runs_change_no_bit(make):
    inputs = make(batch=3, queries=150, heads=6, kv_heads=2, dim=33)
    dout = torch.randn(3, 150, 6, 33)

    def run(threads):
        torch.set_num_threads(threads)
        return results(by_cpp, list(inputs.values()), lambda *x: x, dout)

    before = torch.get_num_threads()
    try:
        first = run(1)
        for threads in (1, 2, 2, 5):
            assert all(map(torch.equal, run(threads), first))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_frozen_operands(wanted, make):
    inputs = make(queries=100)
    dout = torch.randn(1, 100, 2, 16)
    full = dict(zip("qkv", results(by_cpp, list(inputs.values()), lambda *x: x, dout)[1:], strict=True))
    inputs = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.items()}
    grads = torch.autograd.grad(by_cpp(**inputs), [inputs[name] for name in wanted], dout)
    assert all(map(torch.equal, grads, (full[name] for name in wanted)))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 0), (2, 0, 70), (2, 70, 0)])
def test_empty_tensors(batch, queries, keys, make):
    inputs = make(batch=batch, queries=queries, keys=keys)
    out, *grads = results(by_cpp, list(inputs.values()), lambda *x: x, torch.ones(batch, queries, 2, 16))
    assert out.shape == inputs["q"].shape
    assert not out.any()
    for x, grad in zip(inputs.values(), grads, strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


@contextlib.contextmanager
def uninitialized_memory_is_nan():
    """torch.empty's, under deterministic algorithms."""
    assert torch._C._get_deterministic_fill_uninitialized_memory()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SHAPES: list[tuple[dict[str, int], dict[str, Any]]] = [
    (dict(queries=130, keys=130, dim=20), {}),
    (dict(queries=3, keys=65, dim=33), dict(causal=False)),
    (dict(queries=200, keys=63, dim=16), {}),
    (dict(queries=150, keys=150, dim=5), dict(window=9)),
    (dict(queries=150, keys=150, dim=64), dict(cu_seqlens=torch.tensor([0, 0, 70, 71, 300, 300]).int())),
]


@pytest.mark.parametrize(("shapes", "options"), SHAPES)
def test_every_element_of_every_output_is_written(shapes, options, make):
    inputs = make(batch=2, **shapes)
    tensors, dout = list(inputs.values()), torch.randn_like(inputs["q"])
    expected = results(by_cpp, tensors, lambda *x: x, dout, **options)
    with uninitialized_memory_is_nan():
        actual = results(by_cpp, tensors, lambda *x: x, dout, **options)
    assert all(map(torch.equal, actual, expected))


POISON = """
#include <cstdlib>
#include <cstring>
static void* poisoned(size_t alignment, size_t size) { return memset(aligned_alloc(alignment, size), 0xff, size); }
#define aligned_alloc poisoned
"""
BUILDS = {"this processor": [], "registers of AVX-512": ["-DWIDE"], "any x86": ["-march=x86-64"]}


@pytest.mark.slow
@pytest.mark.parametrize("extra", BUILDS.values(), ids=BUILDS)
def test_every_build_is_the_reference_and_reads_what_it_wrote(extra, make, tmp_path, monkeypatch):
    """Buffers are full of NaN, and vectors those of other processors, which the compiler splits over registers."""
    if extra == ["-march=x86-64"] and platform.machine() != "x86_64":
        pytest.skip("another kind of processor")
    header = tmp_path / "poison.h"
    header.write_text(POISON)
    monkeypatch.setattr(cpp, "_OPTIONS", [*cpp._OPTIONS, *extra, "-include", str(header)])
    library = cpp._built(cpp._compiler(), tmp_path / "cpp.so")
    monkeypatch.setattr(cpp, "library", lambda: library)
    for (shapes, options), heads in product(SHAPES, (1, 3)):
        inputs = make(batch=2, heads=heads, **shapes)
        tensors, dout = list(inputs.values()), torch.randn_like(inputs["q"])
        actual = results(by_cpp, tensors, lambda *x: x, dout, **options)
        expected = results(attention_reference, in_double(tensors), lambda *x: x, dout, **options)
        torch.testing.assert_close([x.double() for x in actual], list(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_not_taken(dtype, make):
    inputs = make(queries=70)
    expected = results(by_cpp, list(inputs.values()), lambda *x: x, torch.ones(1, 70, 2, 16))
    torch.set_default_dtype(dtype)
    try:
        actual = results(by_cpp, list(inputs.values()), lambda *x: x, torch.ones(1, 70, 2, 16))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, actual, expected))


def test_compiled_is_the_same(make):
    torch.compiler.reset()
    inputs = make(batch=2, queries=70)
    tensors, dout = list(inputs.values()), torch.randn(2, 70, 2, 16)
    compiled = torch.compile(attention, fullgraph=True)
    expected = results(attention, tensors, lambda *x: x, dout, window=9)
    assert all(map(torch.equal, results(compiled, tensors, lambda *x: x, dout, window=9), expected))
