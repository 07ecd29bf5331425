from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rotary
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from fasttrain_kernels import qk_norm_rope, qk_norm_rope_reference, rotary_table
from fasttrain_kernels.ops.qk_norm_rope import launch as launch_module
from fasttrain_kernels.ops.qk_norm_rope.kernels import _qk_norm_rope_bwd_kernel, _qk_norm_rope_fwd_kernel
from fasttrain_kernels.ops.qk_norm_rope.op import _qk_norm_rope, _qk_norm_rope_backward
from fasttrain_kernels.testing import assert_accurate, interpret

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TENSORS = ("q", "k", "q_weight", "k_weight")


def inputs(
    B: int = 2,
    T: int = 5,
    Hq: int = 4,
    Hk: int = 2,
    D: int = 32,
    R: int | None = None,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype = torch.float32,
    rows: int = 40,
    seed: int = 0,
    **options,
) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, scale: float = 3.0) -> Tensor:  # 3: outliers
        return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

    cos, sin = rotary_table(max(T, rows), R or D)
    heads = dict(q=tensor(B, T, Hq, D), k=tensor(B, T, Hk, D))
    weights = dict(q_weight=tensor(D, scale=1.0), k_weight=tensor(D, scale=1.0))
    return heads | weights | dict(cos=cos.to(table_dtype), sin=sin.to(table_dtype)) | options


def documents(B: int, T: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Positions that start again within a row, and not at 0."""
    return ((torch.arange(B * T, dtype=dtype).view(B, T) * 7 + 3) % 40).contiguous()


def outputs_and_gradients(op, arguments: dict, upstream: tuple[Tensor, ...] | None = None) -> list[Tensor]:
    outputs = op(**arguments)
    trained = [arguments[name] for name in TENSORS if arguments[name] is not None and arguments[name].requires_grad]
    upstream = upstream or tuple(torch.cos(torch.arange(o.numel())).view(o.shape).to(o) for o in outputs)
    return [*outputs, *torch.autograd.grad(outputs, trained, upstream)]


# Numbers

SHAPES: dict[str, Any] = {
    "one of each": dict(B=1, T=1, Hq=1, Hk=1, D=16),
    "trap 13: GQA ratio of 3, batch of 2, odd number of tokens": dict(B=2, T=7, Hq=6, Hk=2, D=64),
    "padded head": dict(T=3, Hq=3, Hk=1, D=80),
    "partial": dict(T=3, D=80, R=32),
    "odd head": dict(T=3, D=63, R=62),
    "large head": dict(B=1, T=3, Hq=2, Hk=1, D=256, R=64),
}


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_as_accurate_as_the_reference(shape, dtype, interleaved):
    with interpret():
        arguments = inputs(**SHAPES[shape], dtype=dtype, interleaved=interleaved)
        assert_accurate(qk_norm_rope, qk_norm_rope_reference, arguments)


def qwen3(q, k, q_weight, k_weight, cos, sin, eps=1e-6) -> tuple[Tensor, Tensor]:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(Qwen3RMSNorm(x.shape[-1], eps), dict(weight=weight), x)

    cos, sin = (torch.cat((table, table), dim=-1)[None, : q.shape[1]] for table in (cos, sin))
    return apply_rotary_pos_emb(norm(q, q_weight), norm(k, k_weight), cos, sin, unsqueeze_dim=2)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_trap_14_it_is_qwen3_of_transformers(dtype, implementation):
    arguments = inputs(D=64, T=6, dtype=dtype, table_dtype=dtype, eps=1e-3)
    with interpret() if implementation == "triton" else torch.enable_grad():
        assert_accurate(qk_norm_rope, qk_norm_rope_reference, arguments, eager=qwen3)
        got = outputs_and_gradients(qk_norm_rope, arguments)
    if dtype == torch.float32:
        torch.testing.assert_close(got, outputs_and_gradients(qwen3, arguments), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_trap_14_the_norm_rounds_where_qwen3_rounds(implementation):
    arguments = inputs(B=1, T=4, D=128, dtype=torch.bfloat16, table_dtype=torch.bfloat16)
    arguments["cos"], arguments["sin"] = torch.ones(4, 64), torch.zeros(4, 64)
    with interpret() if implementation == "triton" else torch.no_grad():
        got = torch.cat([x.flatten() for x in qk_norm_rope(**arguments)])
    expected = torch.cat([x.flatten() for x in qwen3(**arguments)])
    rounded_once = qk_norm_rope_reference(**{n: x.double() for n, x in arguments.items()})
    # Rarely, rsqrt differs in its last bit and that of the bf16 flips; another order of rounding changes many.
    assert (got != expected).float().mean() < 2e-3
    assert (expected != torch.cat([x.flatten() for x in rounded_once]).bfloat16()).float().mean() > 0.05


def test_interleaved_pairs_are_complex_numbers():
    arguments = inputs(D=24, R=16) | dict(q_weight=None, k_weight=None)

    def turned(x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x[..., :16].unflatten(-1, (8, 2)).contiguous())
        angles = torch.complex(arguments["cos"], arguments["sin"])[: x.shape[1], None]
        return torch.cat([torch.view_as_real(numbers * angles).flatten(-2), x[..., 16:]], dim=-1)

    expected = [turned(arguments["q"]), turned(arguments["k"])]
    with interpret():
        torch.testing.assert_close(list(qk_norm_rope(**arguments, interleaved=True)), expected)
    torch.testing.assert_close(list(qk_norm_rope(**arguments, interleaved=True)), expected)


def test_partial_rotary_is_that_of_gpt_neox():
    arguments = inputs(D=96, R=24) | dict(q_weight=None, k_weight=None)
    cos, sin = (torch.cat([arguments[n][:5]] * 2, dim=-1)[None] for n in ("cos", "sin"))
    expected = neox_rotary(arguments["q"], arguments["k"], cos, sin, unsqueeze_dim=2)
    with interpret():
        torch.testing.assert_close(qk_norm_rope(**arguments), expected)
    torch.testing.assert_close(qk_norm_rope(**arguments), expected)


def test_the_table_is_that_of_transformers():
    config = Qwen3Config(head_dim=64, rope_parameters=dict(rope_type="default", rope_theta=1e6))
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(300)[None])
    got = rotary_table(300, 64, theta=1e6)
    torch.testing.assert_close(got, (cos[0, :, :32], sin[0, :, :32]), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"^rotary_table: rotary_dim \(5\) must be even and at least 2$"):
        rotary_table(8, 5)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_and_option(data):
    draw = data.draw
    B, T, D = draw(st.integers(1, 3)), draw(st.integers(0, 9)), draw(st.integers(2, 140))
    arguments = inputs(
        *(B, T, draw(st.integers(1, 9)), draw(st.integers(1, 5)), D),
        R=2 * draw(st.integers(1, D // 2)),
        dtype=draw(st.sampled_from(DTYPES)),
        interleaved=draw(st.booleans()),
        positions=draw(st.sampled_from([None, documents(B, T), documents(1, T, torch.int32)[0]])),
    )
    for name in ("q_weight", "k_weight"):
        if draw(st.booleans()):
            arguments[name] = None
    assert_accurate(qk_norm_rope, qk_norm_rope_reference, arguments)
    with interpret():
        assert_accurate(qk_norm_rope, qk_norm_rope_reference, arguments)


def test_weights_may_be_float32_for_low_precision_activations():
    arguments = inputs(dtype=torch.bfloat16)
    for name in ("q_weight", "k_weight"):
        arguments[name] = arguments[name].detach().float().requires_grad_()
    with interpret():
        assert_accurate(qk_norm_rope, qk_norm_rope_reference, arguments)


def test_heads_of_zeros_are_finite():
    arguments = inputs()
    arguments["q"] = torch.zeros_like(arguments["q"]).requires_grad_()
    with interpret():
        assert all(x.isfinite().all() for x in outputs_and_gradients(qk_norm_rope, arguments))


# Positions


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_packed_documents_are_as_if_alone(implementation):
    arguments = inputs(B=1, T=9) | dict(positions=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]))
    with interpret() if implementation == "triton" else torch.no_grad():
        together = qk_norm_rope(**arguments)
        del arguments["positions"]
        for document in (slice(0, 4), slice(4, 9)):
            alone = qk_norm_rope(**arguments | {name: arguments[name][:, document] for name in "qk"})
            torch.testing.assert_close(alone, tuple(x[:, document] for x in together), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["batch and tokens", "tokens", "expanded", "every second"])
def test_positions_of_any_layout(layout, dtype):
    positions = documents(2, 5, dtype)
    positions = {
        "batch and tokens": positions,
        "tokens": positions[0],
        "expanded": positions[:1].expand(2, 5),
        "every second": positions.repeat_interleave(2, 1)[:, ::2],
    }[layout]
    with interpret():
        assert_accurate(qk_norm_rope, qk_norm_rope_reference, inputs(positions=positions))


@pytest.mark.parametrize("wrong", [-1, 40, 2**40])
def test_a_position_outside_of_the_tables_is_loud(wrong):
    arguments = inputs(positions=documents(2, 5))
    expected = qk_norm_rope(**arguments)
    arguments["positions"] = arguments["positions"].clone()
    arguments["positions"][1, 2] = wrong
    message = (
        rf"^qk_norm_rope: positions\[1, 2\] is {wrong}, outside of the 40 rows of cos and sin; "
        "make the tables longer or check the positions$"
    )
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**arguments)
    with interpret():
        q, k, dq, dk, dq_weight, dk_weight = outputs_and_gradients(qk_norm_rope, arguments)
    assert all(x[1, 2].isnan().all() for x in (q, k, dq, dk))
    assert dq_weight.isnan().all()
    assert dk_weight.isnan().all()
    for out, right in zip((q, k), expected, strict=True):
        out[1, 2] = right[1, 2]
        torch.testing.assert_close(out, right)
    assert dq.isnan().sum() == dq[1, 2].numel()


# Memory


def views(x: Tensor) -> dict[str, Tensor]:
    """The same (B, T, H, D) values in other layouts, and broadcasts."""
    return {
        "heads before tokens": x.transpose(1, 2).contiguous().transpose(1, 2),
        "part of a wider tensor": torch.cat([x, x], dim=2)[:, :, : x.shape[2]],
        "every second column": x.repeat_interleave(2, -1)[..., ::2],
        "broadcast batch": x[:1].expand_as(x),
        "broadcast heads": x[:, :, :1].expand_as(x),
        "broadcast columns": x[..., :1].expand_as(x),
    }


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("layout", views(torch.zeros(2, 3, 2, 4)))
def test_trap_12_any_strides_of_inputs_and_upstream_gradients(layout, interleaved):
    arguments = inputs(interleaved=interleaved)
    upstream = tuple(views(torch.randn_like(arguments[name]))[layout] for name in "qk")
    arguments["q"] = views(arguments["q"].detach())[layout].requires_grad_()  # k keeps other strides
    arguments["cos"] = arguments["cos"].t().contiguous().t()
    arguments["q_weight"] = torch.randn(64)[::2].requires_grad_()
    with interpret():
        got = outputs_and_gradients(qk_norm_rope, arguments, upstream)
    expected = outputs_and_gradients(qk_norm_rope_reference, arguments, upstream)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert all(x.is_contiguous() for x in got)


def packed(B: int, T: int, Hq: int, Hk: int, D: int) -> dict:
    """Training arguments in bf16, q and k as views of a packed QKV projection."""
    qkv = torch.randn(B, T, (Hq + 2 * Hk) * D).bfloat16().requires_grad_()
    q, k, _ = qkv.unflatten(-1, (-1, D)).split((Hq, Hk, Hk), dim=2)
    weights = {name: torch.ones(D, dtype=torch.bfloat16, requires_grad=True) for name in ("q_weight", "k_weight")}
    cos, sin = rotary_table(T, D)
    return dict(q=q, k=k, cos=cos, sin=sin) | weights


@pytest.mark.parametrize(
    ("Hq", "Hk", "D"), [(16, 8, 128), (32, 8, 64), (9, 3, 64), (8, 4, 256)], ids=lambda value: str(value)
)
def test_bytes_are_within_five_percent_of_the_physical_limit(Hq, Hk, D, monkeypatch):
    # One part in 33 of an H100 and of 8448 tokens: each program does what it does at full size.
    SMS, B, T = 4, 2, 128
    monkeypatch.setattr(launch_module, "multiprocessor_count", lambda _: SMS)
    arguments = packed(B, T, Hq, Hk, D)
    with interpret() as launches:
        outputs_and_gradients(qk_norm_rope, arguments)
    forward, *backward = launches
    assert [launch.kernel for launch in launches] == [
        "_qk_norm_rope_fwd_kernel",
        "_qk_norm_rope_bwd_kernel",
        "_sum_partials_kernel",
    ]
    heads, tables = B * T * (Hq + Hk) * D * 2, B * T * D * 4
    assert forward.moved <= 1.05 * (2 * heads + tables)
    assert sum(launch.moved for launch in backward) <= 1.05 * (3 * heads + tables)
    assert forward.arguments["q"].loaded == B * T * Hq * D * 2  # the view itself: nothing was copied
    for launch in (forward, backward[0]):
        assert launch.arguments["cos"].loaded == launch.arguments["sin"].loaded == tables // 2


def test_rotary_without_norm_neither_saves_nor_reads_q_and_k():
    arguments = inputs() | dict(q_weight=None, k_weight=None)
    q_out, _ = qk_norm_rope(**arguments)
    node: Any = q_out.grad_fn
    assert [x for x in node.saved_tensors if x is not None and x.dim() == 4] == []
    with interpret() as launches:
        outputs_and_gradients(qk_norm_rope, arguments)
    _, backward = launches
    heads = (arguments["q"].numel() + arguments["k"].numel()) * 4
    assert backward.stored == heads
    assert backward.loaded == heads + 2 * 5 * 32 // 2 * 2 * 4


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
@pytest.mark.parametrize(
    ("trained", "loaded", "stored"),
    [
        ("k", {"dk_out", "k", "k_weight"}, {"dk"}),
        ("q_weight", {"dq_out", "q"}, {"partials"}),
        ("q k", {"dq_out", "q", "q_weight", "dk_out", "k", "k_weight"}, {"dq", "dk"}),
        ("q k_weight", {"dq_out", "q", "q_weight", "dk_out", "k"}, {"dq", "partials"}),
    ],
)
def test_trap_17_frozen_operands_cost_nothing(trained, loaded, stored, implementation):
    arguments = inputs()
    expected = dict(zip(TENSORS, outputs_and_gradients(qk_norm_rope_reference, arguments)[2:], strict=True))
    for name in TENSORS:
        arguments[name].requires_grad_(name in trained.split())
    with interpret() if implementation == "triton" else torch.enable_grad() as launches:
        outputs = qk_norm_rope(**arguments)
        upstream = [torch.cos(torch.arange(o.numel())).view(o.shape) for o in outputs]
        pairs = [(o, u) for o, u in zip(outputs, upstream, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [u for _, u in pairs])
    for name in TENSORS:
        if name in trained.split():
            torch.testing.assert_close(arguments[name].grad, expected[name], rtol=1e-5, atol=1e-5)
        else:
            assert arguments[name].grad is None
    if implementation == "triton":
        touched = launches[1].arguments.items()
        assert {name for name, traffic in touched if traffic.loaded} == loaded | {"cos", "sin"}
        assert {name for name, traffic in touched if traffic.stored} == stored


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_an_output_that_nobody_uses_gives_no_gradient(implementation):
    arguments = inputs()
    with interpret() if implementation == "triton" else torch.enable_grad() as launches:
        qk_norm_rope(**arguments)[1].sum().backward()
    assert [arguments[name].grad is None for name in TENSORS] == [True, False, True, False]
    if implementation == "triton":
        assert launches[1].arguments["q_weight"].loaded == 0


def test_trap_3_upstream_gradients_are_not_written():
    arguments = inputs()
    upstream = torch.randn_like(arguments["q"]), torch.randn_like(arguments["k"])
    before = [u.clone() for u in upstream]
    with interpret():
        outputs_and_gradients(qk_norm_rope, arguments, upstream)
    assert all(torch.equal(*pair) for pair in zip(upstream, before, strict=True))


def test_trap_9_addresses_are_64_bit():
    """Heads 2^30 elements apart, as in long sequences that lie heads first; only the touched pages exist."""
    arguments = inputs(B=1, T=2, Hq=3, Hk=1, dtype=torch.float16)
    far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((1, 2, 3, 32), (64, 32, 2**30, 1))
    with torch.no_grad():
        far.copy_(arguments["q"])
    upstream = far.detach(), torch.randn(1, 2, 1, 32).half()
    expected = outputs_and_gradients(qk_norm_rope_reference, arguments, upstream)
    with interpret(poison=False):
        got = outputs_and_gradients(qk_norm_rope, arguments | dict(q=far.detach().requires_grad_()), upstream)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 3)])
@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_trap_16_empty_tensors(B, T, implementation):
    with interpret() if implementation == "triton" else torch.enable_grad() as launches:
        q, k, dq, dk, dq_weight, dk_weight = outputs_and_gradients(qk_norm_rope, inputs(B=B, T=T))
    assert q.shape == dq.shape == (B, T, 4, 32)
    assert k.shape == dk.shape == (B, T, 2, 32)
    assert torch.equal(dq_weight, torch.zeros(32))
    assert torch.equal(dk_weight, torch.zeros(32))
    assert not launches


def test_the_result_does_not_depend_on_the_order_of_programs():
    arguments = inputs(B=2, T=70, Hq=2, Hk=1, D=128, rows=70)
    results = []
    for order in (None, "reverse", 7):
        with interpret(order=order) as launches:
            results.append(outputs_and_gradients(qk_norm_rope, arguments))
        assert all(launch.grid[0] > 1 for launch in launches)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)


# Contract


def test_trap_1_eps_cannot_arrive_as_float64():
    for kernel in (_qk_norm_rope_fwd_kernel, _qk_norm_rope_bwd_kernel):
        assert next(p for p in kernel.params if p.name == "EPS").is_constexpr


@pytest.mark.parametrize("options", ["plain", "positions", "no weights", "one weight", "packed", "q frozen"])
def test_opcheck(options):
    arguments = inputs(T=3, D=8)
    positions, interleaved, frozen = None, False, False
    if options == "positions":
        positions, interleaved = documents(2, 3), True
    elif options == "no weights":
        arguments |= dict(q_weight=None, k_weight=None)
    elif options == "one weight":
        arguments |= dict(q_weight=None)
    elif options == "packed":
        q, k, _ = torch.randn(2, 3, 8, 8).split((4, 2, 2), dim=2)
        arguments |= dict(q=q.detach().requires_grad_(), k=k.detach().requires_grad_())
    elif options == "q frozen":
        frozen = True
        arguments |= dict(q=arguments["q"].detach(), q_weight=arguments["q_weight"].detach())
    flat = [arguments[name] for name in (*TENSORS, "cos", "sin")]
    torch.library.opcheck(_qk_norm_rope, (*flat, positions, 1e-6, interleaved))
    detached = [None if x is None else x.detach() for x in flat]
    dq_out, dk_out = None if frozen else torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    saved = [x if w is not None else None for x, w in zip(detached[:2], detached[2:4], strict=True)]
    wanted = [not frozen, True, not frozen and detached[2] is not None, detached[3] is not None]
    torch.library.opcheck(
        _qk_norm_rope_backward,
        (dq_out, dk_out, *saved, *detached[2:], positions, 1e-6, interleaved, wanted),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("weights", [True, False], ids=["norm", "no norm"])
def test_gradcheck_on_the_cpu_implementation(weights, interleaved):
    arguments = inputs(B=1, T=2, Hq=2, Hk=1, D=6, R=4)
    tensors = [arguments[name].detach().double().requires_grad_() for name in TENSORS]
    if not weights:
        tensors[2:] = [None, None]
    tables = arguments["cos"].double(), arguments["sin"].double()
    positions = torch.tensor([3, 1])
    assert torch.autograd.gradcheck(
        lambda q, k, q_weight, k_weight: qk_norm_rope(
            q, k, q_weight, k_weight, *tables, positions=positions, interleaved=interleaved
        ),
        tensors,
    )


def test_it_compiles_to_one_graph_and_does_not_recompile_for_another_length():
    def step(**arguments):
        q, k = qk_norm_rope(**arguments)
        return (q * q).sum() + k.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (5, 8, 13):
            arguments = inputs(T=T, positions=documents(2, T))
            compiled(**arguments).backward()
            got = [arguments[name].grad for name in TENSORS]
            expected = torch.autograd.grad(step(**arguments), [arguments[name] for name in TENSORS])
            torch.testing.assert_close(got, list(expected))


def test_double_backward_raises():
    arguments = inputs()
    (dq,) = torch.autograd.grad(qk_norm_rope(**arguments)[0].sum(), arguments["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="qk_norm_rope_backward: .* use the plain qk_norm_rope_reference"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(q=torch.ones(5, 4, 32)), ValueError, r"q \(5, 4, 32\) and k \(2, 5, 2, 32\) must be \(batch, tokens, "),
        (
            dict(q=torch.ones(2, 6, 4, 32)),
            ValueError,
            r"q \(2, 6, 4, 32\) and k \(2, 5, 2, 32\) must agree in all but the number of heads$",
        ),
        (
            dict(q=torch.ones(2, 5, 4, 32).bfloat16()),
            TypeError,
            "q is torch.bfloat16 and k torch.float32; cast them to one dtype$",
        ),
        (
            dict(k_weight=torch.ones(16)),
            ValueError,
            r"k_weight \(16,\) must be \(32,\), one weight for each dimension of a head$",
        ),
        (dict(sin=torch.ones(40, 8)), ValueError, r"cos \(40, 16\) and sin \(40, 8\) must both be \(positions, rotary"),
        (
            dict(cos=torch.ones(40, 32), sin=torch.ones(40, 32)),
            ValueError,
            r"cos \(40, 32\) rotates 64 dimensions, but a head has 32; the tables hold each angle once: ",
        ),
        (
            dict(cos=torch.ones(3, 16), sin=torch.ones(3, 16)),
            ValueError,
            "cos and sin have 3 rows for 5 tokens; make the tables longer$",
        ),
        (
            dict(sin=torch.ones(40, 16, requires_grad=True)),
            ValueError,
            r"sin requires grad, but the tables get no gradient here; pass sin.detach\(\)$",
        ),
        (
            dict(positions=torch.ones(2, 5)),
            TypeError,
            "positions has dtype torch.float32; supported are int32 and int64$",
        ),
        (
            dict(positions=torch.zeros(2, dtype=torch.int64)),
            ValueError,
            r"positions \(2,\) must be \(5,\) or \(2, 5\)$",
        ),
        (
            dict(positions=torch.zeros(5, dtype=torch.int64, device="meta")),
            ValueError,
            "q is on cpu and positions on meta; move them to one device$",
        ),
        (
            dict(q=torch.ones(2, 5, 4, 1024), k=torch.ones(2, 5, 2, 1024)),
            ValueError,
            r"head_dim \(1024\) is above the supported 512; use qk_norm_rope_reference$",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_name_the_op_the_values_and_the_remedy(change, error, message):
    with pytest.raises(error, match=f"^qk_norm_rope: {message}"):
        qk_norm_rope(**inputs() | change)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", [dict(T=1000, Hq=16, Hk=8, D=128), dict(T=63, Hq=9, Hk=3, D=80, R=32)])
def test_on_a_gpu(shape, dtype, interleaved):
    arguments = inputs(**shape, dtype=dtype, positions=documents(2, shape["T"]), interleaved=interleaved)
    on_gpu = {
        n: x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for n, x in arguments.items()
    }
    assert_accurate(qk_norm_rope, qk_norm_rope_reference, on_gpu)
