"""The choice of a backend: what auto picks, what each refuses and why, and the calls of those that are not ours."""

import ast
import dataclasses
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain_kernels import attention, attention_backend, attention_reference, cpp, explain_attention_backend
from fasttrain_kernels.ops.attention import capabilities, vendors
from fasttrain_kernels.ops.attention.capabilities import GPUS, TABLE, Request, choose, explain
from fasttrain_kernels.testing import assert_accurate, interpret
from tests.docs.pages import DOCS

PACKAGES = ("flash-attn", "flash-attn-3", "flash-attn-4")
GPU = Request(
    generation="ampere", dtype="bfloat16", num_queries=64, num_keys=64, num_heads=4, num_kv_heads=2, head_dim=64
)
CPU = dataclasses.replace(GPU, generation="cpu", repeats=False)


@pytest.fixture
def have(monkeypatch):
    """Install packages, and no others."""

    def have(*packages):
        monkeypatch.setattr(capabilities, "installed", lambda package: package in packages)

    have()
    return have


# What the documentation says: for a plain causal call with documents, in bfloat16. 2, 3, 4: that FlashAttention is
# installed. The first that applies.
DOCUMENTED = {
    ("ampere", True): ["varlen"], ("ampere", False): ["varlen"], ("ada", True): ["varlen"], ("ada", False): ["varlen"],
    ("hopper", True): ["4 fa4", "2 fa2", "varlen"], ("hopper", False): ["4 fa4", "3 fa3", "2 fa2", "varlen"],
    ("blackwell", True): ["4 fa4", "2 fa2", "varlen"], ("blackwell", False): ["4 fa4", "2 fa2", "varlen"],
    ("blackwell-geforce", True): ["2 fa2", "varlen"], ("blackwell-geforce", False): ["2 fa2", "varlen"],
    ("cdna3", True): ["triton"], ("cdna3", False): ["varlen"], ("gpu", True): ["triton"], ("gpu", False): ["triton"],
}  # fmt: skip


@pytest.mark.parametrize("generation", GPUS)
@pytest.mark.parametrize("repeats", [True, False])
def test_every_set_of_packages_on_every_gpu(generation, repeats, have):
    for count in range(4):
        for packages in itertools.combinations(PACKAGES, count):
            have(*packages)
            digits = {
                "2" * ("flash-attn" in packages),
                "3" * ("flash-attn-3" in packages),
                "4" * (PACKAGES[2] in packages),
            }
            words = (line.split() for line in DOCUMENTED[generation, repeats])
            expected = next(name for *package, name in words if {*package} <= digits)
            request = dataclasses.replace(GPU, generation=generation, documents="cu_seqlens", repeats=repeats)
            assert choose(request, "auto") == expected, packages


def test_every_request_has_a_backend_or_an_error_that_says_why(have):
    """All packages, GPUs, masks, dtypes and head dimensions: no crash, and never one that refuses."""
    values: dict[str, Any] = dict(
        generation=(*GPUS, "cpu", "mps"), dtype=("bfloat16", "float32", "float64"), head_dim=(20, 64, 192, 256, 512),
        num_queries=(1, 3, 64), window=(None, 8), documents=("", "cu_seqlens", "bounds"), softcap=(None, 3.0),
        repeats=(True, False),
    )  # fmt: skip
    nobody, asked = 0, 0
    for packages in ((), ("flash-attn",), ("flash-attn-4",), PACKAGES):
        have(*packages)
        for combination in itertools.product(*values.values()):
            request = dataclasses.replace(GPU, **dict(zip(values, combination, strict=True)))
            asked += 1
            answers = explain(request)
            if "ok" in (answers[name] for name in capabilities.PREFERENCE[request.generation]):
                chosen = choose(request, "auto")
                assert answers[chosen] == "ok"
                assert not request.repeats or request.generation in TABLE[chosen].repeats
                continue
            nobody += 1
            assert request.head_dim > 256 or request.dtype == "float64"
            with pytest.raises(ValueError, match="no backend can do this"):
                choose(request, "auto")
    assert asked == 38880
    assert nobody < asked / 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "varlen"),
        (dict(num_queries=3), "varlen"),
        (dict(num_queries=1, repeats=False), "varlen"),
        (dict(window=8, documents="cu_seqlens"), "varlen"),
        (dict(documents="bounds"), "triton"),
        (dict(softcap=30.0), "triton"),
        (dict(head_dim=20), "triton"),
        (dict(dtype="float32"), "triton"),
        (dict(dtype="float32", num_kv_heads=4), "triton"),  # torch's gradients differ between runs
        (dict(dtype="float32", num_kv_heads=4, repeats=False), "sdpa"),
        (dict(dtype="float32", num_kv_heads=4, torch_repeats=True), "sdpa"),
        (dict(head_dim=512, repeats=False), "sdpa"),
        (dict(generation="cdna3"), "triton"),
        (dict(generation="gpu", repeats=False), "sdpa"),
        (dict(generation="blackwell", repeats=False), "cudnn"),
        (dict(generation="blackwell", repeats=False, window=8), "varlen"),
    ],
)
def test_auto_without_packages(change, expected, have):
    assert choose(dataclasses.replace(GPU, **change), "auto") == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "sdpa"),
        (dict(window=8), "blocked"),
        (dict(num_queries=3), "blocked"),
        (dict(head_dim=512, softcap=1.0), "blocked"),
        (dict(interpreted=True), "triton"),
        (dict(dtype="float32"), "cpp"),
        (dict(dtype="float32", repeats=True), "cpp"),
        (dict(dtype="float32", window=8, documents="bounds", head_dim=512), "cpp"),
        (dict(dtype="float32", num_queries=1), "sdpa"),
        (dict(dtype="float32", softcap=30.0), "blocked"),
        (dict(dtype="float64", repeats=True), "sdpa"),
        (dict(dtype="float32", interpreted=True), "triton"),
        (dict(generation="mps", dtype="float32", window=8), "blocked"),
    ],
)
def test_auto_on_cpus(change, expected):
    assert choose(dataclasses.replace(CPU, **change), "auto") == expected


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (dict(generation="blackwell", head_dim=192), "head dimension 192: on Blackwell it takes up to 128, and 256"),
        (dict(generation="blackwell", head_dim=256), "ok"),
        (dict(generation="blackwell", head_dim=256, softcap=3.0), "softcap=3.0 with a head dimension of 256"),
        (dict(generation="hopper", head_dim=192, softcap=3.0), "ok"),
        (dict(generation="ampere"), "device ampere: it runs on hopper, blackwell, blackwell-geforce"),
        (
            dict(generation="blackwell-geforce"),
            "its gradients differ between runs; deterministic=False allows that",
        ),
        (dict(generation="blackwell-geforce", repeats=False), "ok"),
        (dict(generation="hopper", num_keys=0), "no keys"),
    ],
)
def test_flash_attn_4(change, refusal, have):
    have("flash-attn-4")
    assert explain(dataclasses.replace(GPU, **change))["fa4"] == refusal


@pytest.mark.parametrize(
    ("change", "expected"), [({}, "sdpa"), (dict(num_queries=3), "blocked"), (dict(documents="bounds"), "blocked")]
)
def test_auto_without_a_compiler(change, expected, monkeypatch):
    monkeypatch.setattr(cpp, "missing", lambda: "g++ cannot compile: struct { int x }")
    request = dataclasses.replace(CPU, dtype="float32", **change)
    assert choose(request, "auto") == expected
    assert explain(request)["cpp"] == "g++ cannot compile: struct { int x }"
    with pytest.raises(ValueError, match=r'"cpp" cannot do this \(g\+\+ cannot compile'):
        choose(request, "cpp")


def test_explain_says_why_not(have):
    reasons = explain(dataclasses.replace(GPU, window=8, softcap=2.0))
    assert reasons == {
        "varlen": "softcap=2.0",
        "fa2": "the package flash-attn is not installed",
        "sdpa": "window=8",
        "triton": "ok",
        "fa4": "device ampere: it runs on hopper, blackwell, blackwell-geforce",
        "fa3": "device ampere: it runs on hopper",
        "cudnn": "window=8",
        "cpp": "device ampere: it runs on cpu",
        "blocked": "device ampere: it runs on cpu, mps",
    }


@pytest.mark.parametrize(
    ("request_", "backend", "message"),
    [
        (
            dataclasses.replace(GPU, window=8),
            "sdpa",
            'attention: backend "sdpa" cannot do this (window=8); backends that can: varlen, triton',
        ),
        (
            dataclasses.replace(GPU, num_queries=3),
            "sdpa",
            'attention: backend "sdpa" cannot do this (causal with 3 queries and 64 keys: it aligns them at the first '
            "key); backends that can: varlen, triton",
        ),
        (
            GPU,
            "fa2",
            'attention: backend "fa2" cannot do this (the package flash-attn is not installed); backends that can: '
            "varlen, triton",
        ),
        (
            CPU,
            "triton",
            'attention: backend "triton" cannot do this (device cpu: it runs on GPUs, and on CPU tensors inside '
            "fasttrain_kernels.testing.interpret()); backends that can: sdpa, blocked",
        ),
        (
            CPU,
            "cpp",
            'attention: backend "cpp" cannot do this (dtype bfloat16: it takes float32); backends that can: '
            "sdpa, blocked",
        ),
        (
            dataclasses.replace(CPU, dtype="float32", num_queries=1),
            "cpp",
            'attention: backend "cpp" cannot do this (a single query: there is no work to share); backends that can: '
            "sdpa, blocked",
        ),
        (
            GPU,
            "flex",
            'attention: backend "flex" is unknown; choose from auto, fa4, fa3, fa2, varlen, cudnn, sdpa, triton, cpp, '
            "blocked",
        ),
    ],
)
def test_asking_for_the_impossible_is_an_error(request_, backend, message, have):
    with pytest.raises(ValueError) as error:
        choose(request_, backend)
    assert str(error.value) == message


def test_the_public_functions_answer_for_tensors(make):
    inputs = make(queries=8)
    assert attention_backend(**inputs) == attention_backend(**inputs, window=3) == "cpp"
    assert attention_backend(**inputs, softcap=3.0) == "blocked"
    assert explain_attention_backend(**inputs, window=3)["sdpa"] == "window=3"
    with interpret():
        assert attention_backend(**inputs) == "triton"
        with pytest.raises(ValueError, match=r'"blocked" cannot do this \(inside interpret\(\)'):
            attention(**inputs, backend="blocked")


@pytest.mark.parametrize(
    ("capability", "generation"),
    [(80, "ampere"), (86, "ampere"), (89, "ada"), (90, "hopper"), (100, "blackwell"), (103, "blackwell"),
     (120, "blackwell-geforce"), (75, "gpu"), (110, "gpu")],
)  # fmt: skip
def test_generations(capability, generation, monkeypatch):
    monkeypatch.setattr(vendors, "compute_capability", lambda device: capability)
    assert vendors._generation(torch.device("cuda")) == generation


def test_the_page_has_the_table():
    page = (DOCS / "kernels" / "attention.md").read_text()
    for name, row in TABLE.items():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.package in line
        assert ("softcap" in line) != row.softcap
        assert ("window" in line) != row.window


def test_a_namespace_is_no_flash_attn(tmp_path, monkeypatch):
    """flash-attn-4 alone: its wheel has flash_attn/cute, and no flash_attn/__init__.py."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("")
    metadata = tmp_path / "flash_attn_4-4.0.0b36.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    capabilities._is_installed.cache_clear()
    importlib.invalidate_caches()
    try:
        assert not capabilities.installed("flash-attn")
        assert capabilities.installed("flash-attn-4")
        assert not capabilities.installed("flash-attn-3")
        request = dataclasses.replace(GPU, documents="cu_seqlens")
        assert choose(request, "auto") == "varlen"
        assert choose(dataclasses.replace(request, generation="hopper"), "auto") == "fa4"
    finally:
        capabilities._is_installed.cache_clear()


def test_nothing_of_torch_is_needed_to_choose():
    tree = ast.parse(Path(capabilities.__file__).read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported <= {*sys.stdlib_module_names, "importlib.metadata", "importlib.util", "collections.abc"}


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (dict(batch=2, heads=3), {}),
        (dict(heads=2, kv_heads=2), dict(causal=False, scale=0.3)),
        (dict(queries=1, keys=33), {}),
        (dict(queries=5, keys=33), dict(causal=False)),
    ],
)
def test_sdpa_is_the_reference(shapes, options, make, eager):
    def sdpa(**inputs):
        return attention(**inputs, backend="sdpa")

    assert_accurate(sdpa, attention_reference, make(**shapes) | options, eager=eager)


def test_importing_looks_for_no_package():
    assert "flash_attn" not in sys.modules
