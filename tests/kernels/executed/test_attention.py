"""What execution found in attention's kernels, and what holds since."""

from __future__ import annotations

import pytest
import torch

from fasttrain_kernels import attention
from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.testing import Launch, execute, interpret
from fasttrain_kernels.testing.targets import TARGETS
from tests.kernels.executed.test_ops import undefined

OPTIONS = {
    "causal": {},
    "softcap": dict(softcap=20.0),
    "documents": dict(cu_seqlens=torch.tensor([0, 60, 61, 200], dtype=torch.int32)),
}


def train(D: int, dtype: torch.dtype = torch.bfloat16, T: int = 200, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, D).to(dtype).requires_grad_() for heads in (2, 1, 1))
    out = attention(q, k, v, backend="triton", **options)
    return list(torch.autograd.grad(out, [q, k, v], torch.randn_like(out)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_tensor_cores_of_sm_100_read_tiles_behind_a_proxy_fence(D, options):
    """With two stages, tcgen05.mma read what cp.async had just delivered: nondeterministic on a B200."""
    with execute("sm_100", bank_conflicts=False) as launches:
        train(D, **options)
    assert undefined(launches) == []
    assert any("tcgen05.mma" in opcode for opcode in launches[-1].opcodes)


def test_delta_does_not_depend_on_the_lane_that_stores_it():
    """The product in tl.sum(p * dp, 1), contracted with an addition, gave the lanes of a row two values."""
    results = []
    for collisions in ("first", "last"):
        with execute("sm_90", collisions=collisions, bank_conflicts=False) as launches:
            results.append(train(128, torch.float32, T=40))
        assert launches.findings == []
    assert all(torch.equal(first, last) for first, last in zip(*results, strict=True))


def needed(D: int, target: str, **options) -> list[Launch]:
    """The launches with the tiles of a target, interpreted: a matmul's FLOPs count once."""
    limits = TARGETS[target]
    simulated = kernels_on_cpu(shared_memory=limits.shared_per_block, compute_capability=int(limits.arch))
    with simulated, interpret() as launches:
        train(D, **options)
    return launches


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("D", [64, 96, 128])
def test_no_warp_repeats_the_matmuls_of_another(D, target):
    expected = {launch.kernel: launch.flops for launch in needed(D, target)}
    with execute(target, bank_conflicts=False, races=False) as launches:
        train(D)
    assert {launch.kernel: launch.mma_flops for launch in launches} == expected


# A program of eight warps has 32 or 64 rows: 128 spill, and so do four warps. On tcgen05 no warp owns rows.
REPEATED = {
    "_attention_fwd_kernel": 1.5,
    "_attention_key_gradient_kernel": 1.5,
    "_attention_query_gradient_kernel": 1.67,
}


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_256_features_repeat_as_much_as_is_known(target):
    expected = {launch.kernel: launch.flops for launch in needed(256, target)}
    with execute(target, bank_conflicts=False, races=False) as launches:
        train(256)
    for launch in launches:
        limit = 1.0 if target == "sm_100" else REPEATED.get(launch.kernel, 1.0)
        assert launch.mma_flops / expected[launch.kernel] == pytest.approx(limit, abs=0.01)
