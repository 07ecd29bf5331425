from collections import Counter

import pytest
import torch

from fasttrain_kernels.testing import Fault
from tests.kernels.testing.executed import test_wgmma
from tests.kernels.testing.executed.test_wgmma import FENCE, PROLOGUE
from tests.kernels.testing.executed.written import address, run

SHARED = 4 * test_wgmma.WORDS + 64  # an mbarrier at 4096, the tensor memory's address at 4112
CODE = 1 << 4 | 1 << 7 | 1 << 10 | (16 >> 3) << 17 | (64 >> 4) << 24  # float32 = bf16 * bf16, 64 x 16


def descriptor(start):
    return (1024 + start) >> 4 | (256 >> 4) << 16 | (256 >> 4) << 32 | 6 << 61


ALLOC = (
    "mov.b32 %r20, global_smem; shr.u32 %r21, %r0, 5; setp.eq.s32 %p1, %r21, 0;"
    "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r20+4112], 32;"
    "setp.eq.s32 %p2, %r0, 0; @%p2 mbarrier.init.shared::cta.b64 [%r20+4096], 1; bar.sync 0;"
    "ld.shared.b32 %r22, [%r20+4112]; bar.sync 0;"
)
ISSUE = (
    f"mov.b64 %rd3, {descriptor(0)}; mov.b64 %rd4, {descriptor(2048)}; bar.sync 0; mov.pred %p3, 0;"
    f"@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r22+0], %rd3, %rd4, {CODE}, %p3;"
    "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r20+4096];"
)
WAIT = "LOOP: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r20+4096], 0; @!%p4 bra.uni LOOP;"
REGISTERS = "{" + ", ".join(f"%r{30 + i}" for i in range(16)) + "}"
LOAD = (
    "shl.b32 %r23, %r21, 21; add.s32 %r23, %r22, %r23;"  # rows 32 w of tensor memory
    f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {REGISTERS}, [%r23+0];"
)
READY = "tcgen05.wait::ld.sync.aligned;"
STORE = address("%in1", "%rd1", size=64) + "".join(f"\nst.global.b32 [%rd1+{4 * i}], %r{30 + i};" for i in range(16))
FREE = (
    "bar.sync 0; @%p2 mbarrier.inval.shared::cta.b64 [%r20+4096];"
    "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r22, 32;"
)


def matrices():
    torch.manual_seed(0)
    return torch.randn(64, 16).bfloat16(), torch.randn(16, 16).bfloat16()


def execute(*parts, **options):
    A, B = matrices()
    out = torch.zeros(128, 16)
    launch = run("".join(parts), test_wgmma.image(A, B), out, threads=128, shared=SHARED, **options)
    return launch, out, A.float() @ B.float().T


def rows(out):
    """64 rows lie in the first 16 of each warp's 32."""
    return out.view(4, 32, 16)[:, :16].reshape(64, 16)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("schedule", ["lockstep", "forward", "reverse", "random"])
def test_a_matmul_into_tensor_memory(schedule, early):
    launch, out, expected = execute(
        PROLOGUE, FENCE, ALLOC, ISSUE, WAIT, LOAD, READY, STORE, FREE, schedule=schedule, early=early
    )
    torch.testing.assert_close(rows(out), expected)
    assert launch.mma_flops == 2 * 64 * 16 * 16
    assert launch.early == launch.unfenced == launch.unfinished == Counter()


def test_rows_of_tensor_memory_that_nobody_wrote_are_found_where_they_leave():
    launch, *_ = execute(PROLOGUE, FENCE, ALLOC, ISSUE, WAIT, LOAD, READY, FREE)
    assert launch.findings == []  # rows 16 to 31 of each warp are loaded, and dropped
    launch, *_ = execute(PROLOGUE, FENCE, ALLOC, ISSUE, WAIT, LOAD, READY, STORE, FREE)
    assert all("st.global" in what for what in launch.uninitialised)
    assert len(launch.uninitialised) == 16  # instructions
    assert set(launch.uninitialised.values()) == {64}


def test_a_result_before_its_mbarrier_is_not_there():
    launch, out, _ = execute(PROLOGUE, FENCE, ALLOC, ISSUE, LOAD, READY, STORE, WAIT, FREE)
    assert set(launch.uninitialised.values()) == {128}
    assert out.isnan().all()


def test_registers_before_the_wait_are_found():
    launch, *_ = execute(PROLOGUE, FENCE, ALLOC, ISSUE, WAIT, LOAD, STORE, READY, FREE)
    assert len(launch.early) == 16


STORED = (
    "shl.b32 %r23, %r21, 21; add.s32 %r23, %r22, %r23;"
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r23+0], {%r0};{}"
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r23+0]; tcgen05.wait::ld.sync.aligned;"
    + address("%in1", "%rd1") + "st.global.b32 [%rd1], %r30;"
)  # fmt: skip


def test_a_store_to_tensor_memory_has_its_own_wait():
    permit = "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    for wait, early in (("tcgen05.wait::st.sync.aligned;", False), ("", True)):
        launch, out, _ = execute(ALLOC, permit, STORED.replace("{}", wait), FREE)
        assert out.view(torch.int32).view(-1)[:128].tolist() == list(range(128))
        assert [what.split(":")[0] for what in launch.early] == ["reads what tcgen05.st stores"] * early


def test_a_renamed_register_is_as_early_as_the_first():
    moved = "mov.b32 %r60, %r30; add.s32 %r61, %r60, 1;"
    launch, *_ = execute(PROLOGUE, FENCE, ALLOC, ISSUE, WAIT, LOAD, moved, READY, FREE)
    assert [what.split(" ")[4] for what in launch.early] == ["add.s32"]


def test_a_missing_proxy_fence_is_found():
    launch, *_ = execute(PROLOGUE, ALLOC, ISSUE, WAIT, FREE)
    assert len(launch.unfenced) == 1


def test_an_operand_that_is_overwritten_before_completion_is_a_fault():
    with pytest.raises(Fault, match="operand A changed between issue and completion"):
        execute(PROLOGUE, FENCE, ALLOC, ISSUE, "@%p2 st.shared.b32 [%r20], 0;", WAIT, FREE)


def test_matmuls_that_nobody_waits_for_are_found():
    launch, *_ = execute(PROLOGUE, FENCE, ALLOC, ISSUE)
    assert sorted(launch.unfinished) == [
        "ends with allocated tensor memory",
        "ends with matmuls that nobody waited for",
    ]


def test_tensor_memory_outside_of_the_allocation_is_a_fault():
    with pytest.raises(Fault, match="outside of the 32 allocated columns"):
        execute(PROLOGUE, FENCE, ALLOC, LOAD.replace("[%r23+0]", "[%r23+20]"), FREE)


def test_rows_of_another_warp_are_a_fault():
    with pytest.raises(Fault, match="belong to another"):
        execute(PROLOGUE, FENCE, ALLOC, LOAD.replace("shl.b32 %r23, %r21, 21", "mov.b32 %r23, 0"), FREE)


def test_waiting_for_a_phase_that_never_comes_is_a_fault():
    with pytest.raises(Fault, match="waits forever"):
        execute(PROLOGUE, FENCE, ALLOC, WAIT)
