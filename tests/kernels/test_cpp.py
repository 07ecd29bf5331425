"""The C++ for CPUs: softmax of rows, and how it is compiled, kept, and done without (attention/ tests attention)."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fasttrain_kernels import (
    attention,
    attention_backend,
    attention_reference,
    cpp,
    explain_attention_backend,
    linear_cross_entropy,
)
from fasttrain_kernels.testing import assert_accurate_over_seeds

ROOT = Path(__file__).parents[2]


# Softmax of rows.


def in_place(x):
    y = x.clone()
    return y, *cpp.softmax_rows(y)


def reference(x):
    top = x.amax(1)
    return torch.softmax(x, 1), top, (x - top[:, None]).exp().sum(1)


@pytest.mark.parametrize("size", [1.0, 10.0, 1e4])
@pytest.mark.parametrize("columns", [1, 7, 31, 32, 33, 1000])
def test_softmax_is_as_accurate_as_torch(columns, size):
    assert_accurate_over_seeds(in_place, reference, lambda: dict(x=torch.randn(5, columns) * size), seeds=range(10))


@pytest.mark.parametrize("columns", [7, 1000])
def test_softmax_leaves_the_padding_of_rows_alone(columns):
    padded = torch.randn(6, columns + 9)
    before, x = padded.clone(), padded[1:5, 2 : columns + 2]
    expected = reference(x.double())
    top, total = cpp.softmax_rows(x)
    torch.testing.assert_close((x.double(), top.double(), total.double()), expected, atol=1e-6, rtol=1e-5)
    x.copy_(before[1:5, 2 : columns + 2])
    assert torch.equal(padded, before)


@pytest.mark.parametrize("columns", [1, 7, 31, 1000])
def test_softmax_of_equal_values_is_even(columns):
    for value in (0.0, -1e4, 3e38):
        y, top, total = in_place(torch.full((3, columns), value))
        torch.testing.assert_close(y, torch.full((3, columns), 1 / columns))
        assert (top == value).all()
        assert (total == columns).all()


@pytest.mark.parametrize("columns", [7, 100])
def test_softmax_of_infinities_and_nan_is_that_of_torch(columns):
    x = torch.randn(7, columns)
    x[0, ::2] = -torch.inf
    x[1, 1:] = -torch.inf
    x[2] = -torch.inf
    x[3, columns - 1] = torch.inf
    x[4, 0] = x[5, columns - 1] = torch.nan
    x[6, columns // 2] = torch.nan
    y, top, total = in_place(x)
    torch.testing.assert_close(y, torch.softmax(x, 1), equal_nan=True)
    torch.testing.assert_close(top + total.log(), x.logsumexp(1).where(~y.isnan().any(1), torch.nan), equal_nan=True)
    assert (y[0, ::2] == 0).all()


def test_softmax_is_the_same_with_any_number_of_threads():
    x, before = torch.randn(9, 333), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = in_place(x)
        torch.set_num_threads(2)
        assert all(map(torch.equal, in_place(x), one))
    finally:
        torch.set_num_threads(before)


def test_no_rows():
    y, top, total = in_place(torch.empty(0, 5))
    assert (y.shape, top.shape, total.shape) == ((0, 5), (0,), (0,))


# The library.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The empty cache of a new user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield tmp_path / "cache" / "fasttrain"
    forget()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A source that compiles in no time."""
    source = tmp_path / "tiny.cpp"
    source.write_text("")
    monkeypatch.setattr(cpp, "_SOURCES", [source])
    return source


def forget():
    cpp._missing.cache_clear()
    cpp.library.cache_clear()


def assert_works():
    q = torch.randn(1, 70, 2, 16)
    torch.testing.assert_close(attention(q, q, q, backend="cpp"), attention_reference(q, q, q), atol=1e-5, rtol=1e-5)


def loss_and_gradients():
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.arange(20), z_loss=0.01, label_smoothing=0.1)
    return loss, *torch.autograd.grad(loss, (hidden, weight))


def test_it_is_compiled_once(cache, monkeypatch):
    assert cpp.missing() == ""
    assert [path.name.split("-")[0] for path in cache.iterdir()] == ["cpp"]
    forget()
    monkeypatch.setattr(cpp, "_built", None)
    assert_works()


def test_another_source_is_another_library_and_so_are_other_options(cache, tiny, monkeypatch):
    assert cpp.missing() == ""
    tiny.write_text("int another;")
    forget()
    assert cpp.missing() == ""
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(cpp, "_OPTIONS", [*cpp._OPTIONS, "-DANOTHER"])
    forget()
    assert cpp.missing() == ""
    assert len(list(cache.iterdir())) == 3


def test_without_a_compiler_ops_take_torch(cache, tmp_path, monkeypatch):
    expected = loss_and_gradients()
    forget()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpp.missing() == "there is no C++ compiler (g++)"
    torch.testing.assert_close(loss_and_gradients(), expected)
    q = torch.randn(1, 70, 2, 16)
    assert attention_backend(q, q, q) == "sdpa"
    assert attention_backend(q, q, q, window=9) == "blocked"
    torch.testing.assert_close(attention(q, q, q, window=9), attention_reference(q, q, q, window=9))
    with pytest.raises(ValueError, match=r'"cpp" cannot do this \(there is no C\+\+ compiler \(g\+\+\)\)'):
        attention(q, q, q, backend="cpp")


def test_a_compiler_that_is_asked_for_is_not_replaced_by_another(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert cpp.missing() == "there is no C++ compiler (CXX=no-such-compiler)"


def test_cxx_may_have_arguments(cache, monkeypatch):
    monkeypatch.setenv("CXX", "env g++ -g0")
    assert cpp.missing() == ""
    assert_works()


def test_what_a_failing_compiler_says(cache, tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'attention.cpp:12: error: struct {x} is too modern' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    message = f"{compiler} cannot compile fasttrain_kernels/cpp: attention.cpp:12: error: struct {{x}} is too modern"
    assert cpp.missing() == message
    q = torch.randn(1, 70, 2, 16)
    assert explain_attention_backend(q, q, q)["cpp"] == message
    assert attention_backend(q, q, q) == "sdpa"
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_only_time(cache, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert cpp.missing() == ""
    assert_works()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_library_that_cannot_be_loaded_is_missing(cache, tiny):
    assert cpp.missing() == ""
    (built,) = cache.iterdir()
    built.unlink()  # not written to: it is in use
    built.write_bytes(b"no library")
    forget()
    assert str(built) in cpp.missing()


def test_nobody_has_a_home(cache, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert cpp.missing() == "Could not determine home directory."


def test_two_processes_compile_at_once(cache):
    script = "from fasttrain_kernels import cpp; print(cpp.missing() or 'works')"
    environment = os.environ | dict(PYTHONPATH=str(ROOT / "kernels"))
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["works\n", "works\n"]
    assert len(list(cache.iterdir())) == 1


def test_a_wheel_has_the_sources(monkeypatch):
    from setuptools import Distribution

    monkeypatch.chdir(ROOT / "kernels")
    distribution = Distribution()
    distribution.parse_config_files()
    distribution.include_package_data = False  # would write a list of files
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    files = {
        Path(directory, name)
        for package, directory, _, names in build.data_files
        for name in names
        if package == "fasttrain_kernels.cpp"
    }
    assert {Path(ROOT, "kernels", file) for file in files} == set(cpp._SOURCES)
