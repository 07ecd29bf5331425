"""Bytes that pass L2: of small cases by hand, and of the kernels whose order is modelled."""

import importlib.util
import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bench.static.cache import Access, Operand, Result, Tiling, accesses, memory_bytes, through, through_lru
from bench.static.counts import Counts
from bench.static.gpus import CARDS
from bench.static.torch_ops import TorchOps, record_matmul
from fasttrain_kernels.testing import Traffic, interpret
from fasttrain_kernels.testing.interpreter.memory import GlobalMemory

needs_cce = pytest.mark.skipif(
    not importlib.util.find_spec("cut_cross_entropy"), reason="needs pip install -e '.[baselines]'"
)
A, B = Operand("a", 0, 2), Operand("b", 1, 2)
SUM = Operand("sum", 1, 4, added_to=True)


def card(cache, multiprocessors=1):
    return replace(CARDS["sm_90"], l2_bytes=cache, multiprocessors=multiprocessors)


# The cache


def read(names):
    return [Access(ord(name), 1) for name in names]


def test_a_block_that_is_needed_again_stays_and_one_that_is_not_goes():
    assert through(read("abab"), 2) == 2
    assert through(read("abcabc"), 2) == 4  # c passes: a and b stay until they are needed
    assert through(read("aaaa"), 0) == 4


def test_lru_forgets_what_was_not_used_for_longest():
    assert through_lru(read("abab"), 2) == 2
    assert through_lru(read("abcabc"), 2) == 6
    assert through_lru(read("abacab"), 2) == 4  # c takes the place of b, and b that of c
    assert through_lru(read("aaaa"), 0) == 4


@pytest.mark.parametrize("rule", [through, through_lru])
def test_what_was_written_goes_back_once_for_each_eviction(rule):
    a, b = Access(1, 10, written=True), Access(2, 10)
    assert rule([a, a, a], 100) == 20
    assert rule([a, b, a], 100) == 30
    assert rule([a, b, b, a], 10) == 50  # a out and in again
    assert rule([a, Access(3, 10, written=True, read=False), a], 100) == 30  # what is only written is not fetched
    assert through([a, b, a], 10) == 30  # b, which nobody needs again, passes
    assert through_lru([a, b, a], 10) == 50


def test_it_moves_no_more_than_lru_and_no_less_than_the_distinct_bytes():
    chance = random.Random(0)
    for _ in range(50):
        asked = [Access(chance.randrange(12), 1) for _ in range(200)]
        for size in (1, 3, 8, 12):
            found = through(asked, size)
            assert len({access.block for access in asked}) <= found <= through_lru(asked, size)
        assert through(asked, 12) == 12


# Matmuls


def tiling(**changed):
    usual: dict[str, Any] = dict(M=1024, N=2048, D=2000, tile=(128, 256), loops=((A, B),), group=2)
    return Tiling(**usual | changed)


def test_a_group_of_rows_goes_through_all_columns_before_the_next():
    small = tiling(M=3 * 128, N=2 * 256)
    assert small.order() == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert replace(small, by_columns=True).order() == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("sizes", [dict(), dict(M=1000, N=2001, D=1), dict(M=1, N=1)])
@pytest.mark.parametrize("by_columns", [False, True])
def test_a_cache_that_holds_everything_moves_the_distinct_bytes(sizes, by_columns):
    it = tiling(**sizes, by_columns=by_columns, loops=((A, B), (A, SUM)))
    expected = 2 * it.M * it.D + (2 + 4 + 4) * it.N * it.D
    for rule in (through, through_lru):
        assert rule(list(accesses(it, concurrent=3)), 10**9) == expected


def test_without_a_cache_every_wave_reads_its_panels():
    it = tiling(group=2)  # 8 x 8 tiles; four programs at a time: two rows and two columns
    asked = list(accesses(it, concurrent=4))
    a, b = 2 * 128 * it.D, 2 * 256 * it.D
    assert through(asked, 0) == through_lru(asked, 0) == 16 * (2 * a + 2 * b)
    # The two rows stay while their group goes through the columns: a once, b for each of four groups
    assert through(asked, 2 * a + 2 * b) == pytest.approx(8 * a + 4 * 8 * b, rel=0.2)


@pytest.mark.parametrize("added", [False, True])
def test_tiles_of_the_result_take_room_only_where_age_decides(added):
    it = tiling(group=8)  # all rows at a time: they stay, and each column passes once
    rows, columns = 2 * it.M * it.D, 2 * it.N * it.D
    size = rows + columns // 8  # nothing is left for a result
    written = 4 * it.M * it.N * (1 + added)

    def moved(rule, result):
        return rule(list(accesses(replace(it, result=result), concurrent=8)), size)

    result = Result(("out",), 4, added)
    assert moved(through, None) == moved(through_lru, None) == rows + columns
    assert moved(through, result) == rows + columns + written
    assert moved(through_lru, result) == 8 * rows + columns + written  # the rows are gone after each of 8 waves


@pytest.mark.parametrize("rule", ["perfect", "lru"])
def test_a_matmul_of_blas_takes_the_best_order_and_its_result_passes_once(rule):
    a, b, out = torch.empty(1024, 512), torch.empty(512, 4096), torch.empty(1024, 4096)
    with TorchOps([]) as noted:
        record_matmul(a, b, out=out, accumulate=True)
    (counts,) = noted.events()
    huge = memory_bytes(counts, card(10**9), rule, programs=1, resident=1)
    assert huge == counts.unique == a.nbytes + b.nbytes + 2 * out.nbytes
    orders = [replace(counts, tilings=(order,)) for order in counts.tilings]
    small = [memory_bytes(order, card(10**6), rule, programs=1, resident=1) for order in orders]
    assert memory_bytes(counts, card(10**6), rule, programs=1, resident=1) == min(small) < max(small)
    assert huge < min(small)


# Other launches


def test_a_part_that_is_read_again_comes_from_memory_if_those_in_flight_do_not_fit():
    logits = Traffic(loaded=2 * 10**9, stored=10**9, unique=2 * 10**9)  # read, read again and overwritten
    weight = Traffic(loaded=10**9, unique=10**6)
    counts = Counts("kernel", dict(logits=logits, weight=weight))
    once = 2 * 10**9 + 10**6

    def moved(cache, resident=1, rule="perfect"):
        return memory_bytes(counts, card(cache, multiprocessors=50), rule, programs=1000, resident=resident)

    assert moved(cache=50 * 10**6) == once  # 50 programs hold 1 MB each
    assert moved(cache=50 * 10**6, resident=2) == once + 10**9 // 2
    assert moved(cache=25 * 10**6) == once + 10**9 // 2
    assert moved(cache=10**9, resident=100) == once
    assert moved(cache=50 * 10**6, rule="lru") == once
    assert moved(cache=49 * 10**6, rule="lru") == once + 10**9  # a loop over more than it holds finds nothing


def test_attention_has_its_distinct_bytes():
    counts = Counts("kernel", dict(q=Traffic(loaded=10**9, unique=10**6)), flops=1)
    assert memory_bytes(counts, card(1), "lru", programs=1, resident=1) == 10**6


# The order of cut-cross-entropy's programs


@needs_cce
@pytest.mark.parametrize("kernel", ["_cce_lse_forward_kernel", "_cce_backward_kernel"])
def test_programs_of_cut_cross_entropy_touch_what_its_tiling_says(kernel):
    """The real kernels, interpreted, with more than one group of row blocks and a last group that is short."""
    from bench.static.cce import CCE

    sizes = dict(M=9 * 256, V=2 * 128, D=64)
    it = CCE[0].tilings[kernel](sizes)
    touched = _touched(CCE[0], sizes, kernel)
    assert len(touched) == len(it.order()) == it.blocks[0] * it.blocks[1]
    for program, tile in enumerate(it.order()):
        loops = [_without_repetitions(o.name for o in loop) for loop in it.loops]
        assert [name for name, _ in touched[program]] == [name for loop in loops for name in loop]
        for name, rows in touched[program]:
            side = 0 if name in ("E", "dE") else 1
            first = tile[side] * it.tile[side]
            assert rows == (first, first + it.rows(side, tile[side]) - 1), (program, name)


def _touched(case, sizes, kernel):
    """program -> (operand, first and last row), in the order of its loads; steps of one loop as one."""
    found: dict[int, list[Any]] = {}
    locate = GlobalMemory._locate

    def noted(self, access, *rest):
        parts = locate(self, access, *rest)
        if self.launch.kernel == kernel and access == "load":
            for argument, places, _ in parts:
                if argument.name in ("E", "C", "dE", "dC"):
                    rows = int(places.min()) // sizes["D"], int(places.max()) // sizes["D"]
                    found.setdefault(self.program[0], []).append((argument.name, rows))
        return parts

    with patch.object(GlobalMemory, "_locate", noted), interpret(poison=False, locks=True):
        case.run(sizes)()
    return {program: _without_repetitions(loads) for program, loads in found.items()}


def _without_repetitions(loads):
    """A loop of several steps over the same operands as one step."""
    loads = list(loads)
    kept = loads[:2]
    for i in range(2, len(loads), 2):
        if loads[i : i + 2] != loads[i - 2 : i]:
            kept += loads[i : i + 2]
    return kept
