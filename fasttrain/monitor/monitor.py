"""All that is judged at every step, in one place: spikes, values that are not finite, the first loss, the envelope, and
blocks that do not learn or explode.

Judged are sums over all ranks, so that every rank comes to the same conclusion at the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fasttrain import config
from fasttrain.monitor.sanity import Blocks, Envelope, first_loss_suspicion, pretrained_loss_suspicion
from fasttrain.monitor.spikes import SpikeDetector, Verdict

IN_A_ROW = 3  # losses that are not finite: one is a batch, whose update was left out; three are the weights


class Incident(NamedTuple):
    """For incidents.jsonl."""

    kind: str
    text: str
    evidence: dict[str, Any]
    action: str = ""
    began: int | None = None  # the step in which it did, where the data may be to blame


class Alarm(NamedTuple):
    """Something is to be done."""

    step: int  # that was judged
    verdict: Verdict

    @property
    def first(self) -> int:
        """The step in which it began."""
        return self.step - max(self.verdict.steps, 1) + 1


class Judges:
    """observe() every step; `alarm` stays until somebody has seen to it and taken it away."""

    def __init__(self, settings: config.Config, *, vocab: int, scaled: bool = False) -> None:
        """scaled: fp16, whose loss scale now and then has an infinite norm."""
        self._settings, self._vocab = settings, vocab
        self._spikes = SpikeDetector(first=settings.watch.first, scaled=scaled)
        self._envelope = Envelope(settings.watch.envelope)
        self._blocks = Blocks()
        self._not_finite = 0  # in a row
        self.alarm: Alarm | None = None

    def observe(
        self, step: int, tokens: int, loss: float, norm: float, block_norms: Sequence[float] = ()
    ) -> Iterator[Incident]:
        """What is new. step: from 0; tokens: of the run, with this step."""
        if step == 0 and (suspicion := self._first_loss_suspicion(loss)):
            yield Incident("first loss", suspicion, dict(loss=loss))
        verdict = self._spikes.observe(loss, norm)
        self._not_finite = self._not_finite + 1 if verdict.kind == "not finite" else 0
        if verdict.kind == "not finite":
            verdict = replace(verdict, steps=self._not_finite)
            left_out = "the update of this step was left out"
            yield Incident("not finite", f"the {verdict}; {left_out}", verdict.facts(), left_out, step)
            if self._not_finite == IN_A_ROW:
                self.alarm = self.alarm or Alarm(step, verdict)
        elif verdict.is_new and verdict.kind in ("warning", "spike"):
            alarm = Alarm(step, verdict)
            is_spike = verdict.kind == "spike"
            action = f"as watch.spike says: {self._settings.watch.spike}" if is_spike else ""
            yield Incident(verdict.kind, f"{verdict.kind}: {verdict}", verdict.facts(), action, alarm.first)
            if is_spike:
                self.alarm = self.alarm or alarm
        if outside := self._envelope.observe(tokens, loss):
            yield Incident("envelope", str(outside), outside.facts())
        for sick in self._blocks.observe(block_norms):
            yield Incident(f"{sick.kind} block", str(sick), sick.facts())

    def _first_loss_suspicion(self, loss: float) -> str:
        settings = self._settings
        if settings.from_hf is not None:
            return pretrained_loss_suspicion(loss, self._vocab, str(settings.from_hf))
        return first_loss_suspicion(loss, settings.model, self._vocab, settings.optim.z_loss)

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint's facts."""
        return self._spikes.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as if the steps since state() had not been."""
        self._spikes.restore(state)
        self._not_finite, self.alarm = 0, None
