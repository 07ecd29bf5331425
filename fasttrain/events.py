"""What can happen in a run: the kinds of events with their severity, and the exit codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any


class ExitCode(IntEnum):
    """How `python -m fasttrain.train` ends, with its meaning. 128 + n: it saved and ended because of signal n."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    FINISHED = 0, "all steps are done, or `early stop`; saved"
    ERROR = 1, "an error of the program, with a traceback; report it, with config.toml and the last lines"
    USER_ERROR = 2, "a mistake in settings, data or directory, or `out of memory`; the message says what to change"
    STOPPED = 3, "the monitor ended the run, or the loss is not finite: `stop`"
    NOT_SAVED = 4, "its last state is not saved: `not saved`"
    RANK_FAILURE = 5, "another rank died or hangs: `rank failure`"
    LOST_FILES = 6, "saved, but its data or directory is gone: `lost files`"


class Severity(StrEnum):
    """How an event is shown."""

    ERROR = "error"
    WARNING = "warning"
    ACTION = "action"
    INFO = "info"


class EventKind(StrEnum):
    """Every kind of event with its severity, its meaning and what people can do about it; docs/events.md lists them."""

    severity: Severity
    meaning: str
    remedy: str

    def __new__(cls, value: str, severity: Severity, meaning: str, remedy: str = "") -> EventKind:
        member = str.__new__(cls, value)
        member._value_ = value
        member.severity, member.meaning, member.remedy = severity, meaning, remedy
        return member

    # fmt: off
    START = "start", Severity.INFO, "a new run starts"
    RESUME = ("resume", Severity.INFO, "the run resumes from a checkpoint",
        "if it restarted by itself, look at the events before, or at torchrun's log")
    CHANGED_SETTING = ("changed setting", Severity.INFO, "a setting differs from the checkpoint's",
        "if not meant, restart with the former value")
    PLAN = ("plan", Severity.WARNING, "the settings contradict each other, or waste something",
        "change the settings, or accept it")
    DATA = ("data", Severity.WARNING, "the data looks wrong: lint, or another tokenizer than the pretrained weights'",
        "`fasttrain data lint DIR` says what to do")
    FIRST_LOSS = ("first loss", Severity.WARNING, "the first loss is not what the initial weights should have",
        "stop it. Too low: targets in the inputs, or most tokens equal. Too high: model.init_std, or wrong ids")
    NOT_FINITE = ("not finite", Severity.ERROR, "the loss or the gradient norm is not finite; the update is skipped",
        "once: nothing. Often in fp16: use bf16. Often in one step: look at its data (`data locate`)")
    NORM = ("warning", Severity.WARNING, "the gradient norm stays high while the loss does not",
        "if it keeps growing, lower optim.lr or optim.clip; harmless after a plateau")
    SPIKE = ("spike", Severity.ERROR, "the loss stays above the run's own noise for several steps",
        "wait: the next event says what the run does, and why")
    SKIP = ("skip", Severity.ACTION, "the run skips batches (monitor.spike: skip)",
        "look at the documents; the weights have been trained on the bad batches")
    ROLLBACK = ("rollback", Severity.ACTION, "the run returns to an earlier checkpoint and skips the batches since",
        "bad data: remove the documents before the next run. Bad weights: as for `stop`")
    ENVELOPE = ("envelope", Severity.WARNING, "the loss is outside monitor.envelope for 20 steps",
        "compare it with the run that the range is from: `fasttrain report RUN OTHER`")
    DEAD_BLOCK = ("dead block", Severity.WARNING, "a block gets next to no gradient",
        "look at its initial weights and norms")
    EXPLODING_BLOCK = ("exploding block", Severity.WARNING, "a block has 30 times its usual share of the gradient",
        "if it is always the same block, look at model.init_std, model.qk_norm and optim.lr")
    SLOW_DOWN = ("slow-down", Severity.WARNING, "steps have become slower, with the phase and rank that cause it",
        "data: the disk, or data.prefetch; wait: the network; one rank: its node; all ranks: power or heat")
    SPEED = "speed", Severity.INFO, "steps are as fast as before again"
    LOW_MFU = ("low MFU", Severity.WARNING, "the MFU is low, with the causes",
        "change the first cause; `fasttrain plan --search` compares settings without a GPU")
    VALIDATION = ("validation", Severity.WARNING, "a validation loss is worse than guessing",
        "check that the set has the tokenizer of the training data")
    ACCESSORY = ("accessory", Severity.WARNING, "a sample, the report or a logger failed; the run continues",
        "see the error")
    SAMPLE = "sample", Severity.INFO, "a text that the model wrote"
    FAILED_SAVE = ("failed save", Severity.ERROR, "a checkpoint could not be saved; it is retried",
        "free disk space, or do what the error asks for")
    PRUNED = ("pruned", Severity.ACTION, "an old checkpoint was deleted because disk space ran out",
        "free disk space before the next save")
    RETENTION = ("retention", Severity.WARNING, "an old checkpoint could not be deleted",
        "check the directory's permissions; delete it by hand")
    PAUSE = ("pause", Severity.ACTION, "the run pauses until a checkpoint can be saved",
        "free disk space, and it continues by itself; a signal ends it, not saved")
    PAUSE_OVER = "pause over", Severity.INFO, "a checkpoint was saved, and the run continues"
    CORRUPT_CHECKPOINT = ("corrupt checkpoint", Severity.ERROR, "a checkpoint is not what was written; it is not used",
        "check the disk; `fasttrain checkpoint verify RUN` reads all checkpoints. It is not deleted")
    RANK_FAILURE = ("rank failure", Severity.ERROR, "another rank died or hangs; the run ends",
        "read that rank's log and its node's dmesg; if the rank was only slow, raise parallel.timeout")
    OUT_OF_MEMORY = ("out of memory", Severity.ERROR, "a GPU's memory is full; the run ends", "do what the text says")
    STOP = ("stop", Severity.ERROR, "the monitor ended the run, or the loss is not finite",
        "change what it names or lower optim.lr; resume from before it: `--resume RUN@STEP --out NEW`")
    NOT_SAVED = ("not saved", Severity.ERROR, "the run ended, and its last state is not saved",
        "free disk space and start it again: it resumes from its last checkpoint")
    LOST_FILES = ("lost files", Severity.ERROR, "the data or the run's directory is gone; it saved and ended",
        "do what the text says")
    SIGNAL = ("signal", Severity.INFO, "the run was asked to stop; it saved and ended",
        "the same command resumes it")
    EARLY_STOP = ("early stop", Severity.INFO, "the validation loss has not improved for validation.patience times",
        "the best checkpoint is kept; to continue, raise validation.patience")
    FINISH = "finish", Severity.INFO, "all steps are done"
    # fmt: on


_BY_VALUE = {kind.value: kind for kind in EventKind}
STARTS = (EventKind.START, EventKind.RESUME)
FAILURES = (EventKind.NOT_SAVED, EventKind.RANK_FAILURE, EventKind.LOST_FILES)
ENDS = (EventKind.FINISH, EventKind.SIGNAL, EventKind.STOP, EventKind.EARLY_STOP, *FAILURES)


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A step whose loss or gradient norm is out of line."""

    kind: str  # blip, warning, spike or not finite
    is_new: bool = False  # False in the later steps of a warning or spike: it has been reported
    series: str = ""  # loss or gradient norm
    value: float = math.nan
    expected: float = math.nan
    z: float = math.nan  # of this step: deviation over the run's own noise
    steps: int = 0  # since the rise began, this one included
    step: int = 0  # steps completed when it was seen

    @property
    def first(self) -> int:
        """Steps completed before the rise began."""
        return self.step - max(self.steps, 1)

    def __str__(self) -> str:
        if self.kind == "not finite":
            return f"{self.series} is {self.value}"
        duration = "" if self.kind == "blip" else f", for {self.steps} steps"
        return f"{self.series} {self.value:.4g} instead of {self.expected:.4g}, {self.z:.1f} sigma{duration}"

    def evidence(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("series", "value", "expected", "z", "steps")}


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run: a line of events.jsonl."""

    step: int  # steps completed
    kind: EventKind | str  # str: of a file that another version wrote
    text: str
    action: str = ""  # what the run does about it; empty: nothing
    evidence: Mapping[str, Any] = field(default_factory=dict)  # JSON
    documents: Sequence[str] = ()  # that are involved
    tokens: float | None = None  # trained on by then
    time: float = 0.0  # when it was written
    anomaly: Anomaly | None = None  # to be handled by the run; not written

    @property
    def severity(self) -> Severity:
        return getattr(self.kind, "severity", Severity.WARNING)

    def line(self) -> dict[str, Any]:
        """What events.jsonl says."""
        return {name: getattr(self, name) for name in _FIELDS} | {"documents": list(self.documents)}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Event:
        """What a line of events.jsonl says; whatever else the line has is evidence."""
        kind = str(line.get("kind", "event"))
        evidence = line.get("evidence") or {}
        if not isinstance(evidence, Mapping):
            evidence = {"evidence": evidence}
        documents = line.get("documents") or []
        return cls(
            step=round(line.get("step") or 0),
            kind=_BY_VALUE.get(kind, kind),
            text=str(line.get("text", "")),
            action=str(line.get("action") or ""),
            evidence={**evidence, **{k: v for k, v in line.items() if k not in (*_FIELDS, "documents", "nonfinite")}},
            documents=[str(document) for document in documents] if isinstance(documents, list) else [str(documents)],
            tokens=_number(line.get("tokens")),
            time=_number(line.get("time")) or 0.0,
        )


_FIELDS = ("step", "time", "tokens", "kind", "text", "action", "evidence")


def _number(value: Any) -> float | None:
    """A figure; None: it is none, or not finite."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
