"""Warps with different tasks: barriers of some of them, mbarriers between them, jumps by a table."""

import pytest
import torch

from fasttrain_kernels.testing import Fault, Unsupported
from tests.kernels.testing.executed.written import address, run

SCHEDULES = ["lockstep", "forward", "reverse", "random"]
# Four warps: %p1 in the second half, %p2 in the first thread; a word of shared memory for each thread
SETUP = (
    "mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r2, %r1, %r2; setp.ge.u32 %p1, %r0, 64;"
    "setp.eq.s32 %p2, %r0, 0; setmaxnreg.inc.sync.aligned.u32 64;"
)
WRITE = "st.shared.b32 [%r2], %r0;"
OF_THE_OTHER_WARP = "xor.b32 %r3, %r0, 32; shl.b32 %r3, %r3, 2; add.s32 %r3, %r1, %r3; ld.shared.b32 %r4, [%r3];"
OUT = address("%in0") + "st.global.b32 [%rd0], %r4;"


def half(first, second):
    """Two warps do the first, two the second."""
    return f"@%p1 bra SECOND; {first} bra.uni END; SECOND: {second} END:"


def execute(*parts, **options):
    out = torch.zeros(128, dtype=torch.int32)
    launch = run(SETUP + "".join(parts), out, threads=128, shared=1024, **options)
    return launch, out.tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_barriers_of_some_warps_order_only_those(schedule):
    _, out = execute(WRITE, half("bar.sync 1, 64;", "bar.sync 2, 64;"), OF_THE_OTHER_WARP, OUT, schedule=schedule)
    assert out == [i ^ 32 for i in range(128)]
    with pytest.raises(Fault, match="race in shared memory"):
        execute(WRITE, half("bar.sync 1, 64;", ""), OF_THE_OTHER_WARP, OUT, schedule=schedule)


def test_a_barrier_of_all_orders_all():
    other = OF_THE_OTHER_WARP.replace("%r0, 32", "%r0, 64")
    _, out = execute(WRITE, half("bar.sync 1, 64;", "bar.sync 2, 64;"), "barrier.sync 3;", other, OUT)
    assert out == [i ^ 64 for i in range(128)]
    with pytest.raises(Fault, match="race in shared memory"):
        execute(WRITE, half("bar.sync 1, 64;", "bar.sync 2, 64;"), other, OUT)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("bar.sync 1, 64;", "bar.sync 1, 128;", r"barrier 1: \d+ threads wait for 64, 128"),
        ("bar.sync 1, 96;", "", "warps wait at barriers that others never reach"),
        ("bar.sync 1, 64; bar.sync 2, 128;", "bar.sync 3, 64; bar.sync 4, 128;", "others never reach"),
    ],
)
def test_barriers_that_warps_do_not_agree_on_are_faults(first, second, message):
    with pytest.raises(Fault, match=message):
        execute(half(first, second), schedule="reverse")


def test_a_register_may_name_the_barrier_but_not_its_threads():
    by_register = "shr.u32 %r9, %r0, 6; add.s32 %r9, %r9, 1; bar.sync %r9, 64;"
    _, out = execute(WRITE, by_register, OF_THE_OTHER_WARP, OUT)
    assert out == [i ^ 32 for i in range(128)]
    with pytest.raises(Unsupported, match=r"bar.sync .*1, %r0"):
        execute("bar.sync 1, %r0;")


# A word goes from the first warp to the last by mbarriers: full at 512, empty at 520

MADE = (
    "@%p2 mbarrier.init.shared::cta.b64 [%r1+512], 1; @%p2 mbarrier.init.shared::cta.b64 [%r1+520], 32; barrier.sync 0;"
)
PRODUCER = "setp.lt.u32 %p4, %r0, 32;"
PUT = "@%p4 st.shared.b32 [%r2], {};"
FULL = "bar.warp.sync -1; @%p2 mbarrier.arrive.shared::cta.b64 _, [%r1+512];"
EMPTY = "mbarrier.arrive.shared::cta.b64 _, [%r1+520];"
TAKE = "add.s32 %r3, %r2, -256; ld.shared.b32 %r4, [%r3];"


def wait(at, phase, label):
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r1+{at}], {phase}; @!%p5 bra.uni {label};"


def exchange(first, second):
    """Warps 0 and 2; the others leave."""
    alone = "and.b32 %r9, %r0, 32; setp.ne.s32 %p3, %r9, 0;"
    body = alone + half(PRODUCER + first, "@%p3 bra END;" + second) + "bar.sync 1, 128;"  # all: never of some
    return MADE + body.replace("bar.sync 1, 128;", half("bar.sync 5, 64;", "bar.sync 6, 64;").replace("END", "LAST")
                               .replace("SECOND", "SECOND_LAST"))  # fmt: skip


def test_a_parity_is_its_lowest_bit():
    """Triton writes -1 for 1."""
    with pytest.raises(Fault, match="waits forever"):
        execute(MADE, wait(512, 0, "A"))
    with pytest.raises(Fault, match="waits forever"):
        execute(MADE, FULL, "bar.sync 2, 128;", wait(512, -1, "A"))
    execute(MADE, wait(512, -1, "A"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_mbarrier_orders_what_came_before_its_arrivals(schedule):
    first = PUT.format("%r0") + FULL + wait(520, 0, "A") + PUT.format("77") + FULL
    second = wait(512, 0, "B") + TAKE + "mov.b32 %r5, %r4;" + EMPTY + wait(512, 1, "C") + TAKE
    second += "add.s32 %r4, %r4, %r5;"
    _, out = execute(exchange(first, second + OUT), schedule=schedule)
    assert out[64:96] == [77 + i for i in range(32)]
    with pytest.raises(Fault, match="race in shared memory"):
        execute(exchange(PUT.format("%r0") + FULL + PUT.format("77"), wait(512, 0, "B") + TAKE), schedule=schedule)
    with pytest.raises(Fault, match="race in shared memory"):
        execute(exchange(first, second.replace(wait(512, 0, "B"), "") + OUT), schedule=schedule)


def test_waiting_for_arrivals_that_never_come_is_a_fault():
    with pytest.raises(Fault, match="waits forever"):
        execute(exchange(PUT.format("1"), wait(512, 0, "B")))


def test_arrivals_may_count_more_than_once():
    one = "elect.sync %r9|%p6, -1; @%p6 mbarrier.arrive.shared::cta.b64 _, [%r1+520], 32;"
    _, out = execute(exchange(wait(520, 0, "A") + "mov.b32 %r4, 5;" + OUT, one))
    assert out[:32] == [5] * 32


def test_a_jump_by_a_table():
    table = "T: .branchtargets A, B,\n C;"
    body = "mov.b32 %r4, 9; shr.u32 %r5, %r0, 5; setp.gt.u32 %p7, %r5, 2; @%p7 bra D;" + table + "brx.idx %r5, T;"
    ways = "A: mov.b32 %r4, 1; bra.uni D; B: mov.b32 %r4, 2; bra.uni D; C: mov.b32 %r4, 3; D:"
    _, out = execute(body, ways, OUT, "barrier.sync 1; bar.sync 2, 128;")
    assert out == [1] * 32 + [2] * 32 + [3] * 32 + [9] * 32
    with pytest.raises(Fault, match=r"brx.idx .* jumps behind its table"):
        execute(body.replace("@%p7 bra D;", ""), ways, OUT)


def test_an_mbarrier_that_ends_before_its_arrivals_is_found():
    commit = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1+512];"
    launch, _ = execute(MADE, commit, "@%p2 mbarrier.inval.shared::cta.b64 [%r1+512];")
    assert "an arrival is still to come" in next(iter(launch.unfinished))
    launch, _ = execute(MADE, commit, wait(512, 0, "A"), "@%p2 mbarrier.inval.shared::cta.b64 [%r1+512];")
    assert launch.findings == []
