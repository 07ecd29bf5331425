"""A group of lanes that execute together: their registers, where each of them is, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain_kernels.testing.executed.memory import Fault
from fasttrain_kernels.testing.executed.program import FlowKind, TranslatedInstruction
from fasttrain_kernels.testing.executed.ptx import Unsupported
from fasttrain_kernels.testing.executed.tma import BulkStores
from fasttrain_kernels.testing.executed.translate import Mask
from fasttrain_kernels.testing.executed.values import I64, REGISTER, Array
from fasttrain_kernels.testing.executed.wgmma import WgmmaState

if TYPE_CHECKING:
    from fasttrain_kernels.testing.executed.machine import BlockBatch


class Lanes:
    """Whole warps in lock-step, of one block or of several. Lanes that diverge execute in the order of their code."""

    def __init__(self, batch: BlockBatch, lanes: Array) -> None:  # indices into the batch
        program = batch.program
        self.batch, self.program, self.n = batch, program, len(lanes)
        self.shared, self.memory = batch.shared, batch.memory
        self.tensor, self.barriers, self.clocks = batch.tensor, batch.barriers, batch.clocks
        self.params, self.launch, self.options = batch.params, batch.launch, batch.options
        threads = program.kernel.threads
        self.block, thread = np.divmod(lanes, threads)  # within the batch
        self.thread, self.lane, self.warp = thread, thread % 32, thread // 32
        self.every = np.arange(self.n)
        self._warp_of_batch = lanes // 32
        poison = {
            bits: np.full(self.n, self.options.register_poison & ((1 << bits) - 1), dtype)
            for bits, dtype in REGISTER.items()
        }
        self.registers: list[Any] = [poison[bits] for bits in program.bits]

        self.copies: list[tuple[Array, Array, Array, Array, str]] = []  # lanes, offset, values, group, instruction
        self.copy_group = np.zeros(self.n, I64)
        self.stores = BulkStores()
        self.wgmma = WgmmaState()
        self.unready: set[int] = set()  # registers of tcgen05.ld before its wait
        self.undefined: dict[int, Array] = {}  # registers with what was read from memory nobody wrote: which lanes
        self.stalled = False  # asked an mbarrier in vain

        self.counter = np.zeros(self.n, I64)  # the next instruction of each lane
        self.together: int | None = 0  # of all lanes, while they agree
        self.live = np.ones(self.n, np.bool_)
        self.waiting = np.zeros(self.n, np.bool_)  # at a barrier
        self.barrier = (0, 0)  # its number and threads, of specialised warps
        self._parked = np.zeros(self.n, np.bool_)  # before an instruction of the whole warp
        self.set_epoch()

    def set_epoch(self) -> None:
        epoch = self.batch.epoch if self.clocks is None else self.clocks.epoch[self.warp]
        self.who = (self.batch.first + self.block) << 40 | epoch << 8 | self.warp

    # For rules

    def special(self, name: str) -> Array:
        """The value of a special register."""
        key, _, axis = name[1:].partition(".")
        index, grid, blocks = "xyz".index(axis or "x"), self.batch.grid, self.batch.first + self.block
        match key:
            case "tid":
                return self.thread if index == 0 else np.zeros(self.n, I64)
            case "ntid":
                return np.full(self.n, self.program.kernel.threads if index == 0 else 1)
            case "ctaid":
                return np.asarray((blocks % grid[0], blocks // grid[0] % grid[1], blocks // (grid[0] * grid[1]))[index])
            case "nctaid":
                return np.full(self.n, grid[index])
            case "laneid":
                return self.lane
            case "warpid":
                return self.warp
            case "clusterid":
                return blocks % grid[0]
            case "cluster_ctaid" | "cluster_ctarank":
                return np.zeros(self.n, I64)
        raise Unsupported(name)

    def spread(self, values: Array, lanes: Array) -> Array:
        """Values of some lanes as values of all."""
        full = np.zeros(self.n, values.dtype)
        full[lanes] = values
        return full

    def note_banks(self, address: Array, lanes: Array, width: int) -> None:
        if self.batch.banks is not None:
            self.batch.banks.note(address, self._warp_of_batch[lanes], width)

    # Execution

    @property
    def done(self) -> bool:
        return not self.live.any()

    @property
    def blocked(self) -> bool:
        return bool((self.waiting | ~self.live).all())

    def run(self, budget: int | None) -> None:
        """Execute until all lanes wait or have ended, or for so many instructions."""
        self.stalled = False
        counts, steps = self.batch.counts, self.program.steps
        while budget is None or budget > 0:
            at, mask = self._next()
            if at is None:
                break
            if mask is not None and not mask.any():
                continue  # some lanes of a warp are not there yet
            step = steps[at]
            counts[at] += self.n // 32 if mask is None else int(mask.reshape(-1, 32).any(1).sum())
            selected = mask
            if step.guard is not None:
                condition = ~self.registers[step.guard] if step.negated else self.registers[step.guard]
                selected = condition if mask is None else mask & condition
            self._note_early(at)
            if self.undefined:
                self._follow_undefined(at, step, selected)
            if step.execute is not None:
                step.execute(self, selected)
                if mask is None:
                    self.together = at + 1
                else:
                    self.counter[mask] = at + 1
            else:
                self._control(at, mask, selected)
            if self.stalled:
                break
            if budget is not None:
                budget -= 1

    def _next(self) -> tuple[int | None, Mask]:
        """The next instruction, and the lanes that execute it."""
        if self.together is not None:
            return self.together, None
        able = self.live & ~self.waiting
        if not able.any():
            return None, None
        moving = able & ~self._parked
        if not moving.any():
            raise Fault("lanes of a warp wait for each other at different instructions")
        at = int(self.counter[moving].min())
        mask = able & (self.counter == at)
        if mask.all():
            self.together = at
            self._parked[:] = False
            return at, None
        if self.program.steps[at].kind in (FlowKind.WARP, FlowKind.ALL):
            whole = np.repeat((mask == self.live).reshape(-1, 32).all(1), 32)
            if self.program.steps[at].kind is FlowKind.ALL and not whole.all():
                whole[:] = False
            self._parked = (self._parked & ~(mask & whole)) | (mask & ~whole)
            mask = mask & whole
        return at, mask

    def _control(self, at: int, mask: Mask, selected: Mask) -> None:
        step = self.program.steps[at]
        if mask is None and step.kind is FlowKind.BRANCH:
            if selected is None or selected.all():
                self.together = step.target
                return
            if not selected.any():
                self.together = at + 1
                return
        if mask is None:
            self.counter[:] = at + 1
            self.together, mask = None, np.ones(self.n, np.bool_)
        else:
            self.counter[mask] = at + 1
        selected = mask if selected is None else selected
        match step.kind:
            case FlowKind.BRANCH:
                self.counter[selected] = step.target
            case FlowKind.SWITCH:
                assert step.table is not None
                index = self.registers[step.target][selected]
                if (index >= len(step.table)).any():
                    raise Fault(f"{self.program.kernel.code[at]}: jumps behind its table")
                self.counter[selected] = step.table[index]
            case FlowKind.BARRIER:
                self.waiting |= selected
                assert step.barrier is not None
                number = step.barrier.number
                if step.barrier.register is not None:
                    number = int(self.registers[step.barrier.register][selected][0])
                self.barrier = number, step.barrier.threads
            case FlowKind.END:
                self.live &= ~selected

    def _note_early(self, at: int) -> None:
        """Count instructions that touch what an asynchronous one still reads or writes. A mov only renames."""
        step = self.program.steps[at]
        if self.unready and not self.unready.isdisjoint(step.sources):
            if step.moves:
                self.unready |= step.targets
            else:
                self.launch.early[f"reads what tcgen05.ld loads: {self.program.kernel.code[at]}"] += 1
        if self.wgmma.operands and not self.wgmma.operands.isdisjoint(step.targets):
            self.launch.early[f"overwrites an operand of wgmma: {self.program.kernel.code[at]}"] += 1
        if self.wgmma.results and step.kind is not FlowKind.ALL and not step.sources.isdisjoint(self.wgmma.results):
            self.launch.early[f"reads a result of wgmma: {self.program.kernel.code[at]}"] += 1

    # Undefined values are followed through registers and memory, and reported where they decide something: pipelined
    # loops load ahead, and compute with, what a selp or a guard drops. A branch is not reported: both ways may do so.

    def undefined_in(self, slots: Iterable[int]) -> Array | None:
        """The lanes in which one of the registers is undefined."""
        found = [self.undefined[slot] for slot in slots if slot in self.undefined]
        return np.logical_or.reduce(found) if found else None

    def set_undefined(self, slots: Iterable[int], lanes: Array) -> None:
        """Mark registers that have just been loaded from memory nobody wrote."""
        for slot in slots:
            self.undefined[slot] = self.undefined.get(slot, False) | lanes

    def _undefined_selection(self, a: int | None, b: int | None, predicate: int) -> Array:
        """The lanes in which the selected one of two values is undefined."""
        none = np.zeros(self.n, np.bool_)
        of_a, of_b = (none if slot is None else self.undefined.get(slot, none) for slot in (a, b))
        return np.where(self.registers[predicate], of_a, of_b) | self.undefined.get(predicate, none)

    def _follow_undefined(self, at: int, step: TranslatedInstruction, selected: Mask) -> None:
        used = self.undefined_in(step.sources)
        if used is not None and step.select:
            used = self._undefined_selection(*step.select)
        if used is not None and selected is not None:
            used = used & selected
        if used is not None and step.kind in (FlowKind.WARP, FlowKind.ALL):
            used = np.repeat(used.reshape(-1, 32).any(1), 32)
        guard = self.undefined.get(step.guard) if step.guard is not None and step.kind is not FlowKind.BRANCH else None
        wrong = 0 if guard is None else int(guard.sum())
        if (critical := self.undefined_in(step.critical)) is not None:
            wrong += int((critical if selected is None else critical & selected).sum())
        if wrong:
            self.launch.uninitialised[f"{self.program.kernel.code[at]} uses it"] += wrong
        for slot in step.targets:
            before = self.undefined.get(slot)
            now = np.zeros(self.n, np.bool_) if used is None else used
            if selected is not None and before is not None:
                now = now | (before & ~selected)
            if now.any():
                self.undefined[slot] = now
            elif before is not None:
                del self.undefined[slot]

    def release(self) -> None:
        """Pass the barrier."""
        self.waiting[:] = False
        if self.live.all() and (self.counter == self.counter[0]).all():
            self.together = int(self.counter[0])
