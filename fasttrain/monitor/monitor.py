"""The monitor: every record of a step passes through all detectors, and comes back as events.

What is monitored are sums over all ranks, so that every rank comes to the same conclusion at the same step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fasttrain import config
from fasttrain.data.locate import documents_of
from fasttrain.distributed.runtime import Runtime
from fasttrain.events import Anomaly, Event, EventKind
from fasttrain.flops import num_parameters
from fasttrain.metrics.hardware import device_memory
from fasttrain.metrics.record import StepRecord
from fasttrain.monitor.mfu import MfuContext, MfuMonitor
from fasttrain.monitor.sanity import Blocks, Envelope, first_loss_suspicion
from fasttrain.monitor.slowdown import SpeedMonitor
from fasttrain.monitor.spikes import SpikeDetector

IN_A_ROW = 3  # losses that are not finite: one is a batch, whose update was skipped; three are the weights
_KINDS = {"warning": EventKind.NORM, "spike": EventKind.SPIKE, "not finite": EventKind.NOT_FINITE}


class Monitor:
    """observe() every step; an event with an anomaly is one that the run has to handle."""

    def __init__(
        self,
        settings: config.Config,
        *,
        vocab: int,
        repeated: float = 0.0,  # share of the data's tokens that are the same as the one before
        scaled: bool = False,  # fp16, whose loss scale now and then has an infinite norm
        documents_of: Callable[[range], Sequence[str]] = lambda _: (),  # what steps trained on
        speed: SpeedMonitor | None = None,
        mfu: MfuMonitor | None = None,
    ) -> None:
        self._settings, self._vocab, self._repeated, self._documents_of = settings, vocab, repeated, documents_of
        self._spikes = SpikeDetector(first=settings.monitor.first, scaled=scaled)
        self._envelope = Envelope(settings.monitor.envelope)
        self._blocks = Blocks()
        self._not_finite = 0  # in a row
        self._speed, self._mfu = speed, mfu

    def observe(self, record: StepRecord) -> list[Event]:
        """What is new."""
        return [*self._numbers(record), *self._performance(record)]

    def _numbers(self, record: StepRecord) -> Iterator[Event]:
        """Spikes, values that are not finite, the first loss, the envelope, blocks that do not learn or explode."""
        step, loss = record.step, record.loss
        if step == 1 and (text := first_loss_suspicion(loss, self._settings, self._vocab, self._repeated)):
            yield Event(step=step, kind=EventKind.FIRST_LOSS, text=text, evidence=dict(loss=loss))
        anomaly = self._spikes.observe(loss, record.grad_norm)
        self._not_finite = self._not_finite + 1 if anomaly and anomaly.kind == "not finite" else 0
        if anomaly and anomaly.is_new:
            yield self._about(replace(anomaly, step=step, steps=self._not_finite or anomaly.steps))
        for finding in [*self._envelope.observe(record.tokens, loss), *self._blocks.observe(record.block_norms)]:
            yield Event(step=step, **finding._asdict())

    def _about(self, anomaly: Anomaly) -> Event:
        """What the run has to handle is a spike, and values that are not finite for the third time in a row."""
        text, action, first, handled = f"{anomaly.kind}: {anomaly}", "", anomaly.first, anomaly.kind == "spike"
        if anomaly.kind == "not finite":
            action, first, handled = "skipped this optimizer update", anomaly.step - 1, anomaly.steps == IN_A_ROW
            text = f"the {anomaly}; {action}"
        elif handled:
            action = f"as monitor.spike says: {self._settings.monitor.spike}"
        return Event(
            step=anomaly.step,
            kind=_KINDS[anomaly.kind],
            text=text,
            action=action,
            evidence=anomaly.evidence(),
            documents=self._documents_of(range(first, anomaly.step)),
            anomaly=anomaly if handled else None,
        )

    def _performance(self, record: StepRecord) -> Iterator[Event]:
        """Steps that become slower, and a low MFU."""
        if self._speed and (news := self._speed.observe(record.phases, record.sensors)):
            kind = EventKind.SLOW_DOWN if news.kind == "slow" else EventKind.SPEED
            evidence = {name: value for name, value in asdict(news).items() if name != "kind"}
            yield Event(step=record.step, kind=kind, text=str(news), evidence=evidence)
        if self._mfu and (causes := self._mfu.observe(record)):
            text = "the MFU is low, because of:" + "".join(f"\n    {cause}" for cause in causes)
            evidence = dict(causes=[asdict(cause) for cause in causes])
            yield Event(step=record.step, kind=EventKind.LOW_MFU, text=text, evidence=evidence)

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint's metadata."""
        return self._spikes.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue as if the steps since state() had not been."""
        self._spikes.restore(state)
        self._not_finite = 0


def make_monitor(
    settings: config.Config, runtime: Runtime, vocab: int, *, repeated: float, peak: float, compiled: bool, scaled: bool
) -> Monitor:
    """The monitor of a run on its ranks; peak: FLOP/s of a device."""
    context = MfuContext(
        settings=settings,
        parameters=num_parameters(settings.model, vocab).blocks // settings.model.layers,
        peak=peak,
        compiled=compiled,
        device=runtime.device.type,
        precision=runtime.precision,
        dp_size=runtime.dp_size,
        device_memory=device_memory(runtime.device),
    )
    return Monitor(
        settings,
        vocab=vocab,
        repeated=repeated,
        scaled=scaled,
        documents_of=lambda steps: documents_of(settings.out, steps) if runtime.is_main else [],
        speed=SpeedMonitor(runtime.monitor_group, runtime.device, threshold=settings.monitor.slowdown),
        mfu=MfuMonitor(context),
    )
