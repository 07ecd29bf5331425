"""A plan: the arithmetic of a run, its memory, its time and money, in one object; and whether it can be."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fasttrain import config
from fasttrain.tools.plan.memory import MemoryEstimate, memory, precision_of
from fasttrain.tools.plan.sizes import Sizes, Stated, sizes
from fasttrain.tools.plan.speed import Hardware, SpeedEstimate, speed, work_of
from fasttrain.units import memory_size


class Band(NamedTuple):
    """An estimate, and what it may well be."""

    value: float
    low: float
    high: float

    def range(self, digits: int) -> str:
        return f"{self.low:,.{digits}f} to {self.high:,.{digits}f}"

    def json(self) -> dict[str, float]:
        return {name: float(f"{number:.6g}") for name, number in self._asdict().items()}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The estimate of a run."""

    settings: config.Config
    hardware: Hardware
    precision: str
    sizes: Sizes
    memory: MemoryEstimate
    speed: SpeedEstimate
    measured: bool = False  # the device was measured, and not looked up

    @property
    def memory_gib(self) -> Band:
        """GiB. What is outside of the allocator may be half as much or twice; on a CPU, all that is no tensor."""
        total, unsure = self.memory.bytes, self.memory.process
        if self.measured:
            unsure = self.memory.peak.parts["runtime"]
        return Band(*(size / 2**30 for size in (total, total - unsure / 2, total + unsure)))

    @property
    def rate(self) -> Band:
        """Tokens per second and GPU."""
        value, band = self.speed.rate, self.speed.band
        return Band(value, value * (1 - band), value * (1 + band))

    @property
    def mfu(self) -> Band:
        scale = self.speed.mfu / self.speed.rate
        return Band(*(scale * rate for rate in self.rate))

    @property
    def published(self) -> str:
        """The measured run of others that is nearest in size, on such a GPU; whether the prediction exceeds all."""
        known = self.hardware.gpu.published
        if self.measured or not known:
            return "" if self.measured else f"no measured run on a {self.hardware.gpu.name} is in our table"
        size = self.sizes.parameters.total / 1e9
        mfu, billions, run = min(known, key=lambda row: abs(math.log(row[1] / size)))
        text = f"nearest published run on such a GPU: MFU {mfu:.1%} with {billions:g}B parameters ({run})"
        if self.mfu.value <= (most := max(row[0] for row in known)):
            return text
        return (
            f"{text}; this prediction is above all published ones (at most {most:.1%}): it takes our fused kernels to "
            "reach their share of the hardware, which nobody has measured; do not count on it"
        )

    @property
    def days(self) -> Band:
        """Days of training alone: neither validation nor what goes wrong."""
        value, low, high = (self.sizes.tokens / (rate * self.hardware.gpus) / 86_400 for rate in self.rate)
        return Band(value, high, low)

    @property
    def gpu_hours(self) -> Band:
        return Band(*(24 * self.hardware.gpus * days for days in self.days))

    @property
    def cost(self) -> Band | None:
        price = self.hardware.price
        return None if price is None else Band(*(price * hours for hours in self.gpu_hours))

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.hardware.memory)

    @property
    def contradictions(self) -> tuple[str, ...]:
        """Why the run cannot be as it is described; each with its remedy, but for memory, whose remedies are advice."""
        return self.sizes.contradictions

    @property
    def warnings(self) -> tuple[str, ...]:
        found = list(self.sizes.warnings)
        if self.fits and self.memory_gib.high > self.hardware.memory / 2**30:
            found.append(
                f"memory is tight: {memory_size(self.memory.bytes)} of {memory_size(self.hardware.memory)}, and the "
                "runtime may take more; near the limit the allocator frees and retries, which takes time"
            )
        return tuple(found)

    def json(self) -> dict[str, Any]:
        """For scripts. Estimates come as value, low and high; what is exact, as a number."""
        parameters, run = self.sizes.parameters, self.sizes
        return {
            "parameters": parameters.total,
            **{f"parameters_{part}": getattr(parameters, part) for part in ("embedding", "head", "non_embedding")},
            **{name: getattr(run, name) for name in ("tokens_per_step", "tokens", "tokens_per_parameter")},
            "epochs": None if run.epochs is None else dict(run.epochs),
            "checkpoint_bytes": run.checkpoint_bytes,
            "checkpoint_bytes_held": run.disk_bytes,
            "gpu": self.hardware.gpu.name,
            "gpus": self.hardware.gpus,
            "memory_gib": self.memory_gib.json(),
            "memory_limit_gib": self.hardware.memory / 2**30,
            "memory_parts_gib": {part: size / 2**30 for part, size in self.memory.peak.parts.items()},
            "memory_peak_at": self.memory.peak.name,
            "fits": self.fits,
            "tokens_per_second_per_gpu": self.rate.json(),
            "mfu": self.mfu.json(),
            "published": self.published,
            "host_seconds": self.speed.host,
            "step_seconds": self.speed.seconds,
            "step_parts_seconds": dict(self.speed.parts),
            "days": self.days.json(),
            "gpu_hours": self.gpu_hours.json(),
            "cost_usd": None if self.cost is None else self.cost.json(),
            "contradictions": list(self.contradictions),
            "warnings": list(self.warnings),
        }


def estimate(settings: config.Config, hardware: Hardware, *, vocab: int, stated: Stated = Stated()) -> Plan:  # noqa: B008
    """The plan of a run on GPUs."""
    dp_size = hardware.gpus
    return Plan(
        settings=settings, hardware=hardware, precision=precision_of(settings.parallel),
        sizes=sizes(settings, vocab=vocab, dp_size=dp_size, stated=stated),
        memory=memory(settings, vocab=vocab, dp_size=dp_size),
        speed=speed(work_of(settings, vocab=vocab, dp_size=dp_size), hardware),
    )  # fmt: skip


def changed(settings: config.Config, **sections: dict[str, Any]) -> config.Config:
    """Settings with other values, by section: changed(settings, batch=dict(micro=4))."""
    parts = {name: replace(getattr(settings, name), **values) for name, values in sections.items()}
    return replace(settings, **parts)
