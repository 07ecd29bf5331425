import dataclasses
import importlib.util
import json
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton

from bench.static import rules
from bench.static.__main__ import main
from bench.static.cases import ATTENTION, OURS, RMS
from bench.static.counts import Counts, NotPolynomial, extrapolate, flat
from bench.static.gpus import CARDS
from bench.static.prediction import predicted_us
from bench.static.summary import TABLES, markdown
from bench.static.survey import StaticRow, _by_pass, _counts, _sum, survey, width
from bench.static.torch_ops import TorchOps, record_matmul
from fasttrain_kernels import linear_cross_entropy
from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.testing import Traffic, interpret
from fasttrain_kernels.testing.compiled import KernelMetadata
from fasttrain_kernels.testing.targets import TARGETS

STORED = rules.read()
PUBLISHED = json.loads(rules.STORED.with_name("static_published.json").read_text())["points"]
BASELINES = ("liger", "cut-cross-entropy")
needs_liger, needs_cce = (
    pytest.mark.skipif(not importlib.util.find_spec(module), reason="needs pip install -e '.[baselines]'")
    for module in ("liger_kernel", "cut_cross_entropy")
)


def case_of(op, shape="", cases=OURS):
    return next(c for c in cases if c.shape.op == op and c.shape.name.startswith(shape))


def rows_of(op, shape="", provider="fasttrain", target="sm_90", direction="forward"):
    key = (op, provider, target, direction)
    found = [r for r in STORED if (r.op, r.provider, r.target, r.direction) == key and r.shape.startswith(shape)]
    assert found, key
    return found


# Counts


def test_extrapolation_is_exact_for_a_polynomial():
    points = [(1, m, m * p) for m, p in ((1, 1), (2, 3), (5, 2), (4, 7))]
    values = [[3 + 10**12 * m, 7 * mp] for _, m, mp in points]
    assert extrapolate(points, values, (1, 8192, 8192 * 132)) == [3 + 10**12 * 8192, 7 * 8192 * 132]


@pytest.mark.parametrize(
    ("points", "values", "message"),
    [
        ([(1, 1), (1, 2), (1, 3)], [[1], [4], [9]], "contradict"),  # a square is no line
        ([(1, 1), (1, 1)], [[1], [1]], "do not determine"),
        ([(1, 1), (1, 2)], [[1], [2]], "check nothing"),
        ([(2, 3), (2, 5), (2, 7)], [[1], [2], [3]], "whole numbers"),
    ],
)
def test_extrapolation_refuses_what_small_runs_do_not_prove(points, values, message):
    with pytest.raises(NotPolynomial, match=message):
        extrapolate(points, values, (1, 100))


def test_extrapolated_counts_equal_those_of_a_direct_run():
    """Here and, for attention, in bench/test_static.py."""
    compare_with_direct_run(case_of("rms_norm", "8192x1024"), dict(M=200, N=1024, SMS=9))


def compare_with_direct_run(case, sizes):
    memory = TARGETS["sm_90"].shared_per_block
    with kernels_on_cpu(multiprocessors=sizes["SMS"], shared_memory=memory), interpret(poison=False) as launches:
        direct = _by_pass(case.run, "fasttrain", sizes, lambda: launches, "sm_90")
    for direction, launched in direct.items():
        programs = math.prod(launched[0].grid)
        for number, launch in enumerate(launched):
            counts = _counts(case, direction, number, sizes, programs, "sm_90")
            assert (counts.kernel, counts.issued, counts.unique) == (launch.kernel, launch.moved, launch.unique)
            assert [counts.flops, counts.elementwise, counts.special] == flat(launch)[:3]


def test_stored_bytes_equal_those_by_hand():
    M, N, P = 8192, 4096, 3 * 132  # forward stays for 16 rows or more: three programs on each of 132 multiprocessors
    (row,) = rows_of("rms_norm", "8192x4096")
    assert row.bytes_issued == 2 * M * N * 2 + 4 * M + P * N * 2
    assert row.bytes_unique == 2 * M * N * 2 + 4 * M + N * 2
    (row,) = rows_of("rms_norm", "8192x4096", provider="liger")
    assert row.bytes_issued == 3 * M * N * 2 + 4 * M  # weight once per row
    (row,) = rows_of("swiglu", "8192x12288", direction="backward")
    assert row.bytes_issued == row.bytes_unique == row.bytes_limit == 5 * 8192 * 12288 * 2
    (row,) = rows_of("cross_entropy_rows")
    assert row.bytes_issued == 4096 * (3 * 151936 * 2 + 8 + 2 + 4 + 4)  # label, its logit, coefficient, loss


def test_attention_multiplies_as_much_as_it_must_plus_the_diagonal():
    (forward,) = rows_of("attention")
    T, H, D = 4096, 32, 128
    needed = 4 * D * H * T * (T + 1) // 2
    assert needed < forward.flops < 1.1 * needed
    assert sum(r.flops for r in rows_of("attention", direction="backward")) > 2.5 * needed


# Operations of torch


def test_operations_of_torch_count_what_they_read_and_write():
    x = torch.ones(4, 8)
    with TorchOps([]) as noted:
        x.sum(0).to(torch.bfloat16)
        torch.zeros_like(x)
        x.mul_(2)
        x.view(32)
        torch.empty(9)
        torch.mm(x, x.t())
        x.copy_(x.clone())
    assert [(c.kernel, c.issued, c.flops) for c in noted.events()] == [
        ("torch sum", 128 + 32, 0),
        ("torch _to_copy", 32 + 16, 0),
        ("torch zeros_like", 128, 0),
        ("torch mul_", 256, 0),
        ("BLAS 4x8 @ 8x4", 128 + 128 + 64, 2 * 4 * 8 * 4),
        ("torch clone", 256, 0),
        ("torch copy_", 256, 0),
    ]


def test_a_recorded_matmul_reads_what_it_accumulates_to():
    a, b, out = torch.empty(2, 3), torch.empty(3, 5), torch.empty(2, 5)
    with TorchOps([]) as noted:
        record_matmul(a, b, out=out)
        record_matmul(a, b, out=out, accumulate=True)
    plain, summed = noted.events()
    assert plain.issued == a.nbytes + b.nbytes + out.nbytes
    assert summed.issued == plain.issued + out.nbytes
    assert plain.flops == 2 * 2 * 3 * 5


# KernelMetadata


def metadata(**given):
    zero: dict[str, Any] = {
        f.name: {} if str(f.type).startswith("dict") else 0 for f in dataclasses.fields(KernelMetadata)
    }
    return KernelMetadata(**zero | dict(kernel="k", target="sm_90", num_warps=4, registers=32) | given)


def test_width_is_that_of_nine_tenths_of_the_bytes():
    assert width(metadata(loads={128: 9, 64: 2})) == 128
    assert width(metadata(loads={128: 8, 64: 2}, stores={64: 1})) == 64
    assert width(metadata(copies={128: 4}, stores={32: 1})) == 128
    assert width(metadata(tma=1)) == 128


# Time


def streaming(read, written, again=0):
    traffic = dict(x=Traffic(loaded=read + again, unique=read), y=Traffic(stored=written, unique=written))
    return Counts("kernel", traffic)


def test_a_band_is_ordered_and_never_faster_than_the_hardware():
    for row in STORED:
        gpu = CARDS[row.target].gpu
        low, mid, high = row.predicted_us
        assert low <= mid <= high
        rounding = 0.005 * row.launches
        assert low >= 1e6 * row.bytes_memory / gpu.bandwidth - rounding
        assert row.bytes_lru >= row.bytes_memory >= row.bytes_unique
        assert low >= 1e6 * row.flops / (gpu.half + gpu.fp32) - rounding


def test_the_slowest_resource_decides():
    card = CARDS["sm_90"]
    exps = dataclasses.replace(streaming(1000, 1000), special=10**10)
    low, *_ = predicted_us(exps, card, programs=1, resident=1)
    # 132 multiprocessors x 16 per clock at 1.98 GHz
    assert low == pytest.approx(1e6 * 10**10 / (132 * 16 * 1.98e9) / 0.9, rel=0.02)


def test_published_timings_lie_in_the_band():
    """Forward kernels of Liger that are one launch, on three GPUs."""
    errors, inside = [], 0
    for p in PUBLISHED:
        counts = streaming(p["read"], p["written"], p["again"])
        low, mid, high = predicted_us(counts, CARDS[p["target"]], programs=p["programs"], resident=2)
        errors.append(abs(math.log(p["us"] / mid)))
        inside += low <= p["us"] <= high
    assert len(PUBLISHED) > 50
    assert inside / len(PUBLISHED) > 0.9
    assert math.exp(sum(errors) / len(errors)) < 1.2


# Ours beside theirs


def test_every_op_is_stored_for_every_target_and_beside_a_baseline():
    ops = {case.shape.op for case in OURS}
    for target in TARGETS:
        here = [row for row in STORED if row.target == target]
        assert {row.op for row in here if row.provider == "fasttrain"} == ops
        assert {row.op for row in here if row.provider in BASELINES} == ops - {"attention"}


def test_ours_moves_no_more_bytes_than_theirs_nor_narrower_ones_and_spills_nothing():
    assert rules.problems(STORED) == []


WIDE, NARROW = (f"8192x{D}, V=151936" for D in (4096, 1024))


def heads(shape, target="sm_90", baseline="cut-cross-entropy"):
    """Our rows of linear cross-entropy, and a baseline's."""
    rows = [r for r in STORED if (r.op, r.shape, r.target) == ("linear_cross_entropy", shape, target)]
    return [[r for r in rows if r.provider == provider] for provider in (rules.OURS, baseline)]


@pytest.mark.parametrize("figure", ["bytes_memory", "bytes_lru"])
def test_only_what_passes_the_cache_compares_one_launch_with_many(figure):
    ours, theirs = heads(WIDE)
    assert rules.total(ours, "bytes_unique") > rules.total(theirs, "bytes_unique")
    assert rules.problems(ours + theirs) == []
    more = rules.total(theirs, figure) - rules.total(ours, figure)
    assert more > 0
    first = dataclasses.replace(ours[0], **{figure: getattr(ours[0], figure) + more})
    assert rules.problems([first, *ours[1:], *theirs]) == []
    first = dataclasses.replace(first, **{figure: getattr(first, figure) + 1})
    (found,) = rules.problems([first, *ours[1:], *theirs])
    assert figure in found
    assert "cut-cross-entropy's" in found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("baseline", ["cut-cross-entropy", "cut-cross-entropy, fp32"])
def test_where_ours_moves_more_bytes_it_has_fewer_flops_and_is_predicted_to_be_faster(target, baseline):
    ours, theirs = heads(NARROW, target, baseline)
    assert rules.total(ours, "flops") < 0.8 * rules.total(theirs, "flops")
    assert rules.problems(ours + theirs) == []
    for change, message in {
        "flops": "flops",
        "bytes_issued": "bytes_issued",
        "predicted_us": "more bytes than cut-cross-entropy(, fp32)?, and 1,000,\\d{3},\\d{3} us in the high case",
    }.items():
        value = [0.0, 0.0, 1e9] if change == "predicted_us" else 10**15
        worse = [dataclasses.replace(ours[0], **{change: value}), *ours[1:]]
        (found,) = rules.problems(worse + theirs)
        assert re.search(message, found)


def test_more_bytes_than_liger_have_no_excuse():
    ours, theirs = heads(NARROW, baseline="liger")
    worse = [dataclasses.replace(ours[0], bytes_memory=10**15), *ours[1:]]
    assert rules.problems(ours + theirs) == []
    assert "bytes_memory" in rules.problems(worse + theirs)[0]


@needs_cce
def test_sums_of_16_bits_miss_the_accuracy_that_ours_has_to_have():
    """cut-cross-entropy adds up dE in bf16, once for each block of the vocabulary; with float32 sums it is accurate."""
    from cut_cross_entropy.cce_backward import cce_backward_kernel
    from cut_cross_entropy.cce_lse_forward import cce_lse_forward_kernel

    from bench.static.cce import wide_backward

    torch.manual_seed(0)
    M, V, D = 256, 8192, 64
    hidden, weight = (x.bfloat16().requires_grad_() for x in (torch.randn(M, D), torch.randn(V, D) / D**0.5))
    target = torch.randint(V, (M,))

    def error(dhidden):
        return ((dhidden.double() - truth).norm() / truth.norm()).item()

    def gradient(loss, dtype):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        loss(h, w).backward()
        return h.grad

    def plain(h, w):
        logits = h @ w.t()
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)

    truth = gradient(plain, torch.float64)
    allowed = 2 * error(gradient(plain, torch.bfloat16))
    with interpret(poison=False, locks=True):
        assert error(gradient(lambda h, w: linear_cross_entropy(h, w, target), torch.bfloat16)) < allowed
        lse = cce_lse_forward_kernel(hidden, weight)
        given = (torch.ones(()), hidden, weight, lse, None, None, None, target)
        assert error(cce_backward_kernel(*given, grad_scale=1 / M)[0]) > 2 * allowed
        assert error(wide_backward(*given, grad_scale=1 / M)[0]) < allowed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(bytes_issued=10**9), r"bytes_issued 1,000,000,000 and liger's [\d,]+, \+"),
        (dict(bytes_memory=10**9), "bytes_memory 1,000,000,000 and liger's"),
        (dict(bytes_lru=10**9), "bytes_lru 1,000,000,000 and liger's"),
        (dict(bytes_unique=10**9), "bytes_unique 1,000,000,000 and liger's"),
        (dict(width_bits=32), "accesses of 32 bits and liger's of 128"),
        (dict(spills=24), "_rms_norm_fwd_kernel: spills 24 B per lane"),
    ],
)
def test_a_worse_kernel_is_reported(change, message):
    ours, theirs = rows_of("rms_norm", "8192x4096"), rows_of("rms_norm", "8192x4096", provider="liger")
    assert rules.problems(ours + theirs) == []
    (found,) = rules.problems([dataclasses.replace(ours[0], **change), *theirs])
    assert found.startswith("rms_norm 8192x4096 sm_90 forward")
    assert re.search(message, found)


def test_any_change_of_an_exact_figure_is_reported():
    (row,) = rows_of("rms_norm", "8192x4096")
    for figure in rules.EXACT:
        other = dataclasses.replace(row, **{figure: "changed"})
        assert rules.changes([other], [row]) == [
            f"rms_norm 8192x4096 sm_90 forward fasttrain _rms_norm_fwd_kernel: {figure} was {getattr(row, figure)} "
            "and is changed"
        ]
    assert rules.changes([dataclasses.replace(row, predicted_us=[0, 0, 0])], [row]) == []


def test_kernels_that_came_or_went_are_reported():
    ours = rows_of("rms_norm", "8192x4096") + rows_of("rms_norm", "8192x4096", direction="backward")
    *others, last = ours
    renamed = dataclasses.replace(last, launch="new")
    gone, came = rules.changes([*others, renamed], STORED)
    assert gone.endswith(f"{last.launch}: is stored, and not launched")
    assert came.endswith("new: is not stored")


def test_launches_of_two_binaries_of_a_kernel_keep_the_worse_figures():
    (row,) = rows_of("rms_norm", "8192x4096")
    other = dataclasses.replace(row, registers=200, spills=8, occupancy=0.1, limiter="x", width_bits=32, launches=2)
    both = _sum(other, row)
    assert both == _sum(row, other)
    assert (both.launches, both.registers, both.spills, both.occupancy, both.limiter, both.width_bits) == (
        *(3, 200, 8, 0.1, "x", 32),
    )
    assert both.bytes_issued == 2 * row.bytes_issued


same_triton = pytest.mark.skipif(rules.stored_triton() != triton.__version__, reason="another Triton than the stored")


@same_triton
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "cross_entropy_rows"])  # make static: all of them
def test_fresh_figures_of_ours_are_the_stored_ones(op, target):
    fresh = survey(case_of(op), target)
    assert fresh
    assert rules.changes(fresh, STORED) == []


@same_triton
@needs_liger
@pytest.mark.parametrize("op", ["rms_norm", "swiglu"])
def test_fresh_figures_of_liger_are_the_stored_ones(op):
    from bench.static.liger import LIGER

    assert rules.changes(survey(case_of(op, cases=LIGER), "sm_90"), STORED) == []


# The command


def test_the_command_shows_the_stored_table(capsys):
    assert main(["--target", "sm_90", "--op", "rms_norm"]) == 0
    out = capsys.readouterr().out
    assert "times are predicted" in out
    assert "rms_norm_fwd_kernel" in out
    assert "liger" in out
    assert "swiglu" not in out


def test_the_command_prints_json_with_the_documented_fields(capsys):
    assert main(["--target", "sm_90", "--op", "swiglu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["pass"] for row in rows} == {"forward", "backward"}
    assert [StaticRow.of(row).plain() for row in rows] == rows


@pytest.mark.parametrize("wrong", [["--target", "sm_70"], ["--op", "softmax"]])
def test_the_command_names_what_it_does_not_know(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(wrong)
    assert "invalid choice" in capsys.readouterr().err


def test_limits_are_below_every_count():
    for shape in (*RMS, *ATTENTION):
        for direction, limit in shape.limits.items():
            assert sum(r.bytes_unique for r in rows_of(shape.op, shape.name, direction=direction)) >= limit


def test_the_tables_are_those_of_the_stored_rows():
    assert TABLES.read_text() == markdown(STORED), "python -m bench.static --update writes both"
