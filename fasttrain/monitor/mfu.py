"""Why is the MFU low? What the settings and the split of a step say, the largest loss first.

Each cause comes with the share of the step that it takes and with the setting that changes it. Shares are measured
where the step timer shows them. Otherwise they are rules of thumb, and say "estimate": good enough for an order, and
for what to try first. What all causes together do not explain is said too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from fasttrain import config
from fasttrain.flops import HOST_SECONDS
from fasttrain.metrics.record import StepRecord

LOW = 0.3  # MFU below which an explanation is due

_WORTH = 0.05  # share of a step from which a cause is worth telling
# Rules of thumb
_RECOMPUTED = {"none": 0.0, "selective": 0.05, "full": 0.25}  # share of a step: a second forward is 1 of 4 parts
_IDEAL = 0.55  # MFU that a large, well-fed model reaches: what remains is not worth explaining


@dataclass(frozen=True)
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
        splits, total = self._splits[self.FIRST :], self._context.device_memory
        measured = replace(
            self._context,
            mfu=median(self._mfus[self.FIRST :]),
            seconds=median(sum(step.values()) for step in splits),
            split={phase: median(step.get(phase, 0.0) for step in splits) for phase in splits[-1]},
            memory=record.memory / total if total else 0.0,
            sensors=record.sensors,
        )
        return explain(measured)


def explain(context: MfuContext) -> list[Cause]:
    """Causes by the share of the time that they cost; [] if the MFU is not low."""
    if context.mfu >= LOW:
        return []
    found = [*_measured(context), *_settings(context), *(_of_a_gpu(context) if context.device != "cpu" else ())]
    causes = sorted((cause for cause in found if cause.share >= _WORTH), key=lambda cause: -cause.share)
    kept = _IDEAL * math.prod(1 - min(cause.share, 0.99) for cause in causes)
    if kept > 2 * context.mfu:
        idle = (context.sensors or {}).get("utilisation", 1.0)
        hint = f" (it is busy for {idle:.0%} of the time)" if idle < 0.9 else ""
        evidence = f"nothing in the settings: they allow for an MFU of about {kept:.0%}, and it is {context.mfu:.1%}"
        remedy = f"see whether other processes use the device{hint}, and profile a few steps"
        causes.append(Cause(1 - context.mfu / kept, evidence, remedy))
    return causes


def _measured(context: MfuContext) -> Iterator[Cause]:
    remedy = "put data.path on a local disk, raise data.prefetch, or give the process more cores"
    yield Cause(context.share("data"), "waiting for data", remedy)
    remedy = "look for the slow rank in the events; a faster network; parallel.dp_replicate = number of nodes"
    yield Cause(context.share("wait"), "waiting for other ranks", remedy)
    # Reading and writing 16 bytes per parameter takes as long for any batch: a small one does not pay for it
    tokens = context.settings.batch.sequences // context.dp_size * context.settings.data.sequence
    update = f"the update, after only {tokens:,} tokens of a rank"
    yield Cause(context.share("optimizer") - 0.05, update, "raise batch.sequences")


def _settings(context: MfuContext) -> Iterator[Cause]:
    parallel, tokens = context.settings.parallel, context.tokens
    # Small matrices: the device waits for the next kernel longer than it computes
    ideal, launching = 2 * context.parameters * tokens / context.peak, HOST_SECONDS[context.device, context.compiled]
    free = f", and {1 - context.memory:.0%} of the memory is free" if context.memory else ""
    yield Cause(
        max(launching - ideal, 0.0) / max(launching, ideal),
        f"calling ops: a block's forward pass over {tokens:,} tokens is {ideal * 1e6:,.0f} us of work at "
        f"hidden {context.settings.model.hidden}{free} (estimate)",
        "raise batch.micro" + ("" if context.compiled else " and set parallel.compile to on"),
    )
    useless = f"parallel.recompute is {parallel.recompute}, which does not count as useful work"
    remedy = "set it to selective or none, with a smaller batch.micro if memory is short"
    yield Cause(_RECOMPUTED[parallel.recompute], useless, remedy)
    # Each micro-batch gathers all weights anew: 2 bytes of them for each 2 * tokens FLOP
    if context.dp_size > 1 and parallel.reshard_after_forward and tokens < 8192:
        gathers = f"weights are gathered for each micro-batch of {tokens:,} tokens (estimate)"
        yield Cause(0.1, gathers, "raise batch.micro, or set parallel.reshard_after_forward to False")


def _of_a_gpu(context: MfuContext) -> Iterator[Cause]:
    model, sensors = context.settings.model, context.sensors or {}
    if not context.compiled:
        yield Cause(0.15, "blocks are not compiled (estimate)", "set parallel.compile to on")
    if context.precision == "fp32":
        remedy = "set parallel.precision to bf16, which is several times as fast"
        yield Cause(0.5, "matrices are multiplied in fp32 (estimate)", remedy)
    sizes = {"hidden": model.hidden, "ffn": model.ffn, "head_dim": model.head_dim, "vocab": model.vocab or 0}
    if odd := [f"model.{name} ({size})" for name, size in sizes.items() if size % 8]:
        evidence = f"{', '.join(odd)} are no multiples of 8, and tensor cores take blocks of that (estimate)"
        yield Cause(0.3, evidence, "choose multiples of 64")
    if reasons := [name.removeprefix("throttled_") for name, on in sensors.items() if "throttled_" in name and on]:
        clock = f" at {sensors['sm_clock']:,.0f} MHz" if "sm_clock" in sensors else ""
        evidence = f"the GPU lowers its clocks{clock}: {' and '.join(reasons)} (estimate)"
        yield Cause(0.2, evidence, "look at cooling and power limits (nvidia-smi -q -d PERFORMANCE)")
