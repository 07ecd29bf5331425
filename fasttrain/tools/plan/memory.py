"""The memory of a rank through a step, in closed form, by part and by moment.

What a block keeps for its backward, per token, is what the ops of fasttrain_kernels save (elements of the compute
dtype; letters as in fasttrain.model, K kv_heads):

    qkv's input C, its output (H + 2K) D; rotated queries and keys (H + K) D; attention's output H D
    two residual streams 2 C (a norm saves the sum that it makes, and 4 bytes of its rstd); gate_up's input C
    gate_up's output 2 F, swiglu's output F                                      in all  4 C + 3 (H + K) D + 3 F

Recomputed blocks keep their two inputs; selective ones the outputs of matmuls and attention too. Backward goes
through a block's ops from the last to the first; it holds most where swiglu's gradients are made (their 3 F beside the
2 F that they are made of), or at the end, when all gradients of its weights are there.

FSDP holds, beside the shards: the root's weights gathered, all through forward and backward; the block at work and the
next one; in backward the fp32 gradients of the block before, on their way. Tests hold all this against torch's own
FSDPMemTracker (tests/fasttrain/tools/plan/tracked.py), and against the peak of real steps on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fasttrain import config
from fasttrain.flops import num_parameters, optimizer_bytes
from fasttrain.optimizers import OPTIMIZERS

PARTS = ("parameters", "gradients", "optimizer", "activations", "loss", "fsdp", "runtime")
Loss = Literal["linear", "plain"]

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
# Of a process on a GPU: its context and loaded kernels, cuBLAS's workspace; NCCL's buffers where there are other ranks
CONTEXT = 0.55 * 2**30
COLLECTIVES = 0.75 * 2**30
# Freed memory that the caching allocator cannot give to what is asked for next: a share of what comes and goes
FRAGMENTATION = 0.04
# On a CPU, what counts is the memory that a process has ever touched: beyond loading the trainer, threads, tokenizer
# and buffers of the files take so much, and the heap of glibc, which keeps what is freed, this share of all tensors
# (bench/test_plan.py measures both)
CPU_PROCESS = 85 * 2**20
CPU_HEAP = 0.27
# Chunks of logits: as fasttrain_kernels.linear_cross_entropy takes them
_CHUNK = {"cuda": (4096, 5 << 28), "cpu": (384, 80 << 20)}
_CHUNK_MULTIPLE = 128
_CHUNK_ELEMENTS = 2**31


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
    """A step's moments, in their order."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def bytes(self) -> float:
        return self.peak.total


def memory(
    settings: config.Config,
    *,
    vocab: int,
    dp_size: int = 1,
    precision: str = "bf16",
    device: str = "cuda",
    loss: Loss = "linear",
    compiled: bool = True,
    process: float | None = None,  # bytes of a process that has loaded the trainer; None: of a GPU's; 0: tensors alone
) -> MemoryEstimate:
    """The memory of one rank. `loss` plain: whole logits, their log-softmax and its gradient, as without our kernel."""
    step = _StepMemory(settings, vocab, dp_size, precision, device, loss, compiled)
    if process is None:
        process = CONTEXT + (COLLECTIVES if dp_size > 1 else 0)
    moments = list(step.moments())
    if device == "cpu":
        runtime = process + CPU_PROCESS + CPU_HEAP * max(moment.total for moment in moments) if process else 0.0
        return MemoryEstimate(moments=tuple(replace(m, parts=m.parts | {"runtime": runtime}) for m in moments))
    held = moments[0].total
    return MemoryEstimate(
        moments=tuple(
            replace(
                m, parts=m.parts | {"runtime": process + (FRAGMENTATION * max(m.total - held, 0) if process else 0)}
            )
            for m in moments
        )
    )


def chunk_rows(tokens: int, hidden: int, vocab: int, *, precision: str, device: str) -> int:
    """Tokens whose logits exist at a time."""
    most, budget = _CHUNK[device]
    itemsize = ITEMSIZE[precision] if device == "cuda" else 4
    most = max(min(most, budget // (vocab * itemsize)) // _CHUNK_MULTIPLE, 1) * _CHUNK_MULTIPLE
    if (device, precision) == ("cuda", "bf16") and tokens <= min(most + hidden, _CHUNK_ELEMENTS // (vocab + 16)):
        return tokens
    chunks = max(-(-tokens // most), 1)
    even = -(-tokens // chunks)
    return min(-(-even // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE, tokens)


class _StepMemory:
    """Bytes of everything, and the moments that they add up to."""

    def __init__(
        self, settings: config.Config, vocab: int, dp_size: int, precision: str, device: str, loss: Loss, compiled: bool
    ) -> None:
        model, parallel, batch = settings.model, settings.parallel, settings.batch
        self.model, self.parallel, self.device, self.vocab = model, parallel, device, vocab
        self.plain = loss == "plain"
        # The CPU implementation of swiglu's gradient has three intermediate results, unless the compiler fuses them
        self.intermediate = 3 * model.ffn if device == "cpu" and not compiled else 0
        self.precision, self.a = precision, ITEMSIZE[precision]
        self.M = batch.micro * settings.data.sequence
        self.micro_batches = max(batch.sequences // (batch.micro * dp_size), 1)
        self.L = model.layers
        # fasttrain.distributed.parallelize leaves a single fp32 rank alone: nothing is gathered or cast
        self.sharded = dp_size > 1 or precision != "fp32"
        self.S = max(dp_size // parallel.dp_replicate, 1)
        counts = num_parameters(model, vocab)
        self.P = counts.total
        self.P_block = counts.blocks // model.layers
        self.P_root = counts.total - counts.blocks
        self.P_head = vocab * model.hidden
        self.states = optimizer_bytes(model, vocab, settings.optim.kind)
        largest = 2 * model.hidden * model.ffn
        self.update = OPTIMIZERS[settings.optim.kind].whole_matrices * largest * self.a
        self.dropout = model.dropout > 0
        self.table = 4 * model.head_dim * settings.data.sequence  # cosines and sines

    # Elements of a token

    @property
    def block_saved(self) -> float:
        """That a block keeps between its forward and its backward, in bytes."""
        m, C = self.model, self.model.hidden
        H, K, F = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.ffn
        lse = 4 * m.heads * (2 if self.a == 4 and self.device == "cpu" else 1)
        masks = 2 * C if self.dropout else 0
        if self.parallel.recompute == "full":
            return self.M * (self.a * 2 * C)
        if self.parallel.recompute == "selective":
            return self.M * (self.a * (4 * C + 2 * H + 2 * K + 2 * F) + lse)
        return self.M * (self.a * (4 * C + 3 * (H + K) + 3 * F) + lse + 8 + masks)

    @property
    def block_forward(self) -> float:
        """Bytes of the block at work at its last product."""
        m = self.model
        passing = self.M * self.a * (3 * m.hidden + 3 * m.ffn)
        return passing if self.parallel.recompute == "full" else max(self.block_saved, passing)

    @property
    def block_backward(self) -> float:
        """Bytes of the block at work at the gradient of swiglu, instead of block_saved."""
        m, C = self.model, self.model.hidden
        H, K, F = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.ffn
        recomputed = 0 if self.parallel.recompute == "none" else C  # the residual stream that came in
        lse = 4 * m.heads * (2 if self.a == 4 and self.device == "cpu" else 1)
        return self.M * (self.a * (4 * C + recomputed + 3 * (H + K) + 5 * F + self.intermediate) + lse + 4)

    @property
    def block_end(self) -> float:
        """The same at the end of a block's backward: qkv's input and the gradients around it."""
        m, C = self.model, self.model.hidden
        H, K = m.heads * m.head_dim, m.kv_heads * m.head_dim
        return self.M * self.a * (4 * C + 2 * K + H)

    # Moments

    def moments(self) -> Iterator[Moment]:
        a, M, C, L = self.a, self.M, self.model.hidden, self.L
        gathered = a * self.P_root if self.sharded else 0.0
        block = a * self.P_block if self.sharded else 0.0
        kept = 0.0 if self.parallel.reshard_after_forward or not self.sharded else a * (self.P - self.P_root)
        # The embedding's output, which the first norm saves; a recomputed first block keeps it anyway
        stream = 4 * M + (M * a * C if self.parallel.recompute == "none" else 0)
        batch = 3 * 8 * M
        several = self.micro_batches > 1
        accumulated = self._accumulated if several else 0.0
        yield self._at("between steps")
        for l in range(L):
            yield self._at(
                f"forward of block {l + 1}",
                activations=batch + stream + l * self.block_saved + self.block_forward,
                gradients=accumulated,
                fsdp=gathered + (kept * (l + 1) / L if kept else min(2, L - l) * block),
            )
        saved = batch + stream + L * self.block_saved
        yield self._at(
            "loss",
            activations=saved + M * a * C,
            loss=self._loss_forward(),
            gradients=accumulated,
            fsdp=gathered + kept,
        )
        yield self._at(
            "backward of the loss",
            activations=saved,
            loss=self._loss_backward(),
            gradients=accumulated,
            fsdp=gathered + (kept or block),
        )
        yield from self._backward(batch + stream, gathered, block, kept, accumulated)
        yield self._at("optimizer", gradients=4 * self.P / self.S if self.sharded else 4 * self.P, fsdp=self.update)

    def _backward(
        self, below: float, gathered: float, block: float, kept: float, accumulated: float
    ) -> Iterator[Moment]:
        a, L, M, C = self.a, self.L, self.M, self.model.hidden
        head = self._head_gradient
        if self.sharded and self.model.tied_head:
            below += M * a * C  # the gradient of the last norm stays until that of the embedding is there
        for l in reversed(range(L)):
            done = L - 1 - l
            waiting = 4 * self.P_block if self.sharded and done else 0.0  # the fp32 gradients of the block before
            next_block = 0.0 if kept else block * (l > 0)
            reduced = self._reduced(done, accumulated)
            down = a * C * self.model.ffn
            saved = below + l * self.block_saved
            middle = dict(
                activations=saved + self.block_backward,
                gradients=reduced + head + down,
                fsdp=gathered + (kept or block) + next_block + waiting,
            )
            end = dict(
                activations=saved + self.block_end,
                gradients=reduced + head + (a if self.sharded else 4) * self.P_block,
                fsdp=gathered + (kept or block) + next_block + waiting,
            )
            reduce = dict(
                activations=saved + 2 * M * a * C,
                gradients=reduced + head + a * self.P_block + 4 * self.P_block / self.S,
                fsdp=gathered + kept + next_block + 4 * self.P_block,
            )
            which = [middle, end, reduce] if self.sharded else [middle, end]
            parts = max(which, key=lambda parts: sum(parts.values()))
            yield self._at(f"backward of block {l + 1}", **parts)
        embedding = a * self.P_head
        tied = self.model.tied_head
        if self.sharded:
            yield self._at(
                "reduction of the root",
                activations=M * a * C,
                gradients=self._reduced(L, accumulated)
                + (embedding if tied else 2 * embedding)
                + 4 * self.P_root / self.S,
                fsdp=4 * self.P_root + gathered,
            )
        else:
            # A tied embedding has its gradient of the look-up beside that of the head, until they are added
            yield self._at(
                "gradient of the embedding",
                activations=M * a * C,
                gradients=self._reduced(L, accumulated) + head + embedding,
            )

    def _at(self, name: str, **parts: float) -> Moment:
        S = self.S if self.sharded else 1
        always = {"parameters": 4 * self.P / S, "optimizer": self.states / S, "activations": self.table}
        return Moment(name=name, parts={part: always.get(part, 0.0) + parts.get(part, 0.0) for part in PARTS})

    @property
    def _accumulated(self) -> float:
        """Gradients of earlier micro-batches: whole in fp32, or their shards where every micro-batch reduces."""
        if not self.sharded or self.parallel.grad_reduce == "last":
            return 4 * self.P
        return 4 * self.P / self.S

    def _reduced(self, blocks: int, accumulated: float) -> float:
        """Gradients that are there once so many blocks have had their backward, that of the head aside."""
        if not self.sharded:
            return max(accumulated, 4 * blocks * self.P_block)
        shards = 4 * blocks * self.P_block / self.S
        if accumulated and self.parallel.grad_reduce == "last":
            return accumulated - 4 * blocks * self.P_block + shards
        return max(accumulated, shards)

    @property
    def _head_gradient(self) -> float:
        """The gradient of the head, there from the backward of the loss to the end."""
        return self.a * self.P_head if self.sharded else 4 * self.P_head

    def _loss_forward(self) -> float:
        M, C, V = self.M, self.model.hidden, self.vocab
        if self.plain:  # logits, their fp32 copy, its log-softmax
            return M * V * (self.a + 4 + 4) if self.a < 4 else M * V * 8
        itemsize = self.a if self.device == "cuda" else 4
        casts = (M * C + V * C) * 4 if self.device == "cpu" and self.a < 4 else 0
        logits = self._chunk_rows * (-(-V // 16) * 16) * itemsize
        dweight = (self.a if self._one_chunk else 4) * V * C
        return 4 * M * C + dweight + logits + casts + 16 * M

    def _loss_backward(self) -> float:
        M, C, V = self.M, self.model.hidden, self.vocab
        if self.plain:  # logits, their log-softmax, its gradient and theirs, in fp32 but for the first
            return M * V * (self.a + 4 + 4 + 4)
        if self.a == 4:
            return 4 * M * C + 4 * V * C
        return (4 + self.a) * M * C + (self.a if self._one_chunk else 4 + self.a) * V * C

    @property
    def _chunk_rows(self) -> int:
        return chunk_rows(self.M, self.model.hidden, self.vocab, precision=self.precision, device=self.device)

    @property
    def _one_chunk(self) -> bool:
        """Whether the head's gradient is no fp32 sum of chunks: it is in bf16 at once, and multiplied in hardware."""
        return self.device == "cuda" and self.precision == "bf16" and self._chunk_rows == self.M
