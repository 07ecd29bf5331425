import contextlib
import itertools

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fasttrain_kernels.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_reference,
    linear_cross_entropy_stats,
    linear_cross_entropy_stats_reference,
    ops,
    rows,
    sweep,
)
from fasttrain_kernels.testing import assert_accurate, assert_accurate_over_seeds, interpret
from tests.kernels.numbers import eager
from tests.kernels.numbers.cases import in_four_orders

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = {"triton": interpret, "cpu": contextlib.nullcontext}
both_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
OPTIONS = [
    dict(),
    dict(z_loss=0.1),
    dict(label_smoothing=0.2),
    dict(softcap=5.0),
    dict(token_weight=True),
    dict(z_loss=0.01, label_smoothing=0.1, softcap=8.0, token_weight=True, ignore_index=3),
]


def problem(M, H, V, dtype=torch.float32, *, ignored=True, spread=3.0, **options):
    """Inputs by name. spread is the logits' standard deviation: 3 makes some p close to 1."""
    tokens = M if isinstance(M, tuple) else (M,)
    target = torch.randint(V, tokens)
    if ignored and target.numel() > 2:
        target.view(-1)[1::5] = options.get("ignore_index", -100)
    if options.get("token_weight"):
        options["token_weight"] = torch.randint(1, 9, tokens) / 8
    return dict(
        hidden=torch.randn(*tokens, H).to(dtype).requires_grad_(),
        weight=(torch.randn(V, H) * spread / H**0.5).to(dtype).requires_grad_(),
        target=target,
        **options,
    )


def gradients(function, inputs, upstream=None):
    inputs = {k: v.detach().requires_grad_(v.requires_grad) if torch.is_tensor(v) else v for k, v in inputs.items()}
    loss = function(**inputs)
    wanted = [inputs[name] for name in ("hidden", "weight") if inputs[name].requires_grad]
    return loss.detach(), *torch.autograd.grad(loss, wanted, upstream)


def check(inputs):
    assert_accurate(linear_cross_entropy, linear_cross_entropy_reference, inputs, eager=eager.linear_cross_entropy)


def check_over_seeds(*shape, **options):
    """Of problem(*shape, **options): with few tokens in float32, a single seed may be one rounding, or none."""
    assert_accurate_over_seeds(
        linear_cross_entropy,
        linear_cross_entropy_reference,
        lambda: problem(*shape, **options),
        seeds=range(8),
        eager=in_four_orders(eager.linear_cross_entropy),
    )


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def short_chunks(monkeypatch):
    """64 rows per chunk and 64 columns per block, so that small problems have several of both."""
    monkeypatch.setattr(sweep, "_ROW_MULTIPLE", 16)
    monkeypatch.setattr(sweep, "_TRITON_ROWS", 64)
    monkeypatch.setattr(sweep, "_CPU_ROWS", 64)
    monkeypatch.setattr(rows, "_BLOCK", 64)
    monkeypatch.setattr(rows, "_BLOCK_TWO_PASSES", 64)


# Numbers.


@both_forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "H", "V"), [(1, 1, 1), ((2, 3), 63, 1000), (7, 16, 8193), ((), 8, 17)])
def test_is_as_accurate_as_eager(form, M, H, V, dtype):
    with form():
        check(problem(M, H, V, dtype))


@both_forms
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_options_match_the_specification(form, reduction, options, short_chunks):
    """Trap 4 as well: with "none" assert_accurate's upstream gradients differ from token to token."""
    with form():
        check_over_seeds(15, 24, 101, **options, reduction=reduction)


@both_forms
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_options_hold_in_low_precision(form, dtype):
    with form():
        for reduction in ("mean", "none"):
            check(problem(11, 24, 101, dtype, **OPTIONS[-1], reduction=reduction))


@both_forms
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_agrees_with_torch_cross_entropy(form, reduction, label_smoothing):
    inputs = problem(12, 16, 33)

    def plain(hidden, weight, target):
        logits = hidden @ weight.t()
        return F.cross_entropy(logits, target, reduction=reduction, label_smoothing=label_smoothing)

    expected = gradients(plain, inputs, torch.ones(12) if reduction == "none" else None)
    options = dict(reduction=reduction, label_smoothing=label_smoothing)
    with form():
        actual = gradients(linear_cross_entropy, inputs | options, torch.ones(12) if reduction == "none" else None)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@both_forms
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    M=st.integers(0, 9),
    H=st.integers(1, 40),
    V=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    options=st.sampled_from(OPTIONS),
    reduction=st.sampled_from(["sum", "none"]),
)
def test_any_shape(form, M, H, V, dtype, options, reduction):
    with form():
        check_over_seeds(M, H, V, dtype, **(options | dict(ignore_index=-1)), reduction=reduction)


@pytest.mark.parametrize("M", [63, 64, 65, 129])
def test_chunk_borders(M, short_chunks):
    with interpret() as launches:
        check_over_seeds(M, 8, 31)
    assert sum(launch.grid[0] for launch in launches) == 8 * M
    assert max(launch.grid[0] for launch in launches) <= 64


@pytest.mark.parametrize("M", [63, 64, 65, 129, 1000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunk_borders_on_cpu(M, reduction, short_chunks):
    check_over_seeds(M, 8, 31, reduction=reduction)


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_logits_stay_finite(form, dtype):
    with form():
        check(problem(5, 32, 200, dtype, spread=300.0, z_loss=1e-4))


@both_forms
def test_result_does_not_depend_on_the_order_of_programs_or_on_the_run(form, short_chunks):
    inputs = problem(70, 8, 65)
    with form():
        first = gradients(linear_cross_entropy, inputs)
    with interpret(order="reverse") if form is interpret else form():
        second = gradients(linear_cross_entropy, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_cpu_form_in_float64():
    inputs = problem(4, 3, 7, torch.float64, z_loss=0.1, label_smoothing=0.1, softcap=3.0)
    for a, b in zip(
        *(gradients(f, inputs) for f in (linear_cross_entropy, linear_cross_entropy_reference)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    hidden, weight = inputs.pop("hidden"), inputs.pop("weight")  # "none", as gradcheck calls backward twice
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, reduction="none", **inputs), (hidden, weight)
    )


# Semantics.


@both_forms
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_tokens_have_no_loss_and_exactly_no_gradient(form, reduction):
    inputs = problem(10, 16, 50, reduction=reduction, z_loss=0.1, label_smoothing=0.1)
    inputs["target"][:7] = -100
    without = inputs | dict(hidden=inputs["hidden"][7:].detach().requires_grad_(), target=inputs["target"][7:])
    with form():
        loss, dhidden, dweight = gradients(
            linear_cross_entropy, inputs, torch.ones(10) if reduction == "none" else None
        )
        fewer = gradients(linear_cross_entropy, without, torch.ones(3) if reduction == "none" else None)
    assert dhidden[:7].eq(0).all()
    torch.testing.assert_close((loss[7:] if reduction == "none" else loss), fewer[0])
    torch.testing.assert_close(dweight, fewer[2])
    if reduction == "none":
        assert loss[:7].eq(0).all()


@both_forms
def test_all_ignored_has_nan_mean_and_zero_gradients(form):
    inputs = problem(6, 8, 20)
    inputs["target"][:] = -100
    assert F.cross_entropy(torch.randn(6, 20), inputs["target"]).isnan()  # what we follow
    with form():
        loss, dhidden, dweight = gradients(linear_cross_entropy, inputs)
        assert gradients(linear_cross_entropy, inputs | dict(reduction="sum"))[0] == 0
    assert loss.isnan()
    assert dhidden.eq(0).all()
    assert dweight.eq(0).all()


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zero_token_weight_silences_a_token(form, dtype):
    inputs = problem(6, 8, 20, dtype, ignored=False, token_weight=True)
    inputs["token_weight"][2] = 0
    with form():
        check(inputs)
        _, dhidden, _ = gradients(linear_cross_entropy, inputs)
    assert dhidden[2].eq(0).all()


def test_target_outside_the_vocabulary_raises_on_cpu():
    inputs = problem((2, 3), 4, 10, ignored=False)
    inputs["target"][1, 0] = 10
    expected = (
        r"linear_cross_entropy: target 10 at position 3 is outside the vocabulary \[0, 10\) and is not ignore_index"
    )
    for function in (linear_cross_entropy, linear_cross_entropy_stats):
        with pytest.raises(ValueError, match=expected):
            function(**inputs)


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_target_outside_the_vocabulary_is_nan_in_the_kernel(wrong):
    inputs = problem(4, 4, 10, ignored=False, reduction="none")
    inputs["target"][2] = wrong
    with interpret():
        loss, dhidden, dweight = gradients(linear_cross_entropy, inputs, torch.ones(4))
        assert linear_cross_entropy(**inputs | dict(reduction="mean")).isnan()
    assert loss.isnan().tolist() == [False, False, True, False]
    assert dhidden.isnan().all(1).tolist() == [False, False, True, False]
    assert dweight.isnan().all()


@both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [dict(), dict(z_loss=0.1, label_smoothing=0.2, softcap=5.0, ignore_index=3)])
def test_stats(form, dtype, options, short_chunks):
    inputs = problem((2, 35), 24, 101, dtype, **options)
    # Half of the tokens hit, but for those that are ignored.
    inputs["hidden"].data[:, ::2] = 3 * inputs["weight"].data[inputs["target"][:, ::2].clamp(min=0)]
    truth = linear_cross_entropy_stats_reference(
        **inputs | dict(hidden=inputs["hidden"].double(), weight=inputs["weight"].double())
    )
    with form() as launches:
        stats = linear_cross_entropy_stats(**inputs)
    assert stats.correct.dtype == torch.bool
    assert torch.equal(stats.correct, truth.correct)
    assert 0.2 < truth.correct.float().mean() < 0.8
    for name in ("loss", "lse", "entropy"):
        ours = getattr(stats, name)
        assert ours.shape == (2, 35)
        assert not ours.requires_grad
        torch.testing.assert_close(ours.double(), getattr(truth, name), rtol=2e-6, atol=2e-5)
    if launches:  # evaluation writes a few bytes per token, never logits
        assert launches[0].stored == 13 * launches[0].grid[0]


@both_forms
def test_equal_logits_count_the_first_as_the_guess(form):
    hidden, weight = torch.ones(3, 4), torch.ones(200, 4)
    with form():
        stats = linear_cross_entropy_stats(hidden, weight, torch.tensor([0, 1, 199]))
    assert stats.correct.tolist() == [True, False, False]


# Traps of kernels.md.


@both_forms
def test_trap_2_every_output_is_written(form, short_chunks):
    """interpret() fills what empty() returns with NaN; no NaN may survive, padding of odd vocabularies included."""
    with form():
        results = [
            *gradients(linear_cross_entropy, problem(70, 8, 33)),
            *gradients(linear_cross_entropy, problem(70, 8, 33, reduction="none"), torch.ones(70)),
            *linear_cross_entropy_stats(**problem(70, 8, 33)),
        ]
    assert not any(result.isnan().any() for result in results)


@both_forms
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_trap_3_upstream_gradients_are_not_written(form, reduction):
    inputs = problem(5, 8, 20, reduction=reduction)
    upstream = torch.full((5,), 2.0) if reduction == "none" else torch.tensor(2.0)
    with form():
        gradients(linear_cross_entropy, inputs, upstream)
    assert upstream.eq(2).all()


@both_forms
def test_trap_5_gradient_of_a_sure_target_survives_bf16(form):
    """p = 0.9991 is 1.0 in bf16: rounded before 1 is subtracted, the gradient would vanish."""
    hidden = torch.full((1, 1), 3.5, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], dtype=torch.bfloat16, requires_grad=True)
    with form():
        _, dhidden, _ = gradients(linear_cross_entropy, dict(hidden=hidden, weight=weight, target=torch.tensor([0])))
    expected = -2 * torch.sigmoid(torch.tensor(-7.0))
    torch.testing.assert_close(dhidden.float().squeeze(), expected, rtol=1e-2, atol=0)


@both_forms
def test_trap_6_dweight_accumulates_over_chunks_in_float32(form, request):
    """Several chunks give what one chunk gives. The weight is float32, so that no final rounding hides a bf16 sum."""
    inputs = problem(200, 4, 16)
    with form(), torch.autocast("cpu", torch.bfloat16):
        whole = gradients(linear_cross_entropy, inputs)[2]
        request.getfixturevalue("short_chunks")
        pieces = gradients(linear_cross_entropy, inputs)[2]
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-6 * whole.abs().max().item())


class ForbidSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"), f"{name} syncs"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_trap_7_the_kernel_path_never_syncs(dtype):
    inputs = problem(5, 8, 20, dtype, token_weight=True)
    tensors = [inputs[k].detach() for k in ("hidden", "weight", "target", "token_weight")]
    options = (-100, 0.1, 0.1, 5.0)
    with interpret(), ForbidSync():
        ops._forward(*tensors, *options, True, True, True, use_triton=True)
        ops._tokens(*tensors, *options, use_triton=True)
        ops._tokens_backward(torch.ones(5), *tensors, *options, True, True, use_triton=True)
        ops._stats(*tensors[:3], *options, use_triton=True)


def test_trap_8_dtensors_are_rejected():
    DTensor = type("DTensor", (torch.Tensor,), {})
    inputs = problem(3, 4, 5)
    for name in ("hidden", "weight", "target"):
        wrapped = inputs[name].detach().as_subclass(DTensor)
        with pytest.raises(TypeError, match=f"linear_cross_entropy: {name} is a DTensor"):
            linear_cross_entropy(**inputs | {name: wrapped})


def test_trap_9_no_chunk_reaches_2_to_the_31_elements():
    for V, itemsize, M in itertools.product([1, 50_257, 262_144, 2**22], [2, 4], [1, 4097, 10**7]):
        for use_triton in (True, False):
            chunk = sweep.rows_per_chunk(M, V, itemsize, use_triton)
            assert 1 <= chunk <= max(sweep._TRITON_ROWS, 64)
            assert chunk * (V + 15) < 2**31


@pytest.mark.parametrize(
    ("V", "expected"), [(1000, 4096), (50_304, 4096), (128_256, 4096), (151_936, 4096), (262_144, 2560)]
)
def test_chunks_are_long_enough_for_the_matmuls(V, expected):
    """Thousands of rows for any vocabulary in use; equal chunks, so that none is nearly empty."""
    assert sweep.rows_per_chunk(10**6, V, 2, True) == pytest.approx(expected, abs=128)
    assert sweep.rows_per_chunk(4097, 1000, 2, True) == 2176


# One chunk of all tokens, in bfloat16: chunks are 64 rows here, and one may be longer by H.


def swept(inputs):
    """Of a sweep with gradients in the kernel's form: its results, and the rows of each launch."""
    tensors = [inputs[name].detach() for name in ("hidden", "weight", "target")]
    with interpret() as launches:
        found = sweep.sweep(
            *tensors, rows.Options(-100, 0.0, 0.0, None), use_triton=True, coef=torch.ones(len(tensors[0])),
            need_dhidden=True, need_dweight=inputs["weight"].requires_grad,
        )  # fmt: skip
    return found, [launch.grid[0] for launch in launches]


@pytest.mark.parametrize(("H", "M", "chunks"), [(8, 72, [72]), (8, 73, [48, 25]), (40, 104, [104]), (40, 10, [10])])
def test_one_chunk_delivers_dweight_in_bfloat16_and_several_sum_in_float32(H, M, chunks, short_chunks):
    result, launched = swept(problem(M, H, 33, torch.bfloat16))
    assert launched == chunks
    assert result.dweight.dtype == (torch.bfloat16 if len(chunks) == 1 else torch.float32)
    assert result.dhidden.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_sum_dweight_in_float32_in_short_chunks(dtype, short_chunks):
    result, launched = swept(problem(72, 8, 33, dtype))
    assert launched == [48, 24]
    assert result.dweight.dtype == torch.float32


def test_without_dweight_chunks_stay_short(short_chunks):
    inputs = problem(72, 8, 33, torch.bfloat16)
    inputs["weight"] = inputs["weight"].detach()
    assert swept(inputs)[1] == [48, 24]


@pytest.mark.parametrize("M", [72, 73])
@pytest.mark.parametrize("options", [dict(), dict(reduction="sum", token_weight=True), dict(reduction="none")])
def test_one_chunk_is_as_accurate_as_eager(M, options, short_chunks):
    """Upstream gradients are no powers of two: what was rounded as a sum is rounded again."""
    with interpret():
        check_over_seeds(M, 8, 33, torch.bfloat16, **options)


@settings(deadline=None)
@given(M=st.integers(1, 10**5), H=st.integers(1, 20_000), V=st.integers(1, 300_000))
def test_one_chunk_takes_no_more_memory_than_chunks_of_full_length(M, H, V):
    hidden, weight = (torch.empty(n, H, dtype=torch.bfloat16, device="meta") for n in (M, V))
    if sweep.dweight_dtype(hidden, weight, True) == torch.bfloat16:
        rows = sweep.rows_per_chunk(10**9, V, 2, True)
        chunks = 2 * rows * V + 4 * V * H
        assert chunks >= 2 * M * V + 2 * V * H
        assert M * (V + 15) < 2**31


def test_second_backward_raises_where_dweight_is_of_one_chunk():
    inputs = problem(4, 8, 20, torch.bfloat16)
    with interpret():
        loss = linear_cross_entropy(**inputs)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_one_chunk_compiles_to_the_same_gradients():
    torch._dynamo.reset()
    inputs = problem(6, 8, 33, torch.bfloat16)

    def step(**tensors):
        return linear_cross_entropy(**tensors) * 3

    with interpret():
        expected = gradients(step, inputs)
        compiled = gradients(torch.compile(step, fullgraph=True, backend="aot_eager"), inputs)
    assert all(torch.equal(a, b) for a, b in zip(compiled, expected, strict=True))


@pytest.mark.parametrize("M", [72, 73])
def test_the_fake_has_the_dtype_of_dweight(M, short_chunks):
    inputs = problem(M, 8, 33, torch.bfloat16)
    arguments = (*(inputs[k] for k in ("hidden", "weight", "target")), None, -100, 0.0, 0.0, None, True, True, True)
    with interpret():
        torch.library.opcheck(ops._linear_cross_entropy, arguments, test_utils=("test_schema", "test_faketensor"))


@both_forms
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_trap_12_strides_do_not_matter(form, reduction):
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
        with form():
            actual = gradients(linear_cross_entropy, strided | options, upstream)
            expected = gradients(linear_cross_entropy, dense | options, upstream.contiguous())
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)


@both_forms
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_trap_16_empty_tensors(form, reduction):
    inputs = problem((2, 0), 8, 20, reduction=reduction)
    with form():
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
    matmul = sweep._matmul
    monkeypatch.setattr(sweep, "_matmul", lambda a, b, **k: (shapes.append(tuple(k["out"].shape)), matmul(a, b, **k)))
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


# float16, autocast.


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_gradients_do_not_underflow(reduction):
    """p is about 1e-4. Times 1/64 (mean) or an upstream gradient of 2**-10, float16 has 5 bits or 1 bit of it left."""
    inputs = problem(64, 8, 8192, ignored=False, spread=0.1, reduction=reduction)
    inputs["hidden"].data = inputs["hidden"].data.abs().half().float()  # abs: rounding errors cannot cancel signs
    inputs["target"][:] = 0
    upstream = torch.tensor(1.0) if reduction == "mean" else torch.full((64,), 2.0**-10)
    double = {k: inputs[k].detach().double().requires_grad_() for k in ("hidden", "weight")}
    truth = gradients(linear_cross_entropy_reference, inputs | double, upstream.double())[2]
    with interpret(), torch.autocast("cpu", torch.float16):  # a float32 weight, so that its gradient shows every bit
        dweight = gradients(linear_cross_entropy, inputs, upstream)[2]
    error = (dweight.double() - truth).abs().amax(-1) / truth.abs().amax(-1)  # per row: those of rare tokens are small
    assert error.max() < 2**-9


@both_forms
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_casts_hidden_and_keeps_the_weight_gradient_wide(form, reduction):
    inputs = problem(6, 16, 40, reduction=reduction)
    upstream = torch.ones(6) if reduction == "none" else None
    with form(), torch.autocast("cpu", torch.bfloat16):
        loss, dhidden, dweight = gradients(linear_cross_entropy, inputs, upstream)
    rounded = inputs | dict(hidden=inputs["hidden"].detach().bfloat16().float().requires_grad_())
    truth = gradients(linear_cross_entropy_reference, rounded, upstream)
    assert (loss.dtype, dhidden.dtype, dweight.dtype) == (torch.float32,) * 3
    assert not torch.equal(dweight, dweight.bfloat16().float())
    for a, b in zip((loss, dhidden, dweight), truth, strict=True):
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


def test_autocast_does_not_reach_the_matmuls_of_the_cpu_form():
    inputs = problem(6, 16, 40)
    inputs["hidden"].data = inputs["hidden"].data.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(linear_cross_entropy, inputs)
    outside = gradients(linear_cross_entropy, inputs)
    torch.testing.assert_close(inside[2], outside[2])


# Contract.


def is_float(value):
    return torch.is_tensor(value) and value.is_floating_point()


@pytest.mark.parametrize("name", ["_linear_cross_entropy", "_tokens_op", "_tokens_backward_op", "_stats_op"])
def test_opcheck(name):
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    target = torch.tensor([1, -100, 3, 19, 0])
    options = (-100, 0.1, 0.1, 5.0)
    arguments = {
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
        torch.library.opcheck(getattr(ops, name), tuple(converted), test_utils=test_utils)


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


@both_forms
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(form, use_reentrant):
    inputs = problem(6, 8, 30)

    def checkpointed(hidden, weight, target):
        return checkpoint(linear_cross_entropy, hidden, weight, target, use_reentrant=use_reentrant)

    with form():
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
    ("form", "dtype"), [(contextlib.nullcontext, torch.float32), (interpret, torch.bfloat16)], ids=["cpu", "triton"]
)
def test_the_weight_gradient_is_not_copied(form, dtype, monkeypatch):
    pointers = []
    forward = sweep.sweep

    def spy(*args, **kwargs):
        swept = forward(*args, **kwargs)
        pointers.append(swept.dweight.data_ptr())
        return swept

    monkeypatch.setattr(ops, "sweep", spy)
    inputs = problem(4, 8, 20, dtype)
    with form():
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
    for form in FORMS.values():
        with form():
            for a, b in zip(gradients(linear_cross_entropy, inputs), expected, strict=True):
                torch.testing.assert_close(a, b)


# Memory.


@pytest.mark.parametrize("V", [50_304, 50_257])
def test_kernel_moves_each_logit_twice_in_and_once_out(V):
    """The limit is one read and one write; the second read finds its row in L2, so unique bytes are at the limit."""
    inputs = problem(4, 8, V, torch.bfloat16, ignored=False)
    with interpret() as launches:
        linear_cross_entropy(**inputs).backward()
    limit = 4 * V * 2 * 2
    assert launches.moved <= 1.501 * limit
    assert launches[0].unique <= 1.05 * limit


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_on_gpu(dtype, options):
    inputs = problem(5000, 256, 50_257, dtype, **options)
    inputs = {
        k: v.detach().cuda().requires_grad_(v.requires_grad) if torch.is_tensor(v) else v for k, v in inputs.items()
    }
    for reduction in ("mean", "none"):
        upstream = torch.rand(5000, device="cuda") if reduction == "none" else None
        truth = gradients(linear_cross_entropy_reference, inputs | dict(reduction=reduction), upstream)
        plain = gradients(eager.linear_cross_entropy, inputs | dict(reduction=reduction), upstream)
        actual = gradients(linear_cross_entropy, inputs | dict(reduction=reduction), upstream)
        for ours, eagers, true in zip(actual, plain, truth, strict=True):
            allowed = 2 * (eagers.float() - true.float()).norm() + 1e-5 * true.float().norm()
            assert (ours.float() - true.float()).norm() <= allowed
