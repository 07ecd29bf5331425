"""Occupancy by the arithmetic of the vendors."""

import pytest

from fasttrain_kernels.testing.targets import TARGETS, occupancy, target_named


@pytest.mark.parametrize(
    ("target", "num_warps", "registers", "shared", "expected"),
    [
        ("sm_80", 8, 64, 0, (4, 32, "registers")),  # 8 warps of 64 registers per lane in each partition
        ("sm_80", 8, 65, 0, (3, 24, "registers")),  # rounded up to 72: 7 warps per partition, 28 in all
        ("sm_90", 4, 32, 0, (16, 64, "warps")),
        ("sm_90", 4, 50, 0, (9, 36, "registers")),
        ("sm_86", 1, 16, 0, (16, 16, "blocks")),
        ("sm_89", 1, 16, 0, (24, 24, "blocks")),
        ("sm_80", 4, 32, 48 * 1024, (3, 12, "shared")),  # 164 // (48 + 1) KiB
        ("sm_90", 8, 128, 100 * 1024, (2, 16, "registers")),
        ("sm_89", 2, 200, 16_888, (4, 8, "registers")),  # 2 warps per partition: not 65,536 // (200 * 64) = 5 blocks
        ("sm_89", 2, 168, 16_888, (5, 10, "shared")),
        ("sm_120", 4, 32, 101_376, (1, 4, "shared")),
        ("sm_120", 4, 32, 101_377, (0, 0, "launch")),
        ("gfx942", 4, 128, 0, (4, 16, "registers")),
        ("gfx942", 4, 132, 0, (3, 12, "registers")),
        ("gfx942", 4, 32, 24 * 1024, (2, 8, "shared")),
        ("gfx942", 2, 32, 0, (16, 32, "warps")),
        ("gfx942", 16, 32, 0, (2, 32, "warps")),
        ("gfx942", 32, 32, 0, (0, 0, "launch")),  # 2,048 threads
    ],
)
def test_occupancy_equals_the_vendors_arithmetic(target, num_warps, registers, shared, expected):
    found = occupancy(TARGETS[target], num_warps=num_warps, registers=registers, shared=shared)
    assert (found.blocks, found.warps, found.limiter) == expected


def test_tensor_memory_limits_occupancy():
    found = occupancy(TARGETS["sm_100"], num_warps=4, registers=64, tensor_memory=256)
    assert (found.blocks, found.limiter) == (2, "tensor memory")


def test_shared_memory_per_block_is_what_cuda_documents():
    limits = {name: target.shared_per_block for name, target in TARGETS.items()}
    assert limits == {
        "sm_80": 166_912,
        "sm_86": 101_376,
        "sm_89": 101_376,
        "sm_90": 232_448,
        "sm_100": 232_448,
        "sm_120": 101_376,
        "gfx942": 65_536,
    }


def test_unknown_target_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"target 'sm_75' is unknown; known are sm_80, .*, gfx942"):
        target_named("sm_75")
