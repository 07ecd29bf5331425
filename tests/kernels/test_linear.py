"""Matmuls of linear layers: torch's or ours, whichever is faster; ours against torch's in float64."""

import contextlib
import itertools
import math
import platform

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fasttrain_kernels import Linear, cpp, linear, linear_cross_entropy
from fasttrain_kernels.ops.linear import matmul, matmul_out
from fasttrain_kernels.testing import assert_accurate_over_seeds

M, K, N = 300, 500, 230  # large enough for ours, and multiples of nothing


@pytest.fixture
def ours(monkeypatch):
    """Take our matmul on any machine with a compiler; count the calls."""
    calls = []

    def counted(a, b, out, *, accumulate, made=cpp.matmul):
        calls.append((*a.shape, b.shape[1]))
        made(a, b, out, accumulate=accumulate)

    monkeypatch.setattr(cpp, "faster_matmuls", lambda: (96, 1 << 25))
    monkeypatch.setattr(cpp, "matmul", counted)
    return calls


@contextlib.contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def by_cpp(a, b, out=None):
    made = torch.full((a.shape[0], b.shape[1]), torch.nan) if out is None else out
    cpp.matmul(a, b, made, accumulate=out is not None)
    return made


def with_gradients(function, x, weight, dout):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = function(x, weight)
    return out, *torch.autograd.grad(out, (x, weight), dout)


# The matmul itself.


def strided(rows, columns, layout):
    """A matrix of whole numbers, whose matmuls are exact, in several layouts."""

    def whole(*shape):
        return torch.randint(-4, 5, shape).float()

    return {
        "rows": lambda: whole(rows, columns),
        "columns": lambda: whole(columns, rows).t(),
        "part of rows": lambda: whole(rows + 2, columns + 7)[1:-1, 3:-4],
        "part of columns": lambda: whole(columns + 7, rows + 2)[3:-4, 1:-1].t(),
        "every other": lambda: whole(rows, 2 * columns)[:, ::2],
        "one row": lambda: whole(1, columns).expand(rows, columns),
        "one column": lambda: whole(rows, 1).expand(rows, columns),
    }[layout]()


SIDES = st.integers(1, 40) | st.integers(90, 210) | st.sampled_from([192, 193, 384, 400])
LAYOUTS = st.sampled_from(
    ["rows", "columns", "part of rows", "part of columns", "every other", "one row", "one column"]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    rows=SIDES, depth=SIDES, columns=SIDES, a=LAYOUTS, b=LAYOUTS, add=st.booleans(), number=st.integers(1, 7),
    pad=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_matmul_of_any_strides(rows, depth, columns, a, b, add, number, pad, seed):
    torch.manual_seed(seed)
    a, b = strided(rows, depth, a), strided(depth, columns, b)
    around = torch.randint(-4, 5, (rows + 2, columns + pad)).float()
    out = around[1:-1, :columns]
    expected = around.clone()
    expected[1:-1, :columns] = torch.mm(a.double(), b.double()).float() + (out if add else 0)
    with threads(number):
        cpp.matmul(a, b, out, accumulate=add)
    assert torch.equal(around, expected)  # nothing beside it is touched


@pytest.mark.parametrize("columns", [2047, 2048, 2049, 4100])
def test_more_columns_than_are_packed_at_once(columns):
    a, b = strided(13, 70, "rows"), strided(70, columns, "columns")
    assert torch.equal(by_cpp(a, b), a @ b)


@pytest.mark.parametrize("depth", [1, 50, 192, 193, 384, 1000, 5000])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_it_rounds_as_little_as_torchs(depth, size):
    def inputs():
        return dict(a=torch.randn(37, depth) * size, b=torch.randn(depth, 45))

    assert_accurate_over_seeds(by_cpp, lambda a, b: a @ b, inputs, seeds=range(10))


def test_an_element_depends_on_its_row_and_column_alone():
    a, b = torch.randn(301, 700), torch.randn(700, 259)
    whole = by_cpp(a, b)
    for rows, columns in ((1, 259), (7, 100), (150, 33)):
        for top, left in ((0, 0), (301 - rows, 259 - columns)):
            part = by_cpp(a[top : top + rows], b[:, left : left + columns])
            assert torch.equal(part, whole[top : top + rows, left : left + columns])
    for number in (2, 3, 8):
        with threads(number):
            assert torch.equal(by_cpp(a, b), whole)


def test_what_is_not_finite_stays_in_its_row_and_column():
    a, b = torch.randn(50, 60), torch.randn(60, 70)
    expected = by_cpp(a, b)
    a[7, 3], b[5, 69] = math.inf, math.nan
    made = by_cpp(a, b)
    touched = torch.zeros(50, 70, dtype=torch.bool)
    touched[7], touched[:, 69] = True, True
    assert torch.equal(made[~touched], expected[~touched])
    assert not made[touched].isfinite().any()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-DWIDE", "-march=x86-64"])
def test_other_builds(option, tmp_path, monkeypatch):
    """Builds with vectors of AVX-512's width, and without AVX."""
    if option == "-march=x86-64" and platform.machine() != "x86_64":
        pytest.skip("another kind of processor")
    monkeypatch.setattr(cpp, "_OPTIONS", [*cpp._OPTIONS, option])
    library = cpp._built(cpp._compiler(), tmp_path / "cpp.so")
    monkeypatch.setattr(cpp, "library", lambda: library)
    for rows, columns in itertools.product((1, 6, 50), (1, 33, 64)):
        a, b = strided(rows, 400, "rows"), strided(400, columns, "columns")
        assert torch.equal(by_cpp(a, b), a @ b)
        assert torch.equal(by_cpp(b.t(), a.t()), b.t() @ a.t())


# The op.


@pytest.mark.parametrize("leading", [(M,), (3, 100), (2, 3, 50)])
def test_linear_is_torchs(ours, leading):
    x, weight, dout = torch.randn(*leading, K), torch.randn(N, K), torch.randn(*leading, N)
    made = with_gradients(linear, x, weight, dout)
    exact = with_gradients(F.linear, x.double(), weight.double(), dout.double())
    torch.testing.assert_close([m.double() for m in made], list(exact), atol=2e-4, rtol=1e-5)
    assert sorted(ours) == sorted([(M, K, N), (M, N, K), (K, M, N)])


def test_accuracy_of_linear_and_its_gradients(ours):
    def inputs():
        return dict(x=torch.randn(M, K), weight=torch.randn(N, K), dout=torch.randn(M, N))

    def by(function):
        return lambda x, weight, dout: with_gradients(function, x, weight, dout)

    assert_accurate_over_seeds(by(linear), by(F.linear), inputs, seeds=range(5))
    assert ours


def test_only_what_is_needed_is_computed(ours):
    x, weight = torch.randn(M, K, requires_grad=True), torch.randn(N, K)
    linear(x, weight).sum().backward()
    assert ours == [(M, K, N), (M, N, K)]
    with torch.no_grad():
        linear(x, weight.requires_grad_())
    assert len(ours) == 3


def test_compiled_it_is_the_same(ours):
    x, weight, dout = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    compiled = torch.compile(linear, fullgraph=True)
    made, expected = (with_gradients(f, x, weight, dout) for f in (compiled, linear))
    assert all(map(torch.equal, made, expected))
    assert len(ours) == 6


def test_the_op_is_well_defined(ours):
    for a, b in ((torch.randn(M, K), torch.randn(K, N)), (torch.randn(K, M).t(), torch.randn(N, K).t())):
        torch.library.opcheck(matmul, (a.requires_grad_(), b.requires_grad_()))


def test_its_gradient_has_a_gradient(ours):
    x, weight = (torch.randn(size, requires_grad=True) for size in ((M, K), (N, K)))

    def second(function):
        (dx,) = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), weight)

    (made,), (expected,) = second(linear), second(F.linear)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


# Which matmul runs.


@pytest.mark.parametrize("shape", [(1, K, N), (95, 2000, 500), (M, K, 95), (128, 128, 128), (M, 0, N), (0, K, N)])
def test_small_matmuls_are_torchs(ours, shape):
    rows, depth, columns = shape
    x, weight = torch.randn(rows, depth), torch.randn(columns, depth)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    assert not ours


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_torchs(ours, dtype):
    x, weight = torch.randn(M, 120, dtype=dtype), torch.randn(N, 120, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.float(), weight.float()).dtype == torch.bfloat16
    assert not ours


def test_errors_are_torchs(ours):
    for weight in (torch.randn(N, K + 1), torch.randn(N, K).double(), torch.randn(N, K, 1)):
        with pytest.raises(RuntimeError) as expected:
            F.linear(torch.randn(M, K), weight)
        with pytest.raises(RuntimeError) as raised:
            linear(torch.randn(M, K), weight)
        assert str(raised.value) == str(expected.value)


def test_a_sharded_weight_is_left_to_torch(ours):
    class DTensor(torch.Tensor):
        pass

    x, weight = torch.randn(M, K), torch.randn(N, K)
    assert torch.equal(linear(x, weight.as_subclass(DTensor)), F.linear(x, weight))
    assert not ours


def test_the_head_multiplies_alike(ours):
    hidden, weight = torch.randn(512, 200, requires_grad=True), torch.randn(1000, 200, requires_grad=True)
    target = torch.randint(1000, (512,))
    made = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))
    assert ours == 2 * [(256, 200, 1000), (256, 1000, 200), (1000, 256, 200)]  # two chunks
    exact = torch.autograd.grad(F.cross_entropy(F.linear(hidden.double(), weight.double()), target), (hidden, weight))
    torch.testing.assert_close(made, exact, atol=1e-7, rtol=1e-4)


def test_an_output_whose_rows_are_apart_is_torchs(ours):
    a, b = torch.randn(M, K), torch.randn(K, N)
    out = torch.zeros(N, M).t()
    matmul_out(a, b, out)
    assert torch.equal(out, a @ b)
    assert not ours


AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fma avx2 sse4a\n\nvendor_id\t: another processor\n"


@pytest.mark.parametrize(
    ("cpuinfo", "faster"),
    [
        (AMD, (96, 1 << 25)),
        (AMD.replace("sse4a", "avx512f"), None),
        (AMD.replace("sse4a", "avx512f").replace("flags", "cpu family\t: 25\nflags"), (96, 1 << 25)),  # Zen 4
        (AMD.replace("sse4a", "avx512f").replace("flags", "cpu family\t: 26\nflags"), (32, 1 << 19)),  # Zen 5
        (AMD.replace("AuthenticAMD", "GenuineIntel"), None),
        (AMD.replace("avx2", ""), None),
        ("Features\t: asimd\n", None),
        ("", None),
    ],
)
def test_who_is_known_to_be_faster(cpuinfo, faster, monkeypatch):
    monkeypatch.setattr(cpp, "_cpuinfo", lambda: cpuinfo.split("\n\n")[0].splitlines())
    cpp._faster_matmuls.cache_clear()
    assert cpp.faster_matmuls() == faster
    monkeypatch.setattr(cpp, "missing", lambda: "there is no C++ compiler (g++)")
    cpp._faster_matmuls.cache_clear()
    assert cpp.faster_matmuls() is None
    cpp._faster_matmuls.cache_clear()


# The module.


@pytest.mark.parametrize("bias", [False, True])
def test_module_is_torchs(ours, bias):
    torch.manual_seed(0)
    theirs = nn.Linear(K, N, bias=bias)
    torch.manual_seed(0)
    made = Linear(K, N, bias=bias)
    assert all(map(torch.equal, made.parameters(), theirs.parameters()))
    x = torch.randn(2, M, K)
    torch.testing.assert_close(made(x), theirs(x), atol=1e-5, rtol=1e-5)
    assert ours == ([] if bias else [(2 * M, K, N)])
    assert made.state_dict().keys() == theirs.state_dict().keys()
