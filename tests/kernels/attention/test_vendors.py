"""The backends that are not ours are asked for the same thing: each is computed by the reference."""

import functools
import sys
import types
from typing import Any

import pytest
import torch

from fasttrain_kernels import attention_reference
from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.ops.attention import blocked, vendors
from fasttrain_kernels.ops.attention.intervals import _bounds_cpu
from tests.kernels.attention import packages

CALLS = {  # options of attention, and the window that flash-attn is given
    "causal": (dict(causal=True, window=None, softcap=None), (-1, -1)),
    "softcap": (dict(causal=False, window=None, softcap=3.0), (-1, -1)),
    "window": (dict(causal=True, window=9, softcap=None), (8, 0)),
    "window, softcap": (dict(causal=False, window=9, softcap=3.0), (8, 8)),
}


def flash(q, k, v, cu_seqlens, *, causal, left, right, softcap, scale):
    """As flash-attn counts: batches, or a stream of documents."""
    assert right in (left, 0)
    options = dict(causal=causal, window=None if left < 0 else left + 1, softcap=softcap or None, scale=scale)
    if cu_seqlens is None:
        return attention_reference(q, k, v, **options)
    assert q.ndim == k.ndim == v.ndim == 3
    return attention_reference(q[None], k[None], v[None], cu_seqlens=cu_seqlens, **options)[0]


class Package(types.ModuleType):
    """The two functions of FlashAttention 2 and 3, and what they were given."""

    def __init__(self, *, returns_lse: bool) -> None:
        super().__init__("flash_attn")
        self.seen: dict[str, Any] = {}
        self._returns_lse = returns_lse

    def _call(self, q, k, v, cu_seqlens, *, softmax_scale, causal, window_size, softcap, deterministic, **longest):
        self.seen = dict(window_size=window_size, deterministic=deterministic, causal=causal, **longest)
        left, right = window_size
        out = flash(q, k, v, cu_seqlens, causal=causal, left=left, right=right, softcap=softcap, scale=softmax_scale)
        return (out, None) if self._returns_lse else out

    def flash_attn_func(self, q, k, v, **options):
        return self._call(q, k, v, None, **options)

    def flash_attn_varlen_func(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, **options):
        assert cu_seqlens_q is cu_seqlens_k
        return self._call(q, k, v, cu_seqlens_q, **options)


@pytest.mark.parametrize(("name", "returns_lse"), [("flash_attn", False), ("flash_attn_interface", True)])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("options", "window_size"), CALLS.values(), ids=CALLS)
def test_flash_attn_2_and_3(name, returns_lse, options, window_size, documents, make, cu_seqlens, monkeypatch):
    stub = Package(returns_lse=returns_lse)
    monkeypatch.setitem(sys.modules, name, stub)
    inputs, cu_seqlens = make(batch=2, queries=200), cu_seqlens if documents else None
    for deterministic in (True, False):
        out = vendors.package(
            name, **inputs, cu_seqlens=cu_seqlens, max_seqlen=256, scale=0.3, deterministic=deterministic, **options
        )
        torch.testing.assert_close(out, attention_reference(**inputs, cu_seqlens=cu_seqlens, scale=0.3, **options))
        longest = dict(max_seqlen_q=256, max_seqlen_k=256) if documents else {}
        expected = dict(window_size=window_size, causal=options["causal"], deterministic=deterministic)
        assert stub.seen == expected | longest


class Kernels:
    """A forward and a backward without autograd, as FlashAttention's own."""

    def __init__(self) -> None:
        self.seen: dict[str, object] = {}

    def forward(self, q, k, v, cu_seqlens, **options):
        *tokens, heads, _ = q.shape
        with torch.no_grad():
            out = flash(q, k, v, cu_seqlens, **options)
        return out, q.new_zeros((heads, *tokens) if cu_seqlens is not None else (tokens[0], heads, tokens[1])).float()

    def backward(self, dout, q, k, v, cu_seqlens, *, causal, left, softcap, scale, **right):
        documents = None if cu_seqlens is None else _bounds_cpu(cu_seqlens, len(q))
        options: Any = documents, causal, None if left < 0 else left + 1, softcap or None, scale
        packed = q.ndim == 3
        dout, q, k, v = (x[None] if packed else x for x in (dout, q, k, v))
        out, lse = blocked.forward(q, k, v, *options)
        backward: Any = blocked.backward
        grads = backward(dout, q, k, v, out, lse, *options, True, True, True)
        return tuple(x[0] if packed else x for x in grads)

    def varlen_forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None,
                       window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
                       block_table=None, num_splits=None):  # fmt: skip
        assert (dropout, debug) == (0.0, False)
        self.seen = dict(longest=(max_q, max_k))
        options = dict(causal=causal, left=window_size_left, right=window_size_right, softcap=None, scale=scale)
        out, lse = self.forward(q, k, v, cu_q, **self._unlimited(options))
        return out, lse, q.new_empty(2, dtype=torch.uint64), q.new_empty(0), q.new_empty(0)

    def varlen_backward(self, dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng_state, unused, *,
                        scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
        self.seen |= dict(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            fills=torch._C._get_deterministic_fill_uninitialized_memory(),
        )
        options = dict(causal=causal, left=window_size_left, right=window_size_right, softcap=None, scale=scale)
        return self.backward(dout, q, k, v, cu_q, **self._unlimited(options))

    def fa4_forward(self, *, q, k, v, return_lse, **options):
        assert return_lse
        cu_seqlens, options = self._fa4(**options)
        out, lse = self.forward(q, k, v, cu_seqlens, **options)
        return out, lse, None, None, None

    def fa4_backward(self, *, dout, q, k, v, out, lse, deterministic, **options):
        self.seen["deterministic"] = deterministic
        cu_seqlens, options = self._fa4(**options)
        return self.backward(dout, q, k, v, cu_seqlens, **options)

    @staticmethod
    def _unlimited(options):
        """A window of -1 to the left is none, whatever the right one is, which causal repeats."""
        return options | (dict(right=-1) if options["left"] < 0 else {})

    def _fa4(self, *, softmax_scale, causal, softcap, window_size_left, window_size_right, cu_seqlens_q=None,
             cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None):  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k
        self.seen |= dict(longest=(max_seqlen_q, max_seqlen_k))
        left, right = (-1 if end is None else end for end in (window_size_left, window_size_right))
        return cu_seqlens_q, dict(causal=causal, left=left, right=right, softcap=softcap, scale=softmax_scale)


@pytest.fixture
def kernels(monkeypatch):
    """torch's flash attention and flash-attn-4's on the CPU."""
    made = Kernels()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", made.varlen_forward, "CPU")
    library.impl("_flash_attention_backward", made.varlen_backward, "CPU")
    interface: Any = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = made.fa4_forward, made.fa4_backward
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    with kernels_on_cpu():
        yield made
    library._destroy()


@pytest.mark.parametrize("backend", ["varlen", "fa4"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("options", [options for options, _ in CALLS.values()], ids=CALLS)
def test_ops_around_kernels(backend, deterministic, documents, options, make, cu_seqlens, kernels):
    if backend == "varlen" and options["softcap"]:
        pytest.skip("torch's has none")
    inputs, cu_seqlens = make(batch=2, queries=200), cu_seqlens if documents else None
    q, k, v = inputs.values()
    run = functools.partial(vendors.as_op, backend, scale=0.3, deterministic=deterministic)
    out = run(q, k, v, cu_seqlens, 256, **options)
    reference = attention_reference(**inputs, cu_seqlens=cu_seqlens, scale=0.3, **options)
    torch.testing.assert_close(out, reference)
    dout = torch.randn_like(out)
    actual, expected = (torch.autograd.grad(x, list(inputs.values()), dout) for x in (out, reference))
    torch.testing.assert_close(actual, expected)
    assert kernels.seen["deterministic"] == deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    if backend == "varlen":
        assert kernels.seen["fills"] is not deterministic  # filling what it allocates would be more launches
    assert kernels.seen["longest"] == ((256, 256) if documents else (None, None) if backend == "fa4" else (200, 200))


@pytest.mark.parametrize("backend", ["varlen", "fa4"])
def test_one_graph_for_all_lengths(backend, make, cu_seqlens, kernels):
    """As blocks are compiled: whole, although flash-attn-4 cannot be traced."""
    torch.compiler.reset()
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module

    def run(q, k, v, cu_seqlens, longest):
        return vendors.as_op(backend, q, k, v, cu_seqlens, longest, True, None, None, 0.3, True)

    compiled: Any = torch.compile(run, fullgraph=True, backend=count)
    inputs = make(batch=2, queries=200)
    for longest in (256, 512, 1024, 256, 2048):
        out = compiled(*inputs.values(), cu_seqlens, longest)
        torch.testing.assert_close(out, attention_reference(**inputs, cu_seqlens=cu_seqlens, scale=0.3))
        assert kernels.seen["longest"] == (longest, longest)
        torch.autograd.grad(out.sum(), list(inputs.values()))
    assert len(graphs) <= 2  # of one length, and of any


@pytest.mark.parametrize("backend", ["varlen", "fa4"])
def test_no_gradient_no_backward(backend, make, kernels):
    q, k, v = (x.detach() for x in make(queries=20).values())
    out = vendors.as_op(backend, q, k, v, None, 20, True, None, None, 0.3, True)
    assert not out.requires_grad


@pytest.mark.parametrize("backend", ["varlen", "fa4"])
def test_elsewhere_the_ops_are_errors(backend, make):
    q, k, v = make(queries=20).values()
    with pytest.raises(NotImplementedError, match=f"attention_{backend}: it runs on CUDA only"):
        vendors.as_op(backend, q, k, v, None, 20, True, None, None, 0.3, True)


def test_torch_has_the_functions_that_we_call():
    """Of the torch that is installed: its public function, and what it and ours call."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: F401

    forward, backward = (
        getattr(torch.ops.aten, name).default._schema.arguments
        for name in ("_flash_attention_forward", "_flash_attention_backward")
    )
    assert [a.name for a in forward][:10] == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"),
        "return_debug_mask",
    ]
    assert [a.name for a in backward][:14] == [
        *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "rng_state", "unused"),
    ]
    for arguments in (forward, backward):
        assert {"scale", "window_size_left", "window_size_right"} <= {a.name for a in arguments if a.kwarg_only}


def test_the_reader_of_packages_sees_what_is_wrong():
    source = "def f(q, k, v, extra, scale=None, *, causal=False): ..."
    assert packages.mismatches(source.replace("extra, ", ""), {"f": (3, {"scale", "causal"})}) == []
    assert packages.mismatches(source, {"f": (3, {"scale", "window"}), "g": (0, set())}) == [
        "g is missing", "f does not take window", "f needs extra",
    ]  # fmt: skip


def test_what_we_give_is_what_the_reader_of_packages_looks_for(make, kernels, monkeypatch):
    """The stubs of this file take no other names."""
    given: dict[str, set[str]] = {}
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        call = getattr(sys.modules["flash_attn.cute.interface"], name)
        monkeypatch.setattr(
            sys.modules["flash_attn.cute.interface"], name,
            lambda _name=name, _call=call, **options: given.setdefault(_name, set(options)) and _call(**options),
        )  # fmt: skip
    q, k, v = make(batch=2, queries=200).values()
    cu_seqlens = torch.tensor([0, 400], dtype=torch.int32)
    vendors.as_op("fa4", q, k, v, cu_seqlens, 512, True, 9, 3.0, 0.3, True).sum().backward()
    assert given == {name: names for name, (_, names) in packages.CALLS["flash_attn_4-"][1].items()}
