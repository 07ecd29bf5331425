"""Each check, shown by PTX that fails it and by its neighbour that does not."""

import pytest
import torch

from fasttrain_kernels.testing import Fault
from tests.kernels.testing.executed.written import address, run

IN = address("%in0")
SHARED = "mov.b32 %r1, global_smem; shl.b32 %r2, %r0, 2; add.s32 %r2, %r1, %r2;"  # a word for each thread
BARRIER = "bar.sync 0;"


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


# Bounds


@pytest.mark.parametrize("opcode", ["ld.global.b32 %r1, [%rd0+{}];", "st.global.b32 [%rd0+{}], %r0;"])
def test_an_access_outside_of_a_tensor_is_a_fault(opcode):
    run(IN + opcode.format(0), ints(32))
    for offset in (4, -4):
        with pytest.raises(Fault, match="1 lanes outside of all tensors"):
            run(IN + opcode.format(offset), ints(32))


def test_an_access_between_the_rows_of_a_view_is_a_fault():
    view = ints(4, 16)[:, :8]
    run(address("%in0", thread="%r0") + "setp.lt.u32 %p0, %r0, 8; @%p0 st.global.b32 [%rd0], 1;", view)
    assert view.sum() == 8
    with pytest.raises(Fault, match="8 lanes outside of all tensors"):
        run(IN + "setp.lt.u32 %p0, %r0, 16; @%p0 st.global.b32 [%rd0], 1;", view)


def test_a_neighbouring_tensor_is_out_of_reach():
    one, other = torch.zeros(64, dtype=torch.int32).split(32)  # of one storage
    run(IN + "st.global.b32 [%rd0], 1;", one, other)
    with pytest.raises(Fault, match="lanes outside"):
        run(IN + "st.global.b32 [%rd0+128], 1;", one)


def test_misaligned_accesses_are_faults():
    with pytest.raises(Fault, match="misaligned global address"):
        run("ld.global.b64 %rd1, [%in0+4];", ints(32))
    with pytest.raises(Fault, match="misaligned shared address"):
        run(SHARED + "st.shared.b64 [%r1+4], 1;", shared=128)


def test_an_access_outside_of_shared_memory_is_a_fault():
    with pytest.raises(Fault, match=r"shared address 128 \(\+4\) outside of the block's 128 bytes"):
        run(SHARED + "st.shared.b32 [%r2+4], 1;", shared=128)


# Initialisation


@pytest.mark.parametrize(
    ("use", "found"),
    [
        ("st.global.b32 [%rd0], %r3;", True),
        ("add.s32 %r4, %r3, 1; st.global.b32 [%rd0], %r4;", True),
        ("selp.b32 %r4, %r3, 7, %p0; st.global.b32 [%rd0], %r4;", False),  # p0 is false
        ("selp.b32 %r4, 7, %r3, %p0; st.global.b32 [%rd0], %r4;", True),
        ("@%p0 st.global.b32 [%rd0], %r3;", False),
        ("mov.b32 %r3, 5; st.global.b32 [%rd0], %r3;", False),
        ("st.shared.b32 [%r2+128], %r3; ld.shared.b32 %r5, [%r2+128]; st.global.b32 [%rd0], %r5;", True),
        ("shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1; st.global.b32 [%rd0], %r5;", True),
        ("setp.eq.s32 %p1, %r3, 0; @%p1 st.global.b32 [%rd0], 1;", True),
        ("and.b32 %r3, %r3, 0; add.s32 %r4, %r2, %r3; ld.shared.b32 %r5, [%r4];", True),  # an address
    ],
)
def test_values_that_nobody_wrote_are_followed_to_what_they_decide(use, found):
    launch = run(IN + SHARED + "setp.lt.u32 %p0, %r0, 0; ld.shared.b32 %r3, [%r2];" + use, ints(32), shared=256)
    assert bool(launch.uninitialised) == found


def test_matrices_carry_undefined_values():
    body = IN + SHARED + "setp.lt.u32 %p0, %r0, 16; @%p0 st.shared.b32 [%r2], 1; bar.warp.sync -1; mov.b32 %r3, %r1;"
    body += "shl.b32 %r4, %r0, 4; add.s32 %r3, %r3, %r4; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r3];"
    assert run(body + "st.global.b32 [%rd0], %r5;", ints(32), shared=512).uninitialised
    assert not run(body, ints(32), shared=512).uninitialised


def test_registers_hold_poison():
    out = ints(32)
    for byte in (0x5A, 0x7F):
        run(IN + "st.global.b32 [%rd0], %r9;", out, register_poison=byte)
        assert out.unique().item() == byte


def test_shared_memory_holds_poison():
    out = ints(32)
    run(IN + SHARED + "ld.shared.b32 %r3, [%r2]; st.global.b32 [%rd0], %r3;", out, shared=128, shared_poison=0x11)
    assert out.unique().item() == 0x11111111


# Races

WRITE = SHARED + "st.shared.b32 [%r2], %r0;"
READ_OTHER = "xor.b32 %r3, %r0, 32; shl.b32 %r3, %r3, 2; add.s32 %r3, %r1, %r3; ld.shared.b32 %r4, [%r3];"
SCHEDULES = ["lockstep", "forward", "reverse", "random"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warps_that_share_memory_need_a_barrier(schedule):
    options = dict(threads=64, shared=256, schedule=schedule)
    run(WRITE + BARRIER + READ_OTHER, **options)
    with pytest.raises(Fault, match="race in shared memory at byte"):
        run(WRITE + READ_OTHER, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_write_after_a_read_needs_a_barrier(schedule):
    options = dict(threads=64, shared=256, schedule=schedule)
    again = "st.shared.b32 [%r2], 77;"
    run(WRITE + BARRIER + READ_OTHER + BARRIER + again, **options)
    with pytest.raises(Fault, match="race in shared memory"):
        run(WRITE + BARRIER + READ_OTHER + again, **options)


def test_lanes_of_a_warp_need_none():
    assert run(WRITE + READ_OTHER.replace("%r0, 32", "%r0, 1"), shared=128).findings == []


def test_blocks_that_share_global_memory_race():
    store = "mov.u32 %r1, %ctaid.x; st.global.b32 [%in0], {};"
    run(store.format("5"), ints(1), blocks=3)  # the same value
    with pytest.raises(Fault, match=r"race in global memory|different values to one address of global"):
        run(store.format("%r1"), ints(1), blocks=3)
    with pytest.raises(Fault, match=r"race in global memory"):
        run("mov.u32 %r1, %ctaid.x; ld.global.b32 %r2, [%in0]; add.s32 %r2, %r2, %r1; setp.eq.s32 %p0, %r1, 2;"
            "@%p0 st.global.b32 [%in0], %r2;", ints(1), blocks=3)  # fmt: skip


def test_races_can_be_ignored():
    run(WRITE + READ_OTHER, threads=64, shared=256, races=False)


def test_lanes_that_store_different_values_to_one_address_are_found():
    out = ints(1)
    assert run("st.global.b32 [%in0], 3;", out).collisions == {}
    launch = run("st.global.b32 [%in0], %r0;", out)
    assert list(launch.collisions.values()) == [31]
    assert out.item() == 31
    run("st.global.b32 [%in0], %r0;", out, first_wins=True)
    assert out.item() == 0
    shared = run(SHARED + "st.shared.b32 [%r1], %r0;", shared=128)
    assert "shared: st.shared.b32" in next(iter(shared.collisions))


# Asynchronous copies

COPY = IN + SHARED + "cp.async.ca.shared.global [%r2], [%rd0], 4; cp.async.commit_group;"
DONE = "cp.async.wait_group 0;"


def test_a_copy_is_read_after_its_wait_by_others_after_a_barrier():
    x = ints(64)
    options = dict(threads=64, shared=256)
    run(COPY + DONE + "ld.shared.b32 %r3, [%r2];", x, **options)
    run(COPY + DONE + BARRIER + READ_OTHER, x, **options)
    with pytest.raises(Fault, match="that an asynchronous copy is still writing"):
        run(COPY + "ld.shared.b32 %r3, [%r2];" + DONE, x, **options)
    with pytest.raises(Fault, match="that an asynchronous copy is still writing"):
        run(COPY + "st.shared.b32 [%r2], 0;" + DONE, x, **options)
    with pytest.raises(Fault, match="race in shared memory"):
        run(COPY + DONE + READ_OTHER, x, **options)
    with pytest.raises(Fault, match="that an asynchronous copy is still writing"):
        run(COPY + BARRIER + READ_OTHER, x, **options, schedule="forward")


def test_a_copy_that_nobody_waits_for_is_found():
    assert run(COPY, ints(32), shared=128).unfinished


# Barriers, divergence and schedules


def test_a_barrier_that_not_all_reach_is_a_fault():
    half = "setp.lt.u32 %p0, %r0, 32;"
    with pytest.raises(Fault, match="some lanes have ended, others wait"):
        run(half + "@%p0 ret;" + BARRIER, threads=64)
    with pytest.raises(Fault, match="lanes wait at different barriers"):
        run(half + "@%p0 bra A;" + BARRIER + "bra B; A:" + BARRIER + "B:", threads=64)


def test_lanes_of_a_warp_that_wait_for_each_other_elsewhere_are_a_fault():
    with pytest.raises(Fault, match=r"wait for each other at different|not all lanes"):
        run("setp.lt.u32 %p0, %r0, 7; @%p0 bra A; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; bra B;"
            "A: shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; B:")  # fmt: skip


def test_lanes_diverge_and_meet_again():
    out = ints(32)
    loop = "mov.b32 %r1, 0; L: add.s32 %r1, %r1, 1; setp.le.u32 %p0, %r1, %r0; @%p0 bra L;"
    launch = run(loop + "bar.warp.sync -1;" + IN + "st.global.b32 [%rd0], %r1;", out)
    assert out.tolist() == list(range(1, 33))
    assert launch.opcodes["bra"] == 32


def test_labels_of_inline_assembly_are_local():
    skip = "{ .reg .pred q; setp.lt.u32 q, %r0, 4; @q bra DONE; add.s32 %r1, %r1, 1; DONE: }"
    out = ints(32)
    run("mov.b32 %r1, 0;" + skip + skip + IN + "st.global.b32 [%rd0], %r1;", out)
    assert out.tolist() == [0] * 4 + [2] * 28


@pytest.mark.parametrize(("schedule", "last"), [("forward", 96), ("reverse", 0)])
def test_a_schedule_decides_what_nothing_else_does(schedule, last):
    out = ints(1)
    run("and.b32 %r1, %r0, 31; setp.eq.s32 %p0, %r1, 0;"
        "@%p0 atom.global.gpu.relaxed.exch.b32 %r2, [%in0], %r0;", out, threads=128, schedule=schedule)  # fmt: skip
    assert out.item() == last


def test_order_hints_and_policies_change_nothing():
    out = ints(32)
    hints = (
        "createpolicy.fractional.L2::evict_last.b64 %rd7, 1.0; membar.gl; fence.acq_rel.gpu; fence.sc.cta;"
        "griddepcontrol.wait; griddepcontrol.launch_dependents; prefetch.global.L2 [%in0];"
    ).replace("1.0", "0f3F800000")
    assert run(hints + IN + "st.global.b32 [%rd0], %r0;", out).findings == []
    assert out.tolist() == list(range(32))


# Bank conflicts


@pytest.mark.parametrize(
    ("stride", "width", "conflicts"),
    [(4, "b32", 0), (8, "b32", 1), (128, "b32", 31), (0, "b32", 0), (8, "b64", 0), (16, "b64", 2), (16, "v4.b32", 0)],
)
def test_bank_conflicts(stride, width, conflicts):
    to = {"b32": "%r5", "b64": "%rd5", "v4.b32": "{%r5, %r6, %r7, %r8}"}[width]
    body = f"mov.b32 %r1, global_smem; mul.lo.s32 %r2, %r0, {stride}; add.s32 %r2, %r1, %r2;"
    launch = run(body + f"ld.shared.{width} {to}, [%r2];", shared=4096)
    assert launch.bank_accesses == {"b32": 1, "b64": 2, "v4.b32": 4}[width]
    assert launch.bank_conflicts == conflicts
