"""Why is the MFU low? What the settings and the split of a step say, the largest loss first.

Each cause comes with the share of the step that it takes and with the setting that changes it. Shares are measured
where the stopwatch shows them. Otherwise they are rules of thumb, and say "estimate": good enough for an order, and
for what to try first. What all causes together do not explain is said too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from fasttrain import config

LOW = 0.3  # MFU below which an explanation is due

_WORTH = 0.05  # share of a step from which a cause is worth telling
# Rules of thumb. Seconds of the host for calling the ops of a block's forward pass, compiled and not:
_LAUNCHING = {("cuda", True): 60e-6, ("cuda", False): 200e-6, ("cpu", True): 150e-6, ("cpu", False): 400e-6}
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
class Facts:
    """What is known of a run: its settings, what it runs on, and the medians of some of its steps."""

    settings: config.Config
    mfu: float = 0.0
    seconds: float = 0.0  # of a step
    split: Mapping[str, float] = field(default_factory=dict)  # seconds by part
    parameters: int  # of a block
    peak: float  # FLOP/s of a device
    device: str  # cpu or cuda
    precision: str
    compiled: bool
    world: int
    memory: float = 0.0  # share of the device's memory that is used; 0: unknown
    sensors: Mapping[str, float] | None = None

    @property
    def tokens(self) -> int:
        """Of a rank's forward pass."""
        return self.settings.batch.micro * self.settings.data.sequence

    @property
    def micro_batches(self) -> int:
        """Of a rank's step."""
        return self.settings.batch.sequences // (self.settings.batch.micro * self.world)

    def share(self, *parts: str) -> float:
        return sum(self.split.get(part, 0.0) for part in parts) / self.seconds


class Utilisation:
    """observe() every step: once a process has found its pace, what its MFU is lost to, if it is low."""

    FIRST, STEPS = 10, 40  # steps that are not looked at, and steps whose medians are

    def __init__(self, facts: Facts) -> None:
        """facts: with everything but what is measured."""
        self._facts, self._splits, self._mfus = facts, list[Mapping[str, float]](), list[float]()

    def observe(
        self, mfu: float, split: Mapping[str, float], *, memory: float, sensors: Mapping[str, float]
    ) -> list[Cause]:
        """Causes, largest first: after so many steps, and never again. split: without what is beside the step."""
        if len(self._mfus) == self.FIRST + self.STEPS:
            return []
        self._mfus.append(mfu)
        self._splits.append(split)
        if len(self._mfus) < self.FIRST + self.STEPS:
            return []
        splits = self._splits[self.FIRST :]
        parts = {part: median(step.get(part, 0.0) for step in splits) for part in splits[-1]}
        seconds = median(sum(step.values()) for step in splits)
        usual = median(self._mfus[self.FIRST :])
        return explain(replace(self._facts, mfu=usual, seconds=seconds, split=parts, memory=memory, sensors=sensors))


def explain(facts: Facts) -> list[Cause]:
    """Causes by the share of the time that they cost; [] if the MFU is not low."""
    if facts.mfu >= LOW:
        return []
    causes = [cause for find in _FINDERS if (cause := find(facts)) and cause.share >= _WORTH]
    causes.sort(key=lambda cause: -cause.share)
    kept = _IDEAL
    for cause in causes:
        kept *= 1 - min(cause.share, 0.99)
    if kept > 2 * facts.mfu:
        causes.append(_unexplained(facts, kept))
    return causes


def _data(facts: Facts) -> Cause:
    return Cause(
        share=facts.share("data"),
        evidence="waiting for data",
        remedy="put data.path on a local disk, raise data.prefetch, or give the process more cores",
    )


def _wait(facts: Facts) -> Cause:
    return Cause(
        share=facts.share("wait"),
        evidence="waiting for other ranks",
        remedy="look for the slow rank in the incidents; a faster network; parallel.replicas = number of nodes",
    )


def _optimizer(facts: Facts) -> Cause | None:
    # Reading and writing 16 bytes per parameter takes as long for any batch: a small one does not pay for it
    share = facts.share("optimizer") - 0.05
    return Cause(
        share=share,
        evidence=f"the update, after only {facts.tokens * facts.micro_batches:,} tokens of a rank",
        remedy="raise batch.sequences",
    )


def _launches(facts: Facts) -> Cause | None:
    """Small matrices: the device waits for the next kernel longer than it computes."""
    ideal = 2 * facts.parameters * facts.tokens / facts.peak
    launching = _LAUNCHING[facts.device, facts.compiled]
    share = max(launching - ideal, 0.0) / max(launching, ideal)
    room = f", and {1 - facts.memory:.0%} of the memory is free" if facts.memory else ""
    compiling = "" if facts.compiled else " and set parallel.compile to on"
    return Cause(
        share=share,
        evidence=(
            f"calling ops: a block's forward pass over {facts.tokens:,} tokens is {ideal * 1e6:,.0f} us of work "
            f"at hidden {facts.settings.model.hidden}{room} (estimate)"
        ),
        remedy=f"raise batch.micro{compiling}",
    )


def _uncompiled(facts: Facts) -> Cause | None:
    if facts.compiled or facts.device == "cpu":
        return None
    return Cause(share=0.15, evidence="blocks are not compiled (estimate)", remedy="set parallel.compile to on")


def _recomputing(facts: Facts) -> Cause:
    recompute = facts.settings.parallel.recompute
    return Cause(
        share=_RECOMPUTED[recompute],
        evidence=f"parallel.recompute is {recompute}, which does not count as useful work",
        remedy="set it to selective or none, with a smaller batch.micro if memory is short",
    )


def _precision(facts: Facts) -> Cause | None:
    if facts.device == "cpu" or facts.precision != "fp32":
        return None
    return Cause(
        share=0.5,
        evidence="matrices are multiplied in fp32 (estimate)",
        remedy="set parallel.precision to bf16, which is several times as fast",
    )


def _gathering(facts: Facts) -> Cause | None:
    """Each micro-batch gathers all weights anew: 2 bytes of them for each 2 * tokens FLOP."""
    if facts.world == 1 or not facts.settings.parallel.reshard or facts.tokens >= 8192:
        return None
    return Cause(
        share=0.1,
        evidence=f"weights are gathered for each micro-batch of {facts.tokens:,} tokens (estimate)",
        remedy="raise batch.micro, or set parallel.reshard to False",
    )


def _misaligned(facts: Facts) -> Cause | None:
    model = facts.settings.model
    sizes = {"model.hidden": model.hidden, "model.ffn": model.ffn, "model.head_dim": model.head_dim}
    if model.vocab:
        sizes["model.vocab"] = model.vocab
    odd = [f"{name} ({size})" for name, size in sizes.items() if size % 8]
    if facts.device == "cpu" or not odd:
        return None
    return Cause(
        share=0.3,
        evidence=f"{', '.join(odd)} are no multiples of 8, and matrix units take blocks of that (estimate)",
        remedy="choose multiples of 64",
    )


def _throttled(facts: Facts) -> Cause | None:
    sensors = facts.sensors or {}
    reasons = [name.removeprefix("throttled_") for name, on in sensors.items() if name.startswith("throttled_") and on]
    if not reasons:
        return None
    clock = f" at {sensors['sm_clock']:,.0f} MHz" if "sm_clock" in sensors else ""
    return Cause(
        share=0.2,
        evidence=f"the GPU lowers its clocks{clock}: {' and '.join(reasons)} (estimate)",
        remedy="look at cooling and power limits (nvidia-smi -q -d PERFORMANCE)",
    )


_FINDERS: tuple[Callable[[Facts], Cause | None], ...] = (
    _data, _wait, _optimizer, _launches, _uncompiled, _recomputing, _precision, _gathering, _misaligned, _throttled,
)  # fmt: skip


def _unexplained(facts: Facts, kept: float) -> Cause:
    idle = (facts.sensors or {}).get("utilisation", 1.0)
    hint = f" (it is busy for {idle:.0%} of the time)" if idle < 0.9 else ""
    return Cause(
        share=1 - facts.mfu / kept,
        evidence=f"nothing in the settings: they allow for an MFU of about {kept:.0%}, and it is {facts.mfu:.1%}",
        remedy=f"see whether other processes use the device{hint}, and profile a few steps",
    )
