"""Why is the MFU low? What the settings and the split of a step say, the largest loss first.

Each cause comes with the share of the step that it takes and with the setting that changes it. Shares are measured
where the step timer shows them. Otherwise they are rules of thumb, and say "estimate": good enough for an order, and
for what to try first. What all causes together do not explain is said too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from fasttrain import config
from fasttrain.flops import HOST_SECONDS
from fasttrain.metrics import StepRecord

LOW = 0.3  # MFU below which an explanation is due

_WORTH = 0.05  # share of a step from which a cause is worth telling
# Rules of thumb
_RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 0.25}  # share of a step: a second forward is 1 of 4 parts
_IDEAL = 0.55  # MFU that a large, well-fed model reaches: what remains is not worth explaining


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One reason for a low MFU."""

    share: float  # of a step's time
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.share:.0%} of a step: {self.evidence}; {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class MfuContext:
    """What is known of a run: its settings, what it runs on, and the medians of some of its steps."""

    settings: config.Config
    mfu: float = 0.0
    seconds: float = 0.0  # of a step
    split: Mapping[str, float] = field(default_factory=dict)  # seconds by phase
    parameters: int  # of a block
    peak: float  # FLOP/s of a device
    device: str  # cpu or cuda
    precision: str
    compiled: bool
    dp_size: int
    device_memory: float = 0.0  # bytes of the device; 0: unknown
    memory: float = 0.0  # share of the device's memory that is used; 0: unknown
    sensors: Mapping[str, float] | None = None

    @property
    def tokens(self) -> int:
        """Of a rank's forward pass."""
        return self.settings.batch.micro * self.settings.data.sequence

    @property
    def micro_batches(self) -> int:
        """Of a rank's step."""
        return self.settings.batch.sequences // (self.settings.batch.micro * self.dp_size)

    def share(self, *phases: str) -> float:
        return sum(self.split.get(phase, 0.0) for phase in phases) / self.seconds


class MfuMonitor:
    """observe() every step: once a process has found its pace, what its MFU is lost to, if it is low."""

    FIRST, STEPS = 10, 40  # steps that are not looked at, and steps whose medians are

    def __init__(self, context: MfuContext) -> None:
        """context: with everything but what is measured."""
        self._context, self._splits, self._mfus = context, list[Mapping[str, float]](), list[float]()

    def observe(self, record: StepRecord) -> list[Cause]:
        """Causes, largest first: after so many steps, and never again."""
        if len(self._mfus) == self.FIRST + self.STEPS:
            return []
        self._mfus.append(record.mfu)
        self._splits.append(record.step_phases)
        if len(self._mfus) < self.FIRST + self.STEPS:
            return []
        splits = self._splits[self.FIRST :]
        phases = {phase: median(step.get(phase, 0.0) for step in splits) for phase in splits[-1]}
        seconds = median(sum(step.values()) for step in splits)
        usual = median(self._mfus[self.FIRST :])
        total = self._context.device_memory
        memory = record.memory / total if total else 0.0
        return explain(
            replace(self._context, mfu=usual, seconds=seconds, split=phases, memory=memory, sensors=record.sensors)
        )


def explain(context: MfuContext) -> list[Cause]:
    """Causes by the share of the time that they cost; [] if the MFU is not low."""
    if context.mfu >= LOW:
        return []
    causes = [cause for find in _FINDERS if (cause := find(context)) and cause.share >= _WORTH]
    causes.sort(key=lambda cause: -cause.share)
    kept = _IDEAL
    for cause in causes:
        kept *= 1 - min(cause.share, 0.99)
    if kept > 2 * context.mfu:
        causes.append(_unexplained(context, kept))
    return causes


def _data(context: MfuContext) -> Cause:
    return Cause(
        share=context.share("data"),
        evidence="waiting for data",
        remedy="put data.path on a local disk, raise data.prefetch, or give the process more cores",
    )


def _wait(context: MfuContext) -> Cause:
    return Cause(
        share=context.share("wait"),
        evidence="waiting for other ranks",
        remedy="look for the slow rank in the events; a faster network; parallel.dp_replicate = number of nodes",
    )


def _optimizer(context: MfuContext) -> Cause | None:
    # Reading and writing 16 bytes per parameter takes as long for any batch: a small one does not pay for it
    share = context.share("optimizer") - 0.05
    return Cause(
        share=share,
        evidence=f"the update, after only {context.tokens * context.micro_batches:,} tokens of a rank",
        remedy="raise batch.sequences",
    )


def _launches(context: MfuContext) -> Cause | None:
    """Small matrices: the device waits for the next kernel longer than it computes."""
    ideal = 2 * context.parameters * context.tokens / context.peak
    launching = HOST_SECONDS[context.device, context.compiled]
    share = max(launching - ideal, 0.0) / max(launching, ideal)
    free = f", and {1 - context.memory:.0%} of the memory is free" if context.memory else ""
    compiling = "" if context.compiled else " and set parallel.compile to on"
    return Cause(
        share=share,
        evidence=(
            f"calling ops: a block's forward pass over {context.tokens:,} tokens is {ideal * 1e6:,.0f} us of work "
            f"at hidden {context.settings.model.hidden}{free} (estimate)"
        ),
        remedy=f"raise batch.micro{compiling}",
    )


def _uncompiled(context: MfuContext) -> Cause | None:
    if context.compiled or context.device == "cpu":
        return None
    return Cause(share=0.15, evidence="blocks are not compiled (estimate)", remedy="set parallel.compile to on")


def _recomputing(context: MfuContext) -> Cause:
    recompute = context.settings.parallel.recompute
    return Cause(
        share=_RECOMPUTED[recompute],
        evidence=f"parallel.recompute is {recompute}, which does not count as useful work",
        remedy="set it to selective or none, with a smaller batch.micro if memory is short",
    )


def _precision(context: MfuContext) -> Cause | None:
    if context.device == "cpu" or context.precision != "fp32":
        return None
    return Cause(
        share=0.5,
        evidence="matrices are multiplied in fp32 (estimate)",
        remedy="set parallel.precision to bf16, which is several times as fast",
    )


def _gathering(context: MfuContext) -> Cause | None:
    """Each micro-batch gathers all weights anew: 2 bytes of them for each 2 * tokens FLOP."""
    if context.dp_size == 1 or not context.settings.parallel.reshard_after_forward or context.tokens >= 8192:
        return None
    return Cause(
        share=0.1,
        evidence=f"weights are gathered for each micro-batch of {context.tokens:,} tokens (estimate)",
        remedy="raise batch.micro, or set parallel.reshard_after_forward to False",
    )


def _misaligned(context: MfuContext) -> Cause | None:
    model = context.settings.model
    sizes = {"model.hidden": model.hidden, "model.ffn": model.ffn, "model.head_dim": model.head_dim}
    if model.vocab:
        sizes["model.vocab"] = model.vocab
    odd = [f"{name} ({size})" for name, size in sizes.items() if size % 8]
    if context.device == "cpu" or not odd:
        return None
    return Cause(
        share=0.3,
        evidence=f"{', '.join(odd)} are no multiples of 8, and tensor cores take blocks of that (estimate)",
        remedy="choose multiples of 64",
    )


def _throttled(context: MfuContext) -> Cause | None:
    sensors = context.sensors or {}
    reasons = [name.removeprefix("throttled_") for name, on in sensors.items() if name.startswith("throttled_") and on]
    if not reasons:
        return None
    clock = f" at {sensors['sm_clock']:,.0f} MHz" if "sm_clock" in sensors else ""
    return Cause(
        share=0.2,
        evidence=f"the GPU lowers its clocks{clock}: {' and '.join(reasons)} (estimate)",
        remedy="look at cooling and power limits (nvidia-smi -q -d PERFORMANCE)",
    )


_FINDERS: tuple[Callable[[MfuContext], Cause | None], ...] = (
    _data, _wait, _optimizer, _launches, _uncompiled, _recomputing, _precision, _gathering, _misaligned, _throttled,
)  # fmt: skip


def _unexplained(context: MfuContext, kept: float) -> Cause:
    idle = (context.sensors or {}).get("utilisation", 1.0)
    hint = f" (it is busy for {idle:.0%} of the time)" if idle < 0.9 else ""
    return Cause(
        share=1 - context.mfu / kept,
        evidence=f"nothing in the settings: they allow for an MFU of about {kept:.0%}, and it is {context.mfu:.1%}",
        remedy=f"see whether other processes use the device{hint}, and profile a few steps",
    )
