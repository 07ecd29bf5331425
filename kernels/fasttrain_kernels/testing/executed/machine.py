"""Execution of a launch: batches of blocks, barriers, and the order in which warps are scheduled.

lockstep   all warps of a block, and of several blocks, execute an instruction together: the fastest
forward    one warp runs until it waits for the others, then the next; reverse: from the last warp
random     a random warp runs for a random number of instructions
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from fasttrain_kernels.testing.executed.conflicts import ConflictCounter
from fasttrain_kernels.testing.executed.lanes import Lanes
from fasttrain_kernels.testing.executed.launches import ExecutedLaunch
from fasttrain_kernels.testing.executed.mbarriers import Mbarriers
from fasttrain_kernels.testing.executed.memory import Fault, GlobalArena, SharedMemory
from fasttrain_kernels.testing.executed.program import ExecutableKernel
from fasttrain_kernels.testing.executed.specialised import ClockedHazards, WarpClocks, pass_barriers
from fasttrain_kernels.testing.executed.tcgen05 import TensorMemory
from fasttrain_kernels.testing.executed.values import I64

SCHEDULES = ("lockstep", "forward", "reverse", "random")
_LANES = 2048  # of a batch
_LONGEST_TURN = 400  # instructions


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """What hardware leaves undefined, and what is checked."""

    schedule: str = "lockstep"
    seed: int = 0  # of the random schedule
    worst_case: bool = False  # approximations have the largest error that the PTX manual allows
    early: bool = False  # tcgen05 matmuls are formed when issued, not when waited for
    first_wins: bool = False  # of lanes of a warp that store different values to one address; or the last
    races: bool = True
    bank_conflicts: bool = True
    shared_poison: int = 0xA5
    register_poison: int = 0xDEADBEEFDEADBEEF

    def poisoned(self, byte: int) -> ExecutionOptions:
        """Uninitialised shared memory and registers hold this byte."""
        return replace(self, shared_poison=byte, register_poison=int.from_bytes(bytes([byte]) * 8, "little"))


class Machine:
    """A kernel with its memory, launched once."""

    def __init__(
        self, program: ExecutableKernel, memory: GlobalArena, shared_bytes: int, options: ExecutionOptions
    ) -> None:
        self.program, self.memory, self.shared_bytes, self.options = program, memory, shared_bytes, options
        self.report = ExecutedLaunch(program.kernel.name, threads=program.kernel.threads)
        self.counts = np.zeros(len(program.steps), I64)
        self.banks = ConflictCounter() if options.bank_conflicts else None
        self.random = np.random.default_rng(options.seed)

    def launch(self, grid: tuple[int, int, int], params: dict[str, int]) -> ExecutedLaunch:
        started, report = time.perf_counter(), self.report
        report.grid = grid
        blocks = grid[0] * grid[1] * grid[2]
        size = 1 if self.program.one_block else max(1, _LANES // self.program.kernel.threads)
        with np.errstate(all="ignore"):  # infinities, NaN and wrapping integers are as silent as on the GPU
            for first in range(0, blocks, size):
                BlockBatch(self, grid, params, first, min(size, blocks - first)).run()
        for instruction, count in zip(self.program.kernel.code, self.counts.tolist(), strict=True):
            if count:
                report.opcodes[instruction.opcode] += count
        report.collisions.update(self.memory.collisions)
        if self.banks is not None:
            report.bank_accesses, report.bank_conflicts = self.banks.accesses, self.banks.conflicts
        report.seconds = time.perf_counter() - started
        return report


class BlockBatch:
    """Blocks that execute at the same time."""

    def __init__(
        self, machine: Machine, grid: tuple[int, int, int], params: dict[str, int], first: int, blocks: int
    ) -> None:
        self.program, self.memory, self.options = machine.program, machine.memory, machine.options
        self.grid, self.params, self.first, self.epoch = grid, params, first, 1
        self.launch, self.counts, self.banks, self.random = (
            machine.report,
            machine.counts,
            machine.banks,
            machine.random,
        )
        options, threads = self.options, self.program.kernel.threads
        self.shared = SharedMemory(
            machine.shared_bytes, blocks, self.program.granule, races=options.races, first_wins=options.first_wins,
            poison=options.shared_poison,
        )  # fmt: skip
        self.clocks = WarpClocks(threads // 32) if self.program.specialised else None
        if self.clocks is not None and self.shared.hazards is not None:
            self.shared.hazards = ClockedHazards(len(self.shared.hazards.written), self.clocks)
        self.barriers = Mbarriers()
        self.tensor = TensorMemory(blocks, self.barriers, early=options.early)
        lanes = np.arange(blocks * threads)
        warp = lanes % threads // 32
        together = options.schedule == "lockstep" and not self.program.specialised
        self.groups = (
            [Lanes(self, lanes)] if together else [Lanes(self, lanes[warp == w]) for w in range(threads // 32)]
        )

    def run(self) -> None:
        while not all(group.done for group in self.groups):
            if self.clocks is not None and pass_barriers(self.groups, self.clocks):
                continue
            able = [group for group in self.groups if not group.blocked]
            if able:
                self._schedule(able)
            elif self.clocks is not None:
                raise Fault("warps wait at barriers that others never reach")
            else:
                self._pass_barrier()
        for finding in (*self.tensor.unfinished(), *self.barriers.unfinished()):
            self.launch.unfinished[finding] += 1
        if any(group.copies or group.stores.unfinished for group in self.groups):
            self.launch.unfinished["ends with asynchronous copies that nobody waited for"] += 1
        self.launch.uninitialised.update(self.shared.uninitialised + self.tensor.uninitialised)
        self.launch.unfenced.update(self.shared.unfenced)
        self.launch.collisions.update(self.shared.collisions)

    def _schedule(self, able: list[Lanes]) -> None:
        ready = [group for group in able if not group.stalled]
        if not ready:  # all have asked in vain: some may have an answer by now
            ready = able
            for group in able:
                group.stalled = False
        if self.options.schedule == "random":
            group = ready[self.random.integers(len(ready))]
            group.run(int(self.random.integers(1, _LONGEST_TURN)))
        else:
            group = ready[-1 if self.options.schedule == "reverse" else 0]
            group.run(None)
        if not group.stalled:
            for other in self.groups:
                other.stalled = False

    def _pass_barrier(self) -> None:
        """All lanes of a block have to wait at the same barrier."""
        block = np.concatenate([group.block[group.live] for group in self.groups])
        counter = np.concatenate([group.counter[group.live] for group in self.groups])
        for one in np.unique(block):
            here = counter[block == one]
            if (here != here[0]).any():
                at = ", ".join(str(self.program.kernel.code[i - 1]) for i in np.unique(here))
                raise Fault(f"block {self.first + one}: lanes wait at different barriers: {at}")
            if len(here) != self.program.kernel.threads:
                at = str(self.program.kernel.code[here[0] - 1])
                raise Fault(f"block {self.first + one}: some lanes have ended, others wait: {at}")
        self.epoch += 1
        for group in self.groups:
            group.set_epoch()
            group.release()
