"""What torch's caching allocator takes of a GPU: its rules, played through the tensors of the first steps.

It never gives back what it took. Freed memory serves only tensors of the same stream that fit in one place, so a run
takes up to a third more than its tensors (tests/fasttrain/tools/plan/reserved.toml). The scripts below are what
torch.cuda.memory._record_memory_history shows of a run on the null GPU: +x comes, -x goes, *x comes and goes, =x comes
once and stays, !x is added to the gradients of earlier micro-batches. w_x is the gradient of a weight, d_x of the rest.
"""

import itertools
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from typing import Any

from fasttrain.optimizers import BATCH

MIB = 2**20
WORKSPACE = 32 * MIB  # of cuBLAS, for each thread: torch's default from Hopper on (8 MiB before)
SMS = 132  # of an H100: a norm's backward has a row of partial sums for each
MICRO_BATCHES, STEPS = 3, 4  # that are played: later ones repeat
MARGIN, SMALL = 0.01, 16 * MIB  # for what is not played: norms' gradients, scalars, samples
ITERATIONS = 5  # of Muon
PIECE = 2**24  # elements of float32 gradients that are one tensor: fasttrain.distributed.unsharded
ORDER = 0.02  # for the order in which a compiled graph makes and frees what it works on
_GATHER, _REDUCE = 1, 2  # FSDP's streams

_ATTEND, _FEED = "+qkv =cublas +q +k +o +lse", "+out +n1 +r1 +gu +act"
_FORWARD = {
    "none": f"{_ATTEND} {_FEED} +down -act +n2 +r2 -out -down",
    "selective": f"{_ATTEND} {_FEED} +down -act +n2 +r2 -n1 -r1 -q -k",
    "full": f"{_ATTEND} -lse {_FEED} -gu +down -act +n2 +r2 -n1 -r1 -q -k -out -down -o -qkv",
}
_AGAIN = {
    "none": "",
    "selective": "+q +k +n1 +r1 *act +n2 +r2 -n2 -out -down",
    "full": f"{_ATTEND} {_FEED} +down -act +n2 +r2 -n2 -out -down",
}
_SAVED = ("x", "qkv", "q", "k", "o", "lse", "out", "n1", "r1", "gu", "down")
_BACKWARD = (
    "+d_r2 *sums -d_r -d -r2 +d_act =cublas_backward +act +d_gu -d_act +w_down -act -gu !w_down +w_gate_up +d_n1 "
    "!w_gate_up -d_gu -n1 +d_r *sums -d_r2 -d_n1 -r1 +w_out +d_o !w_out +d_q +d_k +d_v *lse -d_o -q -k -o -lse"
)
_TO_QKV = "+d_q2 +d_k2 -d_k -d_q -qkv +d_qkv -d_q2 -d_k2 -d_v +w_qkv +d !w_qkv -d_qkv -r -x"
_START = "+cos +sin +angle +cos2 +sin2 -angle -cos -sin +drawn +drawn2 -drawn -drawn2"


class Allocator:
    """CUDACachingAllocator: best fit among the free blocks of a stream, small ones apart; split and merged."""

    def __init__(self) -> None:
        self.reserved = self._top = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)  # (size, address), in order
        self._starts: dict[int, int] = {}  # of free blocks, the size by address, and by the address after them
        self._ends: dict[int, int] = {}
        self._taken: dict[int, tuple[int, tuple[int, bool]]] = {}

    def new(self, size: float, stream: int = 0) -> int:
        """The address."""
        size = max(-(-int(size) // 512) * 512, 512)
        small = size <= MIB
        pool = self._free[stream, small]
        if (at := bisect_left(pool, (size, 0))) < len(pool):
            found, address = pool.pop(at)
            del self._starts[address], self._ends[address + found]
        else:
            found = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            address = self._top
            self.reserved += found
            self._top += found + 512  # segments never merge
        if found - size >= (512 if small else MIB + 1):
            self._put(pool, found - size, address + size)
            found = size
        self._taken[address] = found, (stream, small)
        return address

    def free(self, *addresses: int) -> None:
        for address in addresses:
            size, key = self._taken.pop(address)
            pool = self._free[key]
            if after := self._starts.pop(address + size, 0):
                del self._ends[address + size + after], pool[bisect_left(pool, (after, address + size))]
                size += after
            if before := self._ends.pop(address, 0):
                address -= before
                del self._starts[address], pool[bisect_left(pool, (before, address))]
                size += before
            self._put(pool, size, address)

    def _put(self, pool: list[tuple[int, int]], size: int, address: int) -> None:
        insort(pool, (size, address))
        self._starts[address] = self._ends[address + size] = size


def reserved(step: Any) -> int:
    """Bytes that the allocator takes in all; of a _StepMemory (memory.py). Once steps take no more, it is enough."""
    run, before = _Steps(step), -1
    for _ in range(STEPS):
        if run.at.reserved != before:
            before = run.at.reserved
            run.step()
    run.validate()
    margin = MARGIN + ORDER * (step.parallel.compile != "off")
    return int((1 + margin) * run.at.reserved) + SMALL


class _Steps:
    """The tensors of a rank by name, and each unit's: the root's are number 0, those of blocks follow."""

    def __init__(self, s: Any) -> None:
        self.s, self.at, self.now, self.saved = s, Allocator(), dict[str, int](), list[dict[str, int]]()
        M, C, D = s.M * s.a, s.M * s.a * s.C, 4 * s.model.head_dim * s.model.qk_norm
        H, K, F, head, drawn = M * s.H, M * s.K, M * s.F, s.vocab * s.C, 4 * 128 * s.F
        block = {"w_qkv": s.C * (s.H + 2 * s.K), "w_out": s.C * s.H, "w_gate_up": 2 * s.C * s.F, "w_down": s.C * s.F}
        root = {"w_table": head} | ({} if s.model.tied_head else {"w_head": head})
        blocks = [range(l + 1, min(l + s.length, s.L) + 1) for l in range(0, s.L, s.length)]
        self.units = [root, *({f"{name} {l}": block[name] for l in unit for name in block} for unit in blocks)]
        self.norms = [s.C, *(len(unit) * (2 * s.C + D // 2) for unit in blocks)]
        self.first, self.last = ({unit[end]: n for n, unit in enumerate(blocks, 1)} for end in (0, -1))
        self.sizes = {
            **dict.fromkeys(("x", "r", "n1", "r1", "n2", "r2", "out", "down", "d", "d_r", "d_r2", "d_n1", "e"), C),
            **dict.fromkeys(("q", "o", "d_o", "d_q", "d_q2"), H), **dict.fromkeys(("k", "d_k", "d_v", "d_k2"), K),
            "qkv": H + 2 * K, "d_qkv": H + 2 * K, "gu": 2 * F, "d_gu": 2 * F, "act": F, "d_act": F,
            "lse": 4 * s.model.heads * s.M, "sums": 4 * SMS * s.C, "cublas": WORKSPACE, "cublas_backward": WORKSPACE,
            **{name: s.a * size for name, size in (root | block).items()}, "w_head": s.a * head,
            **dict.fromkeys(("cos", "sin", "angle", "cos2", "sin2"), s.table / 2),
            "drawn": drawn, "drawn2": drawn, "batch": 32 * s.M, "d_wide": 4 * s.M * s.C, "wide": 4 * head,
            "segments": 4 * s.C * (s.M // 10 + min(s.M, s.vocab)),
            "logits": s.chunk.tokens * (-(-s.vocab // 16) * 16) * s.a,
            "stats": s.stats.tokens * (-(-s.vocab // 16) * 16) * 4,
            "norms": 4 * sum(map(len, self.units)) * -(-head // (s.S * 65536)),
        }  # fmt: skip
        self.adds, self.once = False, s.parallel.reshard_after_forward
        self.grads, self.gathered, self.stateless = dict[int, list[int]](), set[int](), True
        for number in range(len(self.units)):
            self._all(number, 4 / s.S)
        self._play(_START)

    def step(self) -> None:
        s = self.s
        last = min(max(s.batch.sequences // (s.batch.micro * s.dp_size), 1), MICRO_BATCHES)
        for number in range(last):
            self.adds = number > 0
            self._micro_batch(last=number == last - 1)
        self._play("*norms")
        if self.stateless:
            for number in range(len(self.units)):
                self._all(number, 4 / s.S, copies=(s.S > 1) if s.muon and number else 2)
        if s.muon and s.S == 1:
            self._muon()
        elif s.muon:
            self.at.free(*[self.at.new(s.update / 4) for _ in range(4)])  # a batch, and what it becomes
        self.stateless = False
        for number in sorted(self.grads):
            self.at.free(*self.grads.pop(number))

    def _muon(self) -> None:
        """fasttrain.optim.muon on whole matrices: batch by batch, and in each all of a shape."""
        s, at, previous = self.s, self.at, list[int]()
        block = [([s.H, s.K, s.K], s.C), ([s.C], s.H), ([s.F, s.F], s.C), ([s.C], s.F)]
        left = sorted(block * s.L, key=lambda matrix: -sum(matrix[0]) * matrix[1])
        while left:
            count = max(BATCH // (sum(left[0][0]) * left[0][1]), 1)
            batch, left = left[:count], left[count:]
            sizes = [4 * sum(rows) * columns for rows, columns in batch]
            for size in sizes if self.stateless else ():
                at.new(size)
            ahead = [at.new(size) for size in sizes]
            shards = at.new(sum(sizes) / 2)
            at.free(*ahead, *previous)
            for (rows, columns), number in Counter((n, width) for heights, width in batch for n in heights).items():
                whole, gram = 2 * number * rows * columns, 2 * number * min(rows, columns) ** 2
                stack = [at.new(whole)] if number > 1 else []
                x, products = at.new(whole), list[int]()
                for _ in range(ITERATIONS):
                    for _ in range(2):
                        products.append(at.new(gram))
                        at.free(*(products.pop(0) for _ in products[2:]))
                    after = at.new(whole)
                    at.free(x)
                    x = after
                at.free(*products)
                at.free(x, *([at.new(whole)] if rows > columns else []), *stack)
            at.free(*[at.new(size) for size in sizes])
            previous = [shards]
        at.free(*previous)

    def validate(self) -> None:
        """Forward alone, and logits in float32."""
        self._gather(0)
        self._play("+r +x")
        for l in range(1, self.s.L + 1):
            self._gather(self.first.get(l))
            self._play(f"{_FORWARD['full']} -x -r")
            self._move("n2", "x")
            self._move("r2", "r")
            if self.once:
                self._release(self.last.get(l))
        self._play("-r +stats -stats -x -gather")
        self._release(0)

    def _play(self, script: str) -> None:
        now, sizes, at = self.now, self.sizes, self.at
        for token in script.split():
            name = token[1:]
            if token[0] == "+" or (token[0] == "=" and name not in now):
                now[name] = at.new(sizes[name])
            elif token[0] == "*":
                at.free(at.new(sizes[name]))
            elif (token[0] == "-" or (token[0] == "!" and self.adds and not self.s.moves)) and name in now:
                at.free(now.pop(name))

    def _hold(self, name: str, size: float, stream: int = 0) -> None:
        self.now[name] = self.at.new(size, stream)

    def _drop(self, *names: str) -> None:
        self.at.free(*(self.now.pop(name) for name in names if name in self.now))

    def _move(self, old: str, new: str) -> None:
        if old in self.now:
            self.now[new] = self.now.pop(old)

    def _all(self, number: int, itemsize: float, copies: int = 1) -> None:
        for size in (*self.units[number].values(), self.norms[number]):
            for _ in range(copies):
                self.at.new(itemsize * size)

    def _micro_batch(self, *, last: bool) -> None:
        s, rows = self.s, self.s.parallel.recompute
        if s.cast and "copies" not in self.now:
            self.now["copies"] = 0
            for number in range(len(self.units)):
                self._all(number, s.a)
        self._play("+batch")
        self._gather(0)
        self._play("+r +x")
        for l in range(1, s.L + 1):
            self._gather(self.first.get(l))
            self._play(_FORWARD[rows])
            names = (*_SAVED, "r2" if rows == "none" else "r")
            self.saved.append({name: self.now.pop(name) for name in names if name in self.now})
            self._move("n2", "x")
            self._move("r" if rows == "none" else "r2", "embedded" if rows == "none" else "r")
            if self.once:
                self._release(self.last.get(l))
        wide = "w_head" if s.one_chunk or s.a == 4 else "wide"
        self._play(f"{'' if rows == 'none' else '-r'} +d_wide +{wide} +logits -logits -x -gather")
        self._play(f"+d {'+w_head' if wide == 'wide' else ''} -d_wide -wide" if s.a < 4 else "")
        self._move("d_wide", "d")
        for l in range(s.L, 0, -1):
            if self.once:
                self._gather(self.last.get(l), backward=True)
            self.now |= self.saved.pop()
            self._play(f"{_AGAIN[rows]} {_BACKWARD} {'' if s.model.qk_norm else '-qkv'} {_TO_QKV}")
            for name in ("w_qkv", "w_out", "w_gate_up", "w_down"):
                self._move(name, f"{name} {l}")
            if last or self.once:
                self._release(self.first.get(l))
            self._gradients(self.first.get(l), last)
        self._play(f"+e *sums -d_r -d -embedded -r +w_table *segments -e {'-w_table' if s.model.tied_head else ''}")
        if s.model.tied_head:
            self._move("w_head", "w_table")
        if last or self.once:
            self._release(0)
        self._gradients(0, last)
        self._drop("reduced", "batch")

    def _gather(self, number: int | None, *, backward: bool = False) -> None:
        """A unit's low-precision weights; between ranks through a buffer, in backward one that was filled before."""
        s = self.s
        if number is None or not s.gathers or number in self.gathered:
            return
        unit = self.units[number]
        self.gathered.add(number)
        size = s.a * (sum(unit.values()) + self.norms[number])
        if s.S > 1 and not (backward and "gather" in self.now):
            self._move("gather", "gathered")
            self._fill(size)
        for name, elements in unit.items():
            if s.S == 1:
                self._hold("cast", s.a * elements)
                self._drop("cast before")
                self._move("cast", "cast before")
            self._hold(f"{number} {name}", s.a * elements)
        self._drop("cast before", "gathered", *(["gather"] if backward else []))
        if s.S > 1 and backward and number > 1:
            self._fill(size)

    def _fill(self, size: float) -> None:
        self._hold("shard", size / self.s.S, _GATHER)
        self._hold("gather", size, _GATHER)
        self._drop("shard")

    def _release(self, number: int | None) -> None:
        if number is not None:
            self.gathered.discard(number)
            self._drop(*(f"{number} {name}" for name in self.units[number]))

    def _gradients(self, number: int | None, last: bool) -> None:
        """A unit's are complete: kept, added to earlier ones, or reduced."""
        if number is None:
            return
        s, unit, every = self.s, self.units[number], self.s.parallel.grad_reduce == "every"
        if s.one_graph:
            if number:
                return
            unit = {name: size for each in self.units for name, size in each.items()}
        held = self.grads.setdefault(number, [])
        if not s.moves:
            held += [] if self.adds else [self.now.pop(name) for name in unit]
            self._drop(*unit)
        elif not s.gathers:
            new, piece = list[int](), 0
            norms = {"w_table": self.norms[0], "w_qkv": 2 * s.C + 2 * s.model.head_dim * s.model.qk_norm}
            sizes = [(norms.get(name.partition(" ")[0], 0), size) for name, size in unit.items()]
            for size in (*itertools.chain(*sizes), 2 * PIECE):  # the last one ends a piece
                if piece and piece + size > PIECE:
                    new.append(self.at.new(4 * piece))
                    piece = 0
                piece += size
            self._drop(*unit)
            if self.adds:
                self.at.free(*reversed(new))
            else:
                held += new
        elif not (last or every):
            for name, size in unit.items():
                held += [] if self.adds else [self.at.new(4 * size)]
                self._drop(name)
        else:
            whole = 4 * (sum(unit.values()) + self.norms[number])
            self._drop(*(unit if held and not every else ()), "reduced")
            self._hold("reduced", whole)
            self.at.free(self.at.new(whole / 256 / s.S))
            self._drop(*reversed(unit))
            if not every:
                self.at.free(*reversed(held))
                held.clear()
            held.append(self.at.new(whole / s.S, _REDUCE))
            if s.S == 1:
                self.at.free(self.at.new(whole, _REDUCE))
            self.at.free(*(held.pop() for _ in held[1:]))
