"""Hardware limits of the GPUs that the kernels are compiled for, and how many blocks of a kernel fit on one of them.

A streaming multiprocessor (SM; AMD: compute unit) has four partitions, each with its own register file. Warps are dealt
out to the partitions, and a warp takes registers in units of eight per lane, so that

    warps per partition = min(registers per lane // round_up(registers of the kernel, 8), warp slots)

which holds for NVIDIA (65,536 registers / 4 partitions / 32 lanes = 512 per lane) as for CDNA3 (512 VGPRs per lane and
SIMD). Blocks also share the SM's shared memory, its block slots and, on sm_100, its tensor memory. The scarcest of
these is the limiter.
"""

from __future__ import annotations

from dataclasses import dataclass

_PARTITIONS = 4  # per SM since Volta, per CU since GCN
_REGISTERS_PER_LANE = 512
_REGISTER_UNIT = (
    8  # CUDA: 256 per warp of 32 (cuda_occupancy.h); CDNA3: LLVM's getVGPRAllocGranule for gfx90a and later
)
_MAX_THREADS = 1024  # per block, everywhere


@dataclass(frozen=True, kw_only=True)
class Target:
    """One GPU architecture. Sizes in bytes; `per_sm` is per compute unit on AMD."""

    name: str
    gpus: str
    backend: str  # Triton's: "cuda" or "hip"
    arch: int | str  # Triton's: 90 or "gfx942"
    warp_size: int
    warps_per_sm: int
    blocks_per_sm: int
    shared_per_sm: int
    shared_per_block: int
    shared_reserved: int  # taken from every block by the system
    shared_unit: int  # allocation granularity
    tensor_memory_per_sm: int = 0  # columns of 512 B


def _nvidia(arch: int, gpus: str, *, warps: int, blocks: int, shared_kib: int, tensor_memory: int = 0) -> Target:
    return Target(
        name=f"sm_{arch}",
        gpus=gpus,
        backend="cuda",
        arch=arch,
        warp_size=32,
        warps_per_sm=warps,
        blocks_per_sm=blocks,
        shared_per_sm=shared_kib * 1024,
        # CUDA C++ Programming Guide, "Compute Capabilities": a block may use all but the reserved 1 KiB.
        shared_per_block=(shared_kib - 1) * 1024,
        shared_reserved=1024,  # compute capability 8.0 and later (tuning guides for Ampere, Hopper, Blackwell)
        shared_unit=128,  # cuda_occupancy.h, compute capability 7.0 and later
        tensor_memory_per_sm=tensor_memory,
    )


# NVIDIA: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability": maximum resident warps
# and blocks per SM, shared memory per SM. Tensor memory: PTX ISA, "Tensor Memory": 512 columns x 128 lanes x 32 bit.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia(80, "A100", warps=64, blocks=32, shared_kib=164),
        _nvidia(86, "RTX 3090, A40, A6000", warps=48, blocks=16, shared_kib=100),
        _nvidia(89, "RTX 4090, L4, L40S", warps=48, blocks=24, shared_kib=100),
        _nvidia(90, "H100, H200", warps=64, blocks=32, shared_kib=228),
        _nvidia(100, "B200", warps=64, blocks=32, shared_kib=228, tensor_memory=512),
        _nvidia(120, "RTX 5090, RTX PRO 6000", warps=48, blocks=24, shared_kib=100),
        Target(
            name="gfx942",
            gpus="MI300X, MI325X",
            backend="hip",
            arch="gfx942",
            warp_size=64,
            warps_per_sm=32,  # LLVM getMaxWavesPerEU: 8 on gfx90a and later; x 4 SIMDs
            blocks_per_sm=16,  # LLVM getMaxWorkGroupsPerCU: 16 barriers; a block of a single wave needs none
            shared_per_sm=64 * 1024,  # AMD CDNA3 ISA guide, "Local Data Share (LDS)"
            shared_per_block=64 * 1024,
            shared_reserved=0,
            shared_unit=512,  # LLVM LDS allocation granularity: 128 dwords on gfx9
        ),
    )
}


@dataclass(frozen=True)
class Occupancy:
    """The blocks and warps of a kernel that an SM holds at once, and what limits them."""

    blocks: int
    warps: int
    max_warps: int
    limiter: str  # "registers", "shared", "tensor memory", "blocks", "warps", or "launch": it cannot run at all

    @property
    def share(self) -> float:
        return self.warps / self.max_warps


def target_named(name: str) -> Target:
    """The target, or an error that lists the known ones."""
    if name not in TARGETS:
        raise ValueError(f"target {name!r} is unknown; known are {', '.join(TARGETS)}")
    return TARGETS[name]


def occupancy(
    target: Target,
    *,
    num_warps: int,  # per block
    registers: int,  # per lane; AMD: VGPRs, accumulation registers included
    shared: int = 0,  # per block
    tensor_memory: int = 0,  # columns per block
) -> Occupancy:
    """Resident blocks per SM, by the arithmetic of NVIDIA's cuda_occupancy.h and of LLVM's AMDGPU backend."""
    registers = _round_up(max(registers, 1), _REGISTER_UNIT)
    warps_by_registers = _REGISTERS_PER_LANE // registers * _PARTITIONS
    needs_shared = _round_up(shared + target.shared_reserved, target.shared_unit)
    limits = {
        "registers": warps_by_registers // num_warps,
        "shared": target.shared_per_sm // needs_shared if needs_shared else target.warps_per_sm,
        "tensor memory": target.tensor_memory_per_sm // tensor_memory if tensor_memory else target.warps_per_sm,
        "blocks": target.warps_per_sm if target.backend == "hip" and num_warps == 1 else target.blocks_per_sm,
        "warps": target.warps_per_sm // num_warps,
    }
    blocks = min(limits.values())
    # The more useful name wins a tie: a kernel that fills all warp slots is limited by nothing that it could change.
    limiter = next(name for name in ("warps", "blocks", *limits) if limits[name] == blocks)
    if shared > target.shared_per_block or num_warps * target.warp_size > _MAX_THREADS:
        blocks, limiter = 0, "launch"
    return Occupancy(blocks, blocks * num_warps, target.warps_per_sm, limiter)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
