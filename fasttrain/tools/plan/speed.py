"""How long a step takes on a GPU: a sum of parts, each with a physical reason, and few calibrated figures.

    matmuls      6 M K N FLOP each, at a share of the peak; or their operands' bytes, where those take longer
    attention    3.5 times 2 M T H D FLOP under the causal mask, at a share of its own
    streaming    bytes that norms, rotations, activations, the loss and FSDP's casts read and write, at a share of the
                 memory's bandwidth; more bytes where nothing fuses them
    optimizer    40 bytes for each parameter of a rank's shard, clipping included
    exposed      what is left of communication after computing has hidden the rest
    launching    the host's time per block, where that is longer than the GPU's

The calibrated figures are in calibration.toml, fitted by bench/fit_plan.py to a part of the runs in
tests/fasttrain/tools/plan/published.toml, and checked by the rest (test_published.py). Figures for a GPU that no
published run is on are carried over from another one: the band says so.

B sequences of T tokens are M tokens of a micro-batch; W ranks, S of which share the weights, R = W / S replicas.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from fasttrain import config
from fasttrain.flops import HOST_SECONDS, block_matrices, block_shapes, flops_per_token, num_parameters
from fasttrain.gpus import Gpu
from fasttrain.optimizers import OPTIMIZERS, OptimizerKind
from fasttrain.tools.plan.memory import ITEMSIZE, planned_chunk, precision_of

TABLE = Path(__file__).with_name("calibration.toml")
# Collectives reach this share of what links and adapters are sold as
_LINK, _NETWORK = 0.75, 0.85
# Seconds of a ring's hop: between GPUs of a node, and between nodes
_HOP, _NODE_HOP = 1.5e-6, 8e-6
# Seconds of the host (AMD Zen 5, Python 3.11, torch 2.13) that the null GPU measures, of a step, and of each block of a
# micro-batch, by whether blocks are compiled; more where FSDP has the weights, by block and unit, between ranks, and
# for eager recomputation
HOST_STEP = 2.5e-3
HOST_BLOCK = {False: 0.38e-3, True: 0.21e-3}
HOST_FSDP, HOST_UNIT, HOST_RANKS = 0.4e-3, 0.23e-3, 0.42e-3
HOST_AGAIN = {"none": 0.0, "selective": 1.85e-3, "full": 0.78e-3}
_STEP = 0.004  # seconds of a step that nothing below explains: the loop itself, the last reductions


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Shares of what the data sheet promises."""

    matmuls: float  # of the peak, by large matmuls
    attention: float  # of the peak
    bandwidth: float  # of the memory's
    unfused: float  # factor of the streamed bytes where nothing is fused
    exposed: float  # share of communication that computing cannot hide
    band: float  # of the speed: this much more or less covers nine of ten held-out runs


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a rank in a step, as far as time depends on it."""

    model: config.ModelConfig
    vocab: int
    sequence: int
    micro: int
    micro_batches: int
    dp_size: int = 1
    dp_replicate: int = 1
    precision: str = "bf16"
    fused: bool = True  # elementwise work: by our kernels, torch.compile or both
    compiled: bool = True
    recomputed: float = 0.0  # share of a block's matmuls that backward computes again; 1: attention too
    recomputed_streaming: float = 0.0  # the same of its elementwise work
    gathers: int = 2  # of the weights, in each micro-batch; 0: they are not sharded
    casts: bool = False  # whole weights to copies, and gradients back
    unit: int = 1  # blocks that are gathered and reduced together
    reduces_every: bool = False
    reduced: int = 4  # bytes of an element of the gradients that are reduced
    linear_loss: bool = True
    optimizer: OptimizerKind = "adamw"
    host: float = 0.0  # seconds of a step; 0: a rule of thumb, for trainers that nobody measured
    gated: bool = True  # False: a feed-forward layer of two matrices, as many elements as the model's three

    @property
    def shards(self) -> int:
        return max(self.dp_size // self.dp_replicate, 1)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The GPUs that a run is to use."""

    gpu: Gpu
    gpus: int
    node: int  # GPUs of a node
    network: float  # bytes per second of a node
    memory: float  # bytes of a GPU
    price: float | None  # USD per GPU-hour

    @classmethod
    def of(
        cls,
        gpu: Gpu,
        gpus: int,
        *,
        node: int | None = None,
        network: float | None = None,
        memory: float | None = None,
        price: float | None = None,
    ) -> Self:
        return cls(
            gpu=gpu,
            gpus=gpus,
            node=node or min(gpu.node, gpus),
            network=network or gpu.network,
            memory=memory or gpu.memory,
            price=gpu.price if price is None else price,
        )


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """A step, in seconds by part."""

    parts: dict[str, float]
    host: float = 0.0  # seconds that it takes the host; part of the sum where the GPU has less to do
    tokens: int  # of a rank's step
    flops: float  # per token, as published MFUs count
    peak: float
    band: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def rate(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.rate * self.flops / self.peak


def work_of(settings: config.Config, *, vocab: int, dp_size: int) -> Work:
    """The work of a run with these settings."""
    parallel, batch, recompute = settings.parallel, settings.batch, settings.parallel.recompute
    precision, counts = precision_of(parallel), num_parameters(settings.model, vocab)
    sharded = parallel.shards(dp_size, counts.total, "cuda", precision=precision)
    block = counts.blocks // settings.model.layers * ITEMSIZE[precision]
    unit = config.unit_blocks(settings.model.layers, block, "cuda")
    return Work(
        model=settings.model,
        vocab=vocab,
        sequence=settings.data.sequence,
        micro=batch.micro,
        micro_batches=max(batch.sequences // (batch.micro * dp_size), 1),
        dp_size=dp_size,
        dp_replicate=parallel.replicate_groups(dp_size, counts.total, "cuda"),
        precision=precision,
        compiled=parallel.compile != "off",
        recomputed=float(recompute == "full"),
        recomputed_streaming=float(recompute != "none"),
        gathers=(2 if parallel.reshard_after_forward else 1) if sharded else 0,
        casts=not sharded and precision != "fp32",
        unit=unit,
        reduces_every=parallel.grad_reduce == "every",
        optimizer=settings.optim.kind,
        host=host_seconds(settings, dp_size=dp_size, sharded=sharded, unit=unit),
    )


def host_seconds(settings: config.Config, *, dp_size: int, sharded: bool, unit: int) -> float:
    """CPU time of a step: the host calls ops one after the other, whatever the GPU does."""
    parallel, batch, layers = settings.parallel, settings.batch, settings.model.layers
    compiled = parallel.compile != "off"
    seconds = layers * (HOST_BLOCK[compiled] + (0 if compiled else HOST_AGAIN[parallel.recompute]))
    if sharded:
        seconds += layers * HOST_FSDP + -(-layers // unit) * (HOST_UNIT + (HOST_RANKS if dp_size > 1 else 0))
    return HOST_STEP + max(batch.sequences // (batch.micro * dp_size), 1) * seconds


@cache
def calibrations() -> dict[str, Calibration]:
    """The fitted figures by architecture."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text("utf-8"))
    return {
        name: Calibration(**{key: value for key, value in (table["shared"] | row).items() if key != "from"})
        for name, row in table["architectures"].items()
    }


def speed(work: Work, hardware: Hardware, calibration: Calibration | None = None) -> SpeedEstimate:
    """The time of a step, by part."""
    gpu, n = hardware.gpu, work.micro_batches
    given = calibration or calibrations()[gpu.architecture]
    per_micro = {
        "matmuls": _matmuls(work, gpu, given),
        "attention": _attention(work, gpu, given),
        "streaming": _streaming(work, gpu, given),
    }
    busy = sum(per_micro.values())
    host = work.host or 3 * n * work.model.layers * HOST_SECONDS["cuda", work.compiled or work.fused]
    per_micro["launching"] = max(host / n - busy, 0.0)
    parts = {part: n * seconds for part, seconds in per_micro.items()}
    parts["optimizer"] = _optimizer(work, gpu, given) + _STEP
    # Communication: a share that never hides (the first gather, the last reduction, kernels that compete), and what
    # computing is too short for
    moving, hidden = sum(collectives(work, hardware).values()), 0.9 * n * (busy + per_micro["launching"])
    parts["exposed"] = given.exposed * moving + max((1 - given.exposed) * moving - hidden, 0.0)
    tokens = work.micro * work.sequence * n
    flops, peak = flops_per_token(work.model, work.vocab, work.sequence), gpu.peak(work.precision)
    return SpeedEstimate(host=host, parts=parts, tokens=tokens, flops=flops, peak=peak, band=given.band)


def _matmuls(work: Work, gpu: Gpu, given: Calibration) -> float:
    """Seconds of a micro-batch: each matrix forward, and twice in backward."""
    m, M = work.model, work.micro * work.sequence
    C, wide = m.hidden, m.ffn * 3 // 2  # of two matrices with as many elements as three
    block = block_shapes(m) if work.gated else [*block_shapes(m)[:2], (C, wide), (wide, C)]

    def seconds(K: int, N: int) -> float:
        moved = (M * K + K * N + M * N) * ITEMSIZE[work.precision]
        busy = 2 * M * K * N / (gpu.peak(work.precision) * given.matmuls)
        return max(busy, moved / (gpu.bandwidth * given.bandwidth))

    again = 3 + work.recomputed
    return again * m.layers * sum(seconds(*sides) for sides in block) + 3 * seconds(C, work.vocab)


def _attention(work: Work, gpu: Gpu, given: Calibration) -> float:
    m, T = work.model, work.sequence
    forward = 2 * work.micro * T * T * m.heads * m.head_dim
    share = given.attention * min(1.0, (m.head_dim / 128) ** 0.25)
    return m.layers * (3.5 + (work.recomputed == 1)) * forward / (gpu.peak(work.precision) * share)


def _streaming(work: Work, gpu: Gpu, given: Calibration) -> float:
    """Bytes of a micro-batch over the bandwidth."""
    m, M, a = work.model, work.micro * work.sequence, ITEMSIZE[work.precision]
    C, H, K, F = m.hidden, m.heads * m.head_dim, m.kv_heads * m.head_dim, m.ffn
    # Norms read and write 4 C, the rotation 2 (H + K), swiglu 3 F; backward 4 C, 3 (H + K), 5 F, and packs dqkv
    forward = 8 * C + 2 * (H + K) + 3 * F
    backward = 8 * C + 3 * (H + K) + 2 * (H + 2 * K) + 5 * F
    block = (forward * (1 + work.recomputed_streaming) + backward) * (1 if work.fused else given.unfused)
    total = m.layers * M * a * block + _loss_bytes(work)
    # The shard is cast, gathered weights are copied to their places, gradients to the buffer that is reduced
    if work.gathers or work.casts:
        P = num_parameters(m, work.vocab).total
        total += work.gathers * 2 * a * P + 6 * P / work.shards + (a + 4) * P
    return total / (gpu.bandwidth * given.bandwidth)


def _loss_bytes(work: Work) -> float:
    M, C, V, a = work.micro * work.sequence, work.model.hidden, work.vocab, ITEMSIZE[work.precision]
    if not work.linear_loss:
        return M * V * (a + 4 + 4 + 4 + 4 + a) * (0.6 if work.fused else 1)
    chunk = planned_chunk(M, C, V, precision=work.precision, device="cuda")
    # dweight: summed in fp32 chunk by chunk; one chunk in bf16 writes it, and its factor reads and writes it
    dweight = 6 if chunk.dweight_dtype == "bfloat16" else 8 * -(-M // chunk.tokens)
    return 4 * M * V * a + dweight * V * C + 8 * M * C


def _optimizer(work: Work, gpu: Gpu, given: Calibration) -> float:
    m, row = work.model, OPTIMIZERS[work.optimizer]
    seconds = 40 * num_parameters(m, work.vocab).total / work.shards / (gpu.bandwidth * given.bandwidth)
    flops = row.matrix_flops * min(m.hidden, m.ffn) * m.layers * block_matrices(m) / work.shards  # shared by a group
    return seconds + flops / (gpu.half * given.matmuls * 0.6)


def traffic(work: Work) -> dict[str, tuple[int, float]]:
    """A rank's collectives of a step, and the bytes that they gather, or add up: the whole of a group's."""
    counts, groups = num_parameters(work.model, work.vocab), -(-work.model.layers // work.unit) + 1
    size = work.reduced * counts.total
    if not work.gathers:
        return {"all_reduce": (groups, size)} if work.dp_size > 1 else {}
    root, low = counts.total - counts.blocks, ITEMSIZE[work.precision]
    rounds = work.micro_batches if work.gathers == 2 else 1
    reductions = work.micro_batches if work.reduces_every else 1
    found = {
        "all_gather": (
            rounds * (work.gathers * (groups - 1) + 1),
            rounds * (work.gathers * counts.blocks + root) * low,
        ),
        "reduce_scatter": (reductions * groups, reductions * size),
    }
    return found | ({"all_reduce": (groups, size / work.shards)} if work.dp_replicate > 1 else {})


def collectives(work: Work, hardware: Hardware) -> dict[str, float]:
    """Seconds of a step's collectives, if nothing hid them: gathers, reductions, all-reduce among dp_replicate."""
    found, none = traffic(work), (0, 0.0)
    gathers, gathered = found.get("all_gather", none)
    reductions, reduced = found.get("reduce_scatter", none)
    _, added = found.get("all_reduce", none)
    ring = 2 * _ring(work.dp_size, added, hardware)
    return {
        "gather": _ring(work.shards, gathered, hardware, rounds=gathers),
        "reduce": _ring(work.shards, reduced, hardware, rounds=reductions),
        "dp_replicate": _between_replicas(work, added, hardware) if work.gathers else ring,
    }


def _ring(ranks: int, size: float, hardware: Hardware, *, rounds: int = 1) -> float:
    """Seconds to bring every rank of a group a whole of so many bytes, of which each has a share; or to reduce one."""
    nodes = max(ranks / hardware.node, 1)
    inside = (ranks - 1) / ranks * size / (_LINK * hardware.gpu.link)
    between = (nodes - 1) / nodes * size / (_NETWORK * hardware.network)
    return max(inside, between) + rounds * (_HOP * (ranks - 1) + _NODE_HOP * (nodes - 1))


def _between_replicas(work: Work, shard: float, hardware: Hardware) -> float:
    """The all-reduce of each rank's shard with the same shard elsewhere: all ranks of a node share its network."""
    R, S = work.dp_replicate, work.shards
    volume = 2 * (R - 1) / R * shard
    if work.dp_size <= hardware.node:
        return volume / (_LINK * hardware.gpu.link)
    if hardware.node <= S:
        return volume * hardware.node / (_NETWORK * hardware.network)
    # Several dp_replicate in a node are summed there first
    return volume / (_LINK * hardware.gpu.link) + 2 * S * shard / (_NETWORK * hardware.network)
