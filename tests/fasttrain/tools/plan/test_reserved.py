"""Memory and host time of a plan, beside runs on the null GPU (reserved.toml; python -m bench.plan_memory)."""

import pytest

from bench.plan_memory import COMMON, planned, rows
from fasttrain.cli.parse import load
from fasttrain.recipes import RECIPES
from fasttrain.tools.plan.allocator import MIB, Allocator
from fasttrain.tools.plan.sizes import vocab_of
from fasttrain.tools.plan.speed import work_of

ROWS = {row["id"]: row for row in rows()}


def test_there_are_runs_that_were_held_out():
    assert len(ROWS) >= 12
    assert sum(row["held_out"] for row in ROWS.values()) >= 4
    assert {row["ranks"] for row in ROWS.values()} == {1, 2}


@pytest.mark.parametrize("id", ROWS)
def test_what_the_allocator_takes_is_within_4_percent_and_never_more(id):
    """Too much by 4% at most. Too little never: on a card of exactly the planned size, no allocation is retried."""
    row = ROWS[id]
    plan = planned(row)
    assert 1.0 <= (plan.bytes - plan.process) / row["reserved"] <= 1.04
    assert row["reserved"] <= 2 * plan.least  # what MemoryEstimate.fits takes for granted


@pytest.mark.parametrize("id", ROWS)
def test_tensors_alone(id):
    """At most 8% too much (a rank that reduces a large vocabulary), 2% too little (workspaces; a validation: 11%)."""
    row = ROWS[id]
    low = 0.89 if id == "pico-dropout" else 0.98
    assert low <= max(moment.total for moment in planned(row).tensors) / row["allocated"] <= 1.08


@pytest.mark.parametrize("id", [id for id, row in ROWS.items() if "muon" not in row["run"]])
def test_host_time_is_within_a_third(id):
    row = ROWS[id]
    settings = load([*row["run"].split(), *COMMON.split()], RECIPES)
    work = work_of(settings, vocab=vocab_of(settings), dp_size=row["ranks"])
    assert 1e3 * work.host == pytest.approx(row["host_ms"], rel=0.34)


def test_the_allocator_s_rules():
    at = Allocator()
    small = at.new(100)
    assert at.reserved == 2 * MIB  # a segment of small tensors
    first, second = at.new(3 * MIB), at.new(5 * MIB)
    assert at.reserved == 22 * MIB  # both in one of 20 MiB
    at.new(14 * MIB + 1)
    assert at.reserved == 38 * MIB  # rounded to 2 MiB
    taken = at.reserved
    at.free(first, second)
    assert at.new(8 * MIB) == first  # merged, and taken again
    other = at.new(3 * MIB, stream=1)
    assert at.reserved == taken + 20 * MIB  # another stream's memory is no use
    at.free(other, small)
