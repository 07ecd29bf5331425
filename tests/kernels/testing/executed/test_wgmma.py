import numpy as np
import pytest
import torch

from fasttrain_kernels.testing import Fault
from tests.kernels.testing.executed.written import address, run

WORDS = 1024  # of shared memory: A from byte 0, B from byte 2048


def image(A, B, transposed=False):
    """A (64, 16) and B (N, 16) as they lie in shared memory with a swizzle of 32 bytes, by the manual's formula."""
    memory = np.zeros(4 * WORDS, np.uint8).view(np.uint16)
    for start, matrix, mn_major in ((0, A, False), (2048, B, transposed)):
        for row, k in np.ndindex(*matrix.shape):
            at = row // 8 * 256 + row % 8 * 32 + 2 * k  # atoms of 8 rows
            if mn_major:  # atoms of 8 k, 16 rows next to each other
                at = k // 8 * 256 + k % 8 * 32 + 2 * row
            at ^= ((at >> 7) & 1) << 4
            memory[(start + at) // 2] = matrix[row, k].view(torch.int16).item() & 0xFFFF
    return torch.from_numpy(memory.view(np.int32).copy())


def descriptor(start):
    return (1024 + start) >> 4 | (256 >> 4) << 16 | (256 >> 4) << 32 | 3 << 62


COPY = "".join(f"ld.global.b32 %r1, [%rd0+{512 * i}]; st.shared.b32 [%r2+{512 * i}], %r1;" for i in range(WORDS // 128))
PROLOGUE = address("%in0") + "mov.b32 %r2, global_smem; shl.b32 %r3, %r0, 2; add.s32 %r2, %r2, %r3;" + COPY
FENCE = "fence.proxy.async.shared::cta;"
ISSUE = (
    "bar.sync 0;" + "".join(f"mov.b32 %r{i}, 0;" for i in range(10, 14)) + f"mov.b64 %rd3, {descriptor(0)};"
    f"mov.b64 %rd4, {descriptor(2048)}; setp.ne.s32 %p0, %r10, 1; wgmma.fence.sync.aligned;"
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10, %r11, %r12, %r13}, %rd3, %rd4, %p0, 1, 1, 0, 0;"
    "wgmma.commit_group.sync.aligned;"
)
WAIT = "wgmma.wait_group.sync.aligned 0;"
STORE = address("%in1", "%rd1", size=16) + "st.global.v4.b32 [%rd1], {%r10, %r11, %r12, %r13};"


def matrices(rows=8):
    torch.manual_seed(0)
    return torch.randn(64, 16).bfloat16(), torch.randn(rows, 16).bfloat16()


def result(out):
    """Registers of 128 lanes as a matrix: row 16 w + 8 h + lane / 4, column 2 (lane % 4) + c."""
    return out.view(4, 8, 4, 2, 2).permute(0, 3, 1, 2, 4).reshape(64, 8)


@pytest.mark.parametrize("schedule", ["lockstep", "forward", "reverse", "random"])
def test_a_matmul_of_four_warps(schedule):
    A, B = matrices()
    out = torch.zeros(128, 4)
    launch = run(
        PROLOGUE + FENCE + ISSUE + WAIT + STORE, image(A, B), out, threads=128, shared=4 * WORDS, schedule=schedule
    )
    torch.testing.assert_close(result(out), A.float() @ B.float().T)
    assert launch.findings == []
    assert launch.mma_flops == 2 * 64 * 8 * 16


def test_a_transposed_operand():
    A, B = matrices(16)
    out = torch.zeros(128, 8)
    issue = ISSUE.replace("m64n8k16", "m64n16k16").replace(", 1, 1, 0, 0;", ", 1, 1, 0, 1;")
    registers = "{%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}"
    issue = issue.replace("{%r10, %r11, %r12, %r13}", registers)
    zero = "".join(f"mov.b32 %r{i}, 0;" for i in range(14, 18))
    store = STORE.replace("%r0, 16", "%r0, 32") + "st.global.v4.b32 [%rd1+16], {%r14, %r15, %r16, %r17};"
    run(PROLOGUE + FENCE + zero + issue + WAIT + store, image(A, B, True), out, threads=128, shared=4 * WORDS)
    got = torch.cat([result(out[:, :4].contiguous()), result(out[:, 4:].contiguous())], 1)
    torch.testing.assert_close(got, A.float() @ B.float().T)


def test_a_result_before_its_wait_is_found_and_poisoned():
    out = torch.zeros(128, 4)
    launch = run(PROLOGUE + FENCE + ISSUE + STORE + WAIT, image(*matrices()), out, threads=128, shared=4 * WORDS)
    assert "reads a result of wgmma" in next(iter(launch.early))
    assert out.isnan().all()


def test_an_operand_that_changes_before_the_wait_is_a_fault():
    late = "setp.lt.u32 %p1, %r0, 32; @%p1 st.shared.b32 [%r2], 0;"  # rows that only this warp multiplies
    with pytest.raises(Fault, match="changed before the matmul was waited for"):
        run(PROLOGUE + FENCE + ISSUE + late + WAIT, image(*matrices()), torch.zeros(1), threads=128, shared=4 * WORDS)


def test_an_operand_that_another_warp_writes_without_a_barrier_is_a_race():
    late = "bar.sync 0; st.shared.b32 [%r2], 0;"
    with pytest.raises(Fault, match=r"changed before|race in shared memory"):
        run(PROLOGUE + FENCE + ISSUE.replace("bar.sync 0;", "") + WAIT + late, image(*matrices()), torch.zeros(1),
            threads=128, shared=4 * WORDS, schedule="forward")  # fmt: skip


@pytest.mark.parametrize(
    ("fence", "found"),
    [
        (FENCE, False),
        ("", True),
        ("bra.uni NEXT;" + FENCE + "NEXT:", True),  # in the text, but never executed
        ("setp.lt.u32 %p1, %r0, 64; @%p1 bra NEXT;" + FENCE + "NEXT:", True),  # by half of the writers
    ],
)
def test_a_missing_proxy_fence_is_found_along_control_flow(fence, found):
    launch = run(PROLOGUE + fence + ISSUE + WAIT, image(*matrices()), threads=128, shared=4 * WORDS)
    assert bool(launch.unfenced) == found


def test_an_operand_that_nobody_wrote_is_found():
    launch = run(PROLOGUE.replace(COPY, "") + FENCE + ISSUE + WAIT, torch.zeros(1), threads=128, shared=4 * WORDS)
    assert launch.uninitialised
