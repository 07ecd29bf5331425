from collections import Counter

import pytest

from fasttrain_kernels.testing import ExecutedLaunch, ExecutedLaunches


@pytest.mark.parametrize(
    ("opcode", "name"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "matmul"),
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "matmul"),
        ("wgmma.wait_group.sync.aligned", "wait, fence"),
        ("tcgen05.mma.cta_group::1.kind::f16", "matmul"),
        ("tcgen05.ld.sync.aligned.32x32b.x16.b32", "tensor memory"),
        ("ld.global.v4.b32", "global memory"),
        ("st.shared.b32", "shared memory"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "shared memory"),
        ("cp.async.cg.shared.global", "asynchronous copy"),
        ("cp.async.wait_group", "wait, fence"),
        ("fence.proxy.async.shared::cta", "wait, fence"),
        ("red.global.gpu.relaxed.add.f32", "atomic"),
        ("redux.sync.add.u32", "shuffle, vote"),
        ("bar.sync", "barrier"),
        ("bar.warp.sync", "shuffle, vote"),
        ("ex2.approx.ftz.f32", "special function"),
        ("bra.uni", "control"),
        ("cvt.rn.bf16x2.f32", "conversion, move"),
        ("setp.lt.f32", "comparison"),
        ("fma.rn.f32", "float arithmetic"),
        ("min.NaN.bf16x2", "float arithmetic"),
        ("mad.lo.s32", "integer arithmetic"),
        ("shl.b32", "integer arithmetic"),
    ],
)
def test_an_instruction_has_a_class(opcode, name):
    assert ExecutedLaunch("kernel", opcodes=Counter({opcode: 3})).classes == {name: 3}


def test_findings_name_kernel_and_instruction():
    launch = ExecutedLaunch("kernel", unfenced=Counter({"cp.async -> wgmma": 2}), early=Counter({"mov": 1}))
    assert ExecutedLaunches([launch]).findings == [
        "kernel: reads through the asynchronous proxy without a fence: cp.async -> wgmma (2x)",
        "kernel: touches registers before the wait: mov (1x)",
    ]
    assert launch.findings[0] in str(launch)


def test_barriers_are_summed_over_warps():
    assert ExecutedLaunch("kernel", opcodes=Counter({"bar.sync": 8, "bar.warp.sync": 5})).barriers == 8
