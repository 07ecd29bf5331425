"""Launch tables: how large a tile a program works on, by head dimension, element size and device.

Nothing here was timed. Each entry is the largest of those tried that spills no register on any target of its class
and fits its shared memory (python -m fasttrain_kernels.testing.compiled prints the figures). Three classes of
device, by the shared memory of a program:

    wide    227 KiB, operands read from it (sm_90, sm_100)
    narrow  operands held in registers; tiles fit the 99 KiB of sm_86, sm_89 and sm_120 (sm_80 has more)
    AMD     64 KiB, and twice the lanes per warp

Where tensor cores read registers (narrow; sm_90 beyond 128 features), warps share out the rows of a result, 16 each.
Below 128 rows eight warps repeat the work of each other: half of it at 256 features, where larger tiles spill. Executed
matmuls against needed ones are a column of python -m bench.static.

On sm_100 tensor cores read shared memory through the asynchronous proxy. Triton puts a fence before a matmul, but not
always between it and the wait for what cp.async delivers. The stages here are those for which it does; the rules of
testing.compiled refuse others.

float32 has no tensor cores: a thread holds whole rows of a matmul's operands, which leaves space for few of them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fasttrain_kernels._registration import compute_capability, shared_memory, warps

_LARGE_SHARED_MEMORY = 200_000  # bytes: between sm_80's 163 KiB and sm_90's 227 KiB
_AMD_SHARED_MEMORY = 65_536
_TENSOR_MEMORY = 100  # compute capability of sm_100
_THREADS = 256  # 128 spill almost everywhere: accumulators and operands of a tile fill their registers


class TileConfig(NamedTuple):
    """The rows that a program keeps, the rows that it loads per step, and Triton's launch options."""

    own: int
    step: int
    options: dict[str, int]

    def swapped(self) -> TileConfig:
        return self._replace(own=self.step, step=self.own)


def _tile(q: Tensor, own: int, step: int, num_stages: int = 2) -> TileConfig:
    return TileConfig(own, step, dict(num_warps=warps(_THREADS, q.device), num_stages=num_stages))


def _float32_tile(q: Tensor, block_d: int, own: int) -> TileConfig:
    return _tile(q, own, 32) if block_d <= 64 else _tile(q, 16, 16)


def forward_tile(q: Tensor, block_d: int) -> TileConfig:
    wide = shared_memory(q.device) >= _LARGE_SHARED_MEMORY
    if q.element_size() > 2:
        return _float32_tile(q, block_d, own=64)
    if block_d > 128:
        return _tile(q, 64, 32)
    return _tile(q, 128, 64, 3 if wide or block_d <= 64 else 2)


def query_gradient_tile(q: Tensor, block_d: int, softcap: bool) -> TileConfig:
    """Smaller with a softcap: tanh lives until its derivative is taken, one more tile of registers."""
    wide = shared_memory(q.device) >= _LARGE_SHARED_MEMORY
    if q.element_size() > 2:
        return _float32_tile(q, block_d, own=64)
    if compute_capability(q.device) == _TENSOR_MEMORY:
        return _tile(q, 128, 32 if softcap or block_d > 128 else 64, 1)
    if block_d > 128:
        return _tile(q, 64, 32, 2 if wide else 1)
    if block_d > 64 and not wide:
        return _tile(q, 128, 16 if softcap else 32)
    return _tile(q, 128, 32 if softcap else 64)


def key_gradient_tile(q: Tensor, block_d: int, softcap: bool) -> TileConfig:
    memory, capability = shared_memory(q.device), compute_capability(q.device)
    if q.element_size() > 2:
        if block_d > 128:
            return TileConfig(
                16, 16, dict(num_warps=warps(2 * _THREADS, q.device), num_stages=2)
            )  # 256 spill 8 bytes on sm_90
        return _float32_tile(q, block_d, own=32)
    if capability == _TENSOR_MEMORY:
        return _tile(q, 64 if block_d > 128 else 128, 64 if block_d <= 64 and not softcap else 32, 3)
    if block_d > 128:
        return _tile(q, 32, 16 if memory <= _AMD_SHARED_MEMORY else 32)
    if block_d > 64 and memory <= _AMD_SHARED_MEMORY:
        return _tile(q, 64, 32)
    if block_d > 64 and memory < _LARGE_SHARED_MEMORY:
        return _tile(q, 128, 16, 1 if capability == 120 else 2)  # 2 spill 60 bytes on sm_120
    if block_d > 64:
        return _tile(q, 128, 32)
    return _tile(q, 128, 64 if memory >= _LARGE_SHARED_MEMORY and not softcap else 32)


def one_query_tile(q: Tensor, block_d: int) -> TileConfig:
    """One shape for all kernels, so that their sums over the head dimension are laid out alike."""
    return _tile(q, 1, 4096 // block_d)


def delta_tile(q: Tensor) -> TileConfig:
    """Square matmuls: 64 rows for the instruction that the gradients' matmuls use on sm_90 and sm_100."""
    return TileConfig(64, 64, dict(num_warps=warps(128, q.device), num_stages=1))
