"""Proxy fences along control flow."""

import pytest

from fasttrain_kernels.testing.compiled.fences import unfenced_matmuls
from tests.kernels.testing.executed.written import ptx

WAIT = "cp.async.ca.shared.global [%r1], [%rd1], 16; cp.async.wait_group 0;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r10, %r11, %r12, %r13}, %rd3, %rd4, %p0, 1, 1, 0, 0;\n"
TCGEN05 = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r22+0], %rd3, %rd4, %r1, %p3;\n"


@pytest.mark.parametrize(
    ("body", "unfenced"),
    [
        (WAIT + WGMMA, 1),
        (WAIT + TCGEN05 + TCGEN05, 2),
        (WAIT + FENCE + WGMMA, 0),
        (FENCE + WAIT + WGMMA, 1),
        (WAIT + FENCE + WGMMA + WAIT + WGMMA, 1),
        (WGMMA + WAIT, 0),
        ("L:\n" + WGMMA + WAIT + "@%p1 bra L;\n", 1),  # in the next round
        ("L:\n" + FENCE + WGMMA + WAIT + "@%p1 bra L;\n", 0),
        (WAIT + "@%p1 bra SKIP;\n" + FENCE + "SKIP:\n" + WGMMA, 1),
        (WAIT + "bra.uni SKIP;\n" + WGMMA + "SKIP:\n" + FENCE, 0),
        (WAIT + "T: .branchtargets A, B; brx.idx %r1, T; A:" + FENCE + "B:" + WGMMA, 1),
        (WAIT + "T: .branchtargets A, A; brx.idx %r1, T; A:" + FENCE + "B:" + WGMMA, 0),
        (WAIT + "@%p1 " + FENCE + WGMMA, 1),
        (WAIT + "ret;\n" + WGMMA, 0),
        (FENCE + WGMMA, 0),
        ("cp.async.wait_group 0;\n" + WGMMA, 0),  # nothing is copied
    ],
)
def test_matmuls_after_a_wait_need_a_fence_on_every_path(body, unfenced):
    assert unfenced_matmuls(ptx(body, 0)) == unfenced
