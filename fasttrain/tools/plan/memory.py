"""The memory of a rank through a step, in closed form, by part and by moment.

What a block keeps for its backward, per token, is what the ops of fasttrain_kernels save (elements of the compute
dtype; letters as in fasttrain.model, K kv_heads):

    qkv's input C, its output (H + 2K) D; rotated queries and keys (H + K) D; attention's output H D
    two residual streams 2 C (a norm saves the sum that it makes, and 4 bytes of its rstd); gate_up's input C
    gate_up's output 2 F, on a CPU swiglu's output F                             in all  4 C + 3 (H + K) D + 2 F

Recomputed blocks keep their two inputs; selective ones the outputs of matmuls and attention too. Backward goes
through a block's ops from the last to the first; it holds most where swiglu's gradients are made (their 3 F beside the
2 F that they are made of, on a GPU its output again), or at the end, when all gradients of its weights are there.

FSDP holds, beside the shards: the root's weights gathered, all through forward and backward; the block at work and the
next one; in backward the fp32 gradients of the block before, on their way. Tests hold all this against torch's own
FSDPMemTracker (tests/fasttrain/tools/plan/tracked.py), and against the peak of real steps on a CPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from fasttrain import config
from fasttrain.flops import num_parameters, optimizer_bytes
from fasttrain.optimizers import BATCH, OPTIMIZERS
from fasttrain.tools.plan.allocator import reserved
from fasttrain_kernels import LossChunk, loss_chunk

PARTS = ("parameters", "gradients", "optimizer", "activations", "loss", "fsdp", "runtime")
Loss = Literal["linear", "plain"]

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
# Of a process on a GPU, outside of torch's allocator, and so assumed: its context and loaded kernels (nvidia-smi shows
# 0.4 to 0.6 GiB for a process that has done nothing yet); NCCL's buffers where there are other ranks
CONTEXT = 0.55 * 2**30
COLLECTIVES = 0.75 * 2**30
# On a CPU, what counts is the memory that a process has ever touched: beyond loading the trainer, threads, tokenizer
# and buffers of the files take so much, and the heap of glibc, which keeps what is freed, this share of all tensors
# (bench/test_plan.py measures both)
CPU_PROCESS = 85 * 2**20
CPU_HEAP = 0.27
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes that a rank holds at one point of a step, by part."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """A step's moments, in their order: the tensors at once, the runtime's share when somebody asks for it."""

    tensors: tuple[Moment, ...]
    process: float  # bytes that are no tensors', on a GPU: assumed
    beside: Callable[[], float]  # what the allocator, or the heap, holds beside the tensors of the peak

    @property
    def least(self) -> float:
        """Bytes of the tensors alone, in a moment; all else comes on top."""
        return self.process + max(moment.total for moment in self.tensors)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        runtime = self.process + self.beside()
        return tuple(replace(m, parts=m.parts | {"runtime": runtime}) for m in self.tensors)

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def bytes(self) -> float:
        return self.peak.total

    def fits(self, limit: float) -> bool:
        """The allocator is played only where that can matter: it never took half as much again as the tensors."""
        return self.least <= limit and (2 * self.least <= limit or self.bytes <= limit)


def memory(
    settings: config.Config,
    *,
    vocab: int,
    dp_size: int = 1,
    device: str = "cuda",
    loss: Loss = "linear",
    compiled: bool = True,
    process: float | None = None,  # bytes of a process that has loaded the trainer; None: of a GPU's; 0: tensors alone
) -> MemoryEstimate:
    """The memory of one rank. `loss` plain: whole logits, their log-softmax and its gradient, as without our kernel."""
    step = _StepMemory(settings, vocab, dp_size, device, loss, compiled)
    tensors = tuple(step.moments())
    most = max(moment.total for moment in tensors)

    def beside() -> float:
        if process == 0:
            return 0.0
        if device == "cpu":
            return CPU_PROCESS + CPU_HEAP * most
        if loss == "linear":
            return reserved(step) - most
        return memory(settings, vocab=vocab, dp_size=dp_size).beside()

    if process is None:
        process = CONTEXT + (COLLECTIVES if dp_size > 1 else 0)
    return MemoryEstimate(tensors=tensors, process=process, beside=beside)


def precision_of(parallel: config.ParallelConfig, *, cpu: bool = False) -> str:
    """As a run decides it."""
    return parallel.precision if parallel.precision != "auto" else "fp32" if cpu else "bf16"


def planned_chunk(
    tokens: int, hidden: int, vocab: int, *, precision: str, device: str, stats: bool = False
) -> LossChunk:
    """The tokens whose logits exist at a time, as the loss will split them; stats: of a validation."""
    dtype, cuda = _DTYPES[precision], device == "cuda"
    return loss_chunk(tokens, hidden, vocab, dtype=dtype, use_triton=cuda, need_dweight=not stats, stats=stats)


class _StepMemory:
    """Bytes of everything, and the moments that they add up to."""

    def __init__(
        self, settings: config.Config, vocab: int, dp_size: int, device: str, loss: Loss, compiled: bool
    ) -> None:
        precision = precision_of(settings.parallel, cpu=device == "cpu")
        model, parallel, batch = settings.model, settings.parallel, settings.batch
        self.model, self.parallel, self.device, self.vocab = model, parallel, device, vocab
        self.batch, self.dp_size, self.muon = batch, dp_size, settings.optim.kind == "muon"
        self.plain = loss == "plain"
        self.a = ITEMSIZE[precision]
        self.M, self.L, self.C, self.F = batch.micro * settings.data.sequence, model.layers, model.hidden, model.ffn
        self.H, self.K = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.lse = 4 * model.heads * (2 if self.a == 4 and device == "cpu" else 1)  # bytes of a token
        self.act = self.F if device == "cpu" else 0  # swiglu's output, where it is kept; and beside its gradients:
        self.intermediate = self.F if device != "cpu" else 0 if compiled else 3 * self.F  # of the CPU implementation
        # As fasttrain.distributed.parallelize has it: FSDP's shards of units, or whole weights, with copies in another
        # precision. Only gradients of a single fp32 rank are where they are used as soon as they are there.
        counts = num_parameters(model, vocab)
        self.P, self.P_block, self.P_root = counts.total, counts.blocks // model.layers, counts.total - counts.blocks
        self.gathers = parallel.shards(dp_size, counts.total, device, precision=precision)
        self.S = max(dp_size // parallel.replicate_groups(dp_size, counts.total, device), 1) if self.gathers else 1
        self.cast = not self.gathers and precision != "fp32"
        self.one_graph = self.cast and dp_size == 1 and parallel.compile != "off"
        self.moves = dp_size > 1 or precision != "fp32"
        self.length = config.unit_blocks(self.L, self.a * self.P_block, device) if self.moves else 1
        self.head = self.a * vocab * model.hidden  # the gradient of the head, there from the backward of the loss on
        self.states = optimizer_bytes(model, vocab, settings.optim.kind)
        matrix = 2 * self.C * self.F  # the largest, and how many of them a batch has
        count = max(min(BATCH // matrix, self.L // self.S), 1) if device == "cuda" else 1
        whole = OPTIMIZERS[settings.optim.kind].whole_matrices * (1.5 if self.S > 1 else 1)
        self.update = whole * count * matrix * self.a
        self.chunk = planned_chunk(self.M, self.C, vocab, precision=precision, device=device)
        self.stats = planned_chunk(self.M, self.C, vocab, precision=precision, device=device, stats=True)
        # Whether the head's gradient is no fp32 sum of chunks: it is in bf16 at once, and multiplied in hardware
        self.one_chunk = self.chunk.dweight_dtype == "bfloat16"
        self.table = 4 * model.head_dim * settings.data.sequence  # cosines and sines
        # FSDP: the root's weights, a block's, and all those that are not given back after their forward
        low = self.a * (self.gathers or self.cast)
        self.root, self.block = low * self.P_root, low * self.P_block
        self.kept = 0.0 if parallel.reshard_after_forward and not self.cast else self.block * self.L
        # Gradients of earlier micro-batches: whole in fp32, or their shards where every micro-batch reduces
        several = batch.sequences // (batch.micro * dp_size) > 1
        self.accumulated = several * 4 * self.P / (1 if parallel.grad_reduce == "last" else self.S)

    @property
    def block_saved(self) -> float:
        """Bytes that a block keeps between its forward and its backward."""
        a, C, H, K, F = self.a, self.C, self.H, self.K, self.F
        if self.parallel.recompute == "full":
            return self.M * (a * 2 * C)
        if self.parallel.recompute == "selective":
            return self.M * (a * (4 * C + 2 * H + 2 * K + 2 * F) + self.lse)
        masks = 2 * C if self.model.dropout > 0 else 0
        return self.M * (a * (4 * C + 3 * (H + K) + 2 * F + self.act) + self.lse + 8 + masks)

    def moments(self) -> Iterator[Moment]:
        L, stream = self.L, self.M * self.a * self.C
        # The batch, and the embedding's output, which the first norm saves; a recomputed first block keeps it anyway
        below = 3 * 8 * self.M + 4 * self.M + (stream if self.parallel.recompute == "none" else 0)
        at_work: float = self.M * self.a * (3 * self.C + 3 * self.F)  # at a block's last matmul
        if self.parallel.recompute != "full":
            at_work = max(self.block_saved + self.M * self.a * (self.F - self.act), at_work)
        copies = (self.root + self.kept) * self.cast
        yield self._at("between steps", fsdp=copies)
        for l in range(L):
            yield self._at(
                f"forward of block {l + 1}",
                activations=below + l * self.block_saved + at_work,
                gradients=self.accumulated,
                fsdp=copies or self.root + (self.kept * (l + 1) / L if self.kept else self._gathered(l, 2)),
            )
        saved, gradients = below + L * self.block_saved, self.accumulated
        loss, fsdp = self._loss_forward(), self.root + self.kept
        yield self._at("loss", activations=saved + stream, loss=loss, gradients=gradients, fsdp=fsdp)
        loss, fsdp = self._loss_backward(), self.root + (self.kept or self._gathered(L - 1, 1))
        yield self._at("backward of the loss", activations=saved, loss=loss, gradients=gradients, fsdp=fsdp)
        if self.moves and self.model.tied_head:
            below += stream  # the gradient of the last norm stays until that of the embedding is there
        for l in reversed(range(L)):
            yield self._at(f"backward of block {l + 1}", **self._backward(l, below + l * self.block_saved))
        # A tied embedding has its gradient of the look-up beside that of the head, until they are added: FSDP does so
        gradients = self._reduced(L) + (1 if self.moves and self.model.tied_head else 2) * self.head
        if self.moves:
            gradients += 4 * self.P_root / self.S
            fsdp = copies or 4 * self.P_root + self.root
            yield self._at("reduction of the root", activations=stream, gradients=gradients, fsdp=fsdp)
        else:
            yield self._at("gradient of the embedding", activations=stream, gradients=gradients)
        yield self._at("optimizer", gradients=4 * self.P / self.S, fsdp=self.update + copies)

    def _backward(self, l: int, saved: float) -> dict[str, float]:
        """The parts of a block's backward where it holds most."""
        a, P_block, begin = self.a, self.P_block, l - l % self.length
        done = max(self.L - begin - self.length, 0)  # of the units above
        here = self.L - done - l  # of its own unit, with this one
        gradients = self._reduced(done) + a * (here - 1) * P_block + self.head
        next_unit = self._gathered(begin - 1, 1) if begin and not self.kept else 0.0
        waiting = 4 * self.length * P_block if self.gathers and done else 0.0  # the fp32 gradients of the unit before
        fsdp = self.root + (self.kept or self._gathered(l, 1)) + next_unit + waiting
        inputs = 4 if self.parallel.recompute == "none" else 5  # recomputed: the residual stream that came in
        elements = inputs * self.C + 3 * (self.H + self.K) + 5 * self.F + self.intermediate
        at_swiglu = saved + self.M * (a * elements + self.lse + 4)
        at_end = saved + self.M * a * (4 * self.C + 2 * self.K + self.H)  # qkv's input and the gradients around it
        found = [
            dict(activations=at_swiglu, gradients=gradients + a * self.C * bool(self.act) * self.F, fsdp=fsdp),
            dict(activations=at_end, gradients=gradients + a * P_block, fsdp=fsdp),
        ]
        if self.moves and l == begin:  # its unit's gradients are reduced, or become float32
            activations, shard = saved + 2 * self.M * a * self.C, 4 * here * P_block / self.S
            fsdp = self.root + self.kept + next_unit + 4 * here * P_block * self.gathers
            found.append(dict(activations=activations, gradients=gradients + a * P_block + shard, fsdp=fsdp))
        return max(found, key=lambda parts: sum(parts.values()))

    def _gathered(self, l: int, units: int) -> float:
        """Bytes of so many units, from that of block l on."""
        begin = l - l % self.length
        return self.block * (min(begin + units * self.length, self.L) - begin)

    def _at(self, name: str, **parts: float) -> Moment:
        always = {"parameters": 4 * self.P / self.S, "optimizer": self.states / self.S, "activations": self.table}
        return Moment(name=name, parts={part: always.get(part, 0.0) + parts.get(part, 0.0) for part in PARTS})

    def _reduced(self, blocks: int) -> float:
        """Gradients that are there once so many blocks have had their backward, that of the head aside."""
        whole = 4 * blocks * self.P_block
        if self.accumulated and self.parallel.grad_reduce == "last":
            return self.accumulated - whole + whole / self.S
        return max(self.accumulated, whole / self.S)

    def _loss_forward(self) -> float:
        M, C, V = self.M, self.model.hidden, self.vocab
        if self.plain:  # logits, their fp32 copy, its log-softmax
            return M * V * (self.a + 4 + 4) if self.a < 4 else M * V * 8
        itemsize = self.a if self.device == "cuda" else 4
        casts = (M * C + V * C) * 4 if self.device == "cpu" and self.a < 4 else 0
        logits = self.chunk.tokens * (-(-V // 16) * 16) * itemsize
        dweight = (self.a if self.one_chunk else 4) * V * C
        return 4 * M * C + dweight + logits + casts + 16 * M

    def _loss_backward(self) -> float:
        M, C, V = self.M, self.model.hidden, self.vocab
        if self.plain:  # logits, their log-softmax, its gradient and theirs, in fp32 but for the first
            return M * V * (self.a + 4 + 4 + 4)
        if self.a == 4:
            return 4 * M * C + 4 * V * C
        return (4 + self.a) * M * C + (self.a if self.one_chunk else 4 + self.a) * V * C
