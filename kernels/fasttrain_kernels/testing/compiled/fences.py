"""Matmuls of the asynchronous proxy (wgmma, tcgen05) that may read what cp.async delivered before a proxy fence.

cp.async writes through the generic proxy. Between its wait and a matmul that reads shared memory through descriptors,
PTX demands fence.proxy.async; without it the result depends on timing. This is checked along every path through the
kernel. Which tile a matmul reads is not known here, so each counts that a wait without a fence can reach: kernels
executed by fasttrain_kernels.testing.execute compare the bytes themselves.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.ptx import PtxKernel

_MATMUL = re.compile(r"(wgmma\.mma_async|tcgen05\.mma)\b")


def unfenced_matmuls(ptx: str) -> int:
    """Return how many matmuls can follow cp.async.wait_group without a fence between them."""
    if not _MATMUL.search(ptx) or "cp.async.c" not in ptx:
        return 0
    from fasttrain_kernels.testing.executed.ptx import parse  # with all of its package: few kernels need it

    kernel = parse(ptx)
    late = [False] * len(kernel.code)  # before each instruction, on some path
    waits = [at for at, instruction in enumerate(kernel.code) if instruction.opcode.startswith("cp.async.wait")]
    work = [successor for at in waits for successor in _successors(kernel, at)]
    while work:
        at = work.pop()
        if late[at]:
            continue
        late[at] = True
        instruction = kernel.code[at]
        if not (instruction.opcode.startswith("fence.proxy.async") and instruction.guard is None):
            work += _successors(kernel, at)
    return sum(late[at] for at, instruction in enumerate(kernel.code) if _MATMUL.match(instruction.opcode))


def _successors(kernel: PtxKernel, at: int) -> list[int]:
    instruction, following = kernel.code[at], [at + 1] if at + 1 < len(kernel.code) else []
    if instruction.opcode == "brx.idx":
        return kernel.jump_table(instruction, instruction.operands[1].text)
    if instruction.opcode.split(".")[0] == "bra":
        target = kernel.destination(instruction)
        return [target] if instruction.guard is None else [target, *following]
    return [] if instruction.opcode in ("ret", "exit") and instruction.guard is None else following
