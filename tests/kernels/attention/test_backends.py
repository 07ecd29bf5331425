"""The choice of a backend: what auto picks, what each refuses and why, and the calls of the two that are not ours."""

import dataclasses
import sys
import types

import pytest
import torch

from fasttrain_kernels import attention, attention_backend, attention_reference, cpp, explain_attention_backend
from fasttrain_kernels.ops.attention import backends
from fasttrain_kernels.ops.attention.backends import Request, choose, explain
from fasttrain_kernels.testing import assert_accurate, interpret

PLAIN = Request(
    device="cuda",
    dtype=torch.bfloat16,
    num_queries=64,
    num_keys=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    causal=True,
    window=None,
    documents=False,
    cu_seqlens=False,
    softcap=None,
    kernels_on_cpu=False,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "sdpa"),
        (dict(causal=False, num_queries=3), "sdpa"),
        (dict(num_queries=1), "sdpa"),
        (dict(num_queries=3), "triton"),
        (dict(window=8), "triton"),
        (dict(documents=True), "triton"),
        (dict(softcap=30.0), "triton"),
        (dict(dtype=torch.float32), "triton"),
        (dict(dtype=torch.float32, num_kv_heads=4), "sdpa"),
        (dict(head_dim=512), "sdpa"),
        (dict(device="cpu"), "sdpa"),
        (dict(device="cpu", window=8), "blocked"),
        (dict(device="cpu", num_queries=3), "blocked"),
        (dict(device="cpu", head_dim=512, softcap=1.0), "blocked"),
        (dict(device="cpu", kernels_on_cpu=True), "triton"),
        (dict(device="cpu", dtype=torch.float32), "cpp"),
        (dict(device="cpu", dtype=torch.float32, window=8, documents=True, head_dim=512), "cpp"),
        (dict(device="cpu", dtype=torch.float32, num_queries=3), "cpp"),
        (dict(device="cpu", dtype=torch.float32, num_queries=1), "sdpa"),
        (dict(device="cpu", dtype=torch.float32, softcap=30.0), "blocked"),
        (dict(device="cpu", dtype=torch.float64), "sdpa"),
        (dict(device="cpu", dtype=torch.float32, kernels_on_cpu=True), "triton"),
    ],
)
def test_auto_without_flash_attn(change, expected):
    assert choose(dataclasses.replace(PLAIN, **change), "auto") == expected


@pytest.mark.parametrize(
    ("change", "expected"), [({}, "sdpa"), (dict(num_queries=3), "blocked"), (dict(documents=True), "blocked")]
)
def test_auto_without_a_compiler(change, expected, monkeypatch):
    monkeypatch.setattr(cpp, "missing", lambda: "g++ cannot compile: struct { int x }")
    request = dataclasses.replace(PLAIN, device="cpu", dtype=torch.float32, **change)
    assert choose(request, "auto") == expected
    assert explain(request)["cpp"] == "g++ cannot compile: struct { int x }"
    with pytest.raises(ValueError, match=r'"cpp" cannot do this \(g\+\+ cannot compile'):
        choose(request, "cpp")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "flash"),
        (dict(num_queries=3), "flash"),
        (dict(documents=True, cu_seqlens=True, window=8, softcap=30.0), "flash"),
        (dict(documents=True), "triton"),  # bounds alone
        (dict(dtype=torch.float32), "triton"),
        (dict(device="cpu"), "sdpa"),
        (dict(head_dim=512), "sdpa"),
    ],
)
def test_auto_prefers_flash_attn_where_it_is_installed(change, expected, monkeypatch):
    monkeypatch.setattr(backends, "_flash_attn_installed", lambda: True)
    assert choose(dataclasses.replace(PLAIN, **change), "auto") == expected


def test_explain_says_why_not():
    reasons = explain(dataclasses.replace(PLAIN, window=8, dtype=torch.float32))
    assert reasons == {
        "flash": "dtype torch.float32: it takes bfloat16 and float16",
        "cpp": "device cuda: it runs on CPUs",
        "sdpa": "window=8",
        "triton": "ok",
        "blocked": "device cuda: it runs on CPUs and on MPS",
    }


@pytest.mark.parametrize(
    ("change", "backend", "message"),
    [
        (dict(window=8), "sdpa", 'attention: backend "sdpa" cannot do this (window=8); backends that can: triton'),
        (
            dict(softcap=2.0),
            "sdpa",
            'attention: backend "sdpa" cannot do this (softcap=2.0); backends that can: triton',
        ),
        (
            dict(documents=True),
            "sdpa",
            'attention: backend "sdpa" cannot do this (documents); backends that can: triton',
        ),
        (
            dict(num_queries=3),
            "sdpa",
            'attention: backend "sdpa" cannot do this (causal with 3 queries and 64 keys: it aligns them at the first '
            "key); backends that can: triton",
        ),
        (
            dict(device="cpu"),
            "triton",
            'attention: backend "triton" cannot do this (device cpu: it runs on GPUs, and on CPU tensors inside '
            "fasttrain_kernels.testing.interpret()); backends that can: sdpa, blocked",
        ),
        (
            {},
            "flash",
            'attention: backend "flash" cannot do this (the package flash-attn is not installed); backends that can: '
            "sdpa, triton",
        ),
        (
            dict(device="cpu", dtype=torch.float32, softcap=2.0),
            "cpp",
            'attention: backend "cpp" cannot do this (softcap=2.0); backends that can: blocked',
        ),
        (
            dict(device="cpu"),
            "cpp",
            'attention: backend "cpp" cannot do this (dtype torch.bfloat16: it takes float32); backends that can: '
            "sdpa, blocked",
        ),
        (
            dict(device="cpu", dtype=torch.float32, num_queries=1),
            "cpp",
            'attention: backend "cpp" cannot do this (a single query: there is no work to share); backends that can: '
            "sdpa, blocked",
        ),
        ({}, "cudnn", 'attention: backend "cudnn" is unknown; choose from auto, flash, cpp, sdpa, triton, blocked'),
    ],
)
def test_asking_for_the_impossible_is_an_error(change, backend, message):
    with pytest.raises(ValueError) as error:
        choose(dataclasses.replace(PLAIN, **change), backend)
    assert str(error.value) == message


def test_nobody_can():
    with pytest.raises(
        ValueError, match="attention: no backend can do this: flash: head dimension 512: it takes up to 256; "
    ):
        choose(dataclasses.replace(PLAIN, head_dim=512, window=8), "auto")


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


class FlashStub(types.ModuleType):
    """flash-attn's two functions, computed by the reference; and the arguments that they were given."""

    def __init__(self):
        super().__init__("flash_attn")
        self.seen = {}

    def flash_attn_func(self, q, k, v, **options):
        assert options["deterministic"]
        self.seen = options
        return attention_reference(q, k, v, **self._translated(**options))

    def flash_attn_varlen_func(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        assert options["deterministic"]
        self.seen = options | dict(max_seqlen=(max_seqlen_q, max_seqlen_k))
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert q.ndim == k.ndim == v.ndim == 3
        out = attention_reference(q[None], k[None], v[None], cu_seqlens=cu_seqlens_q, **self._translated(**options))
        return out[0]

    @staticmethod
    def _translated(softmax_scale, causal, window_size, softcap, deterministic):
        left, right = window_size
        assert right == (0 if causal and left >= 0 else left)
        return dict(causal=causal, window=None if left < 0 else left + 1, softcap=softcap or None, scale=softmax_scale)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("options", "window_size"),
    [
        (dict(causal=True, window=None), (-1, -1)),
        (dict(causal=False, window=None, softcap=3.0), (-1, -1)),
        (dict(causal=True, window=9), (8, 0)),
        (dict(causal=False, window=9, softcap=3.0), (8, 8)),
    ],
)
def test_flash_attn_is_asked_for_the_same_thing(options, window_size, documents, make, cu_seqlens, monkeypatch):
    stub = FlashStub()
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    inputs = make(batch=2, queries=200)
    cu_seqlens = cu_seqlens if documents else None
    asked = dict(softcap=None) | options
    out = backends.flash(**inputs, cu_seqlens=cu_seqlens, scale=0.3, **asked)
    torch.testing.assert_close(out, attention_reference(**inputs, cu_seqlens=cu_seqlens, scale=0.3, **asked))
    assert stub.seen["window_size"] == window_size
    assert stub.seen["causal"] == options["causal"]
    assert stub.seen["softcap"] == (options.get("softcap") or 0.0)
    assert stub.seen.get("max_seqlen") == ((400, 400) if documents else None)


def test_importing_looks_for_no_package():
    assert "flash_attn" not in sys.modules
