"""The certificate: what the runs of a trial have in common, and where and when it was tried."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from fasttrain.checkpoint.compare import Difference, differences, names
from fasttrain.metrics import device_name
from fasttrain.tools.verify_resume.runs import Report, Runs
from fasttrain.tools.verify_resume.trial import Trial

FORMAT, VERSION = "fasttrain resume certificate", 1
FIGURES = ("loss", "grad_norm")
TOLERANCE = {"fp32": 1e-5}  # relative, of losses on another number of ranks
COARSE = 1e-3  # the same in bf16 and fp16
_SHOWN, _STORED = 3, 20  # tensors that differ, the greatest differences first

Steps = dict[int, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What came out of a comparison."""

    name: str
    verdict: Literal["bitwise", "within rounding", "differs", "not tried"]
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


def certify(trial: Trial, directory: Path, report: Report) -> dict[str, Any]:
    """Do the runs in a directory that is empty, and compare them; the certificate as JSON has it."""
    runs = Runs(directory, report)
    runs.finish("whole", trial.settings, trial.ranks)
    parts = [_killed(trial, runs), _moved(trial, runs)]
    facts = runs.checkpoints("whole")[trial.kill_at].metadata
    device = torch.device("cuda" if trial.gpus else "cpu")
    certificate = {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "certified": all(part.verdict != "differs" for part in parts),
        "parts": [asdict(part) for part in parts],
        "steps": trial.settings.batch.steps,
        "kill_at": trial.kill_at,
        "ranks": trial.ranks,
        "other_ranks": trial.other_ranks,
        "settings": {"sha256": trial.digest, "changed": [asdict(change) for change in trial.changed]},
        "data": facts["dataset"],
        "versions": facts["versions"],
        "hardware": {"device": device.type, "name": device_name(device), "precision": trial.precision},
        "seconds": {name: round(seconds, 1) for name, seconds in runs.seconds.items()},
    }
    return _plain(certificate)


def _killed(trial: Trial, runs: Runs) -> Part:
    """Against the whole run: all figures of all steps, all tensors of all checkpoints."""
    runs.kill("killed", trial.settings, trial.ranks, trial.kill_at)
    trained = max(runs.steps("killed"))
    runs.finish("killed", trial.settings, trial.ranks)
    start = runs.resumed_from("killed")
    repeated = max(trained - start, 0)
    facts: dict[str, Any] = {"resumed_from": start, "repeated": repeated}
    went = f"went on from step {start}, {_count(repeated, 'step')} repeated"
    if start < trial.kill_at:
        text = f"{went}, though step {trial.kill_at} was saved"
        return Part(name="killed", verdict="differs", text=text, facts=facts)
    runs.report("killed: is compared with whole", 0)
    steps = range(1, trial.settings.batch.steps + 1)
    whole, killed = runs.checkpoints("whole"), runs.checkpoints("killed")
    saved = sorted(whole.keys() & killed.keys())
    figure = _unequal(runs.steps("whole"), runs.steps("killed"), steps, FIGURES)
    after, found = next(((n, found) for n in saved if (found := differences(whole[n], killed[n]))), (None, []))
    if figure is None and after is None:
        text = f"{went}; {len(names(whole[saved[-1]]))} tensors in each of {_count(len(saved), 'checkpoint')}, and the "
        text += f"losses and gradient norms of {_count(len(steps), 'step')} are equal"
        return Part(name="killed", verdict="bitwise", text=text, facts=facts | {"checkpoints": saved})
    first = min(n for n in (after, figure and figure["step"]) if n)
    text = f"{went}; the first difference is at step {first}"
    if first <= start:
        text += ", before the kill: with these settings this machine does not repeat a run bitwise, killed or not"
    if found:
        text += f"; after step {after} {_count(len(found), 'tensor')} differ: {_list(found)}"
    if figure:
        text += f"; {figure['name']} of step {figure['step']} is {figure['values'][0]} and {figure['values'][1]}"
    facts |= {"first_step": first, "figure": figure, "tensors_after": after, **_facts(found)}
    return Part(name="killed", verdict="differs", text=text, facts=facts)


def _moved(trial: Trial, runs: Runs) -> Part:
    """Against the whole run, or the calm one: the same batches, losses within rounding."""
    if not trial.other_ranks:
        return Part(name="moved", verdict="not tried", text="left out, or no other number is possible")
    source = runs.checkpoints("whole")[trial.kill_at].path
    calm, moved = trial.calm(source), trial.moved(source)
    reference = "whole" if calm.model == trial.settings.model else "calm"
    if reference == "calm":
        runs.finish("calm", calm, trial.ranks)
    runs.finish("moved", moved, trial.other_ranks)
    start, steps = runs.resumed_from("moved"), range(trial.kill_at + 1, moved.batch.steps + 1)
    text = f"went on from step {start} with batch.micro {moved.batch.micro}"
    text += " and without dropout" if reference == "calm" else ""
    facts: dict[str, Any] = {"resumed_from": start, "against": reference, "micro": moved.batch.micro}
    if start != trial.kill_at:
        return Part(name="moved", verdict="differs", text=f"{text}, instead of step {trial.kill_at}", facts=facts)
    runs.report(f"moved: is compared with {reference}", 0)
    one, other = runs.steps(reference), runs.steps("moved")
    if batches := _unequal(one, other, steps, ("valid_tokens",)):
        text += f"; its batches are others from step {batches['step']} on"
        return Part(name="moved", verdict="differs", text=text, facts=facts)
    last, tolerance = steps[-1], TOLERANCE.get(trial.precision, COARSE)
    gaps = {name: max((_gap(one[n][name], other[n][name]), n) for n in steps) for name in FIGURES}
    found = differences(runs.checkpoints(reference)[last], runs.checkpoints("moved")[last])
    facts |= {"greatest": {name: {"relative": gap, "step": n} for name, (gap, n) in gaps.items()}}
    facts |= {"tolerance": tolerance, **_facts(found)}
    if not found and not any(gap for gap, _ in gaps.values()):
        return Part(name="moved", verdict="bitwise", text=text, facts=facts)
    greatest = ", ".join(f"{name} {gap:.1e} at step {n}" for name, (gap, n) in gaps.items())
    text += f"; greatest relative differences: {greatest} ({tolerance:g} is allowed for the loss)"
    text += f"; of {_count(len(found), 'tensor')} that differ after step {last}, most: {found[0]}" if found else ""
    within = gaps["loss"][0] <= tolerance
    return Part(name="moved", verdict="within rounding" if within else "differs", text=text, facts=facts)


def _unequal(one: Steps, other: Steps, steps: Iterable[int], figures: tuple[str, ...]) -> dict[str, Any] | None:
    """The first figure of the first step that differs; nan is equal to itself."""
    for step in steps:
        for name in figures:
            values = [run.get(step, {}).get(name) for run in (one, other)]
            if repr(values[0]) != repr(values[1]):
                return {"step": step, "name": name, "values": values}
    return None


def _gap(one: float, other: float) -> float:
    """Relative; infinite if only one of them is a number."""
    if repr(one) == repr(other):
        return 0.0
    gap = abs(one - other) / abs(one) if one else math.inf
    return math.inf if math.isnan(gap) else gap


def _list(found: list[Difference]) -> str:
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(str, found[:_SHOWN])) + more


def _facts(found: list[Difference]) -> dict[str, Any]:
    return {"differing_tensors": len(found), "tensors": [asdict(difference) for difference in found[:_STORED]]}


def _plain(value: Any) -> Any:
    """JSON has no nan and no inf: they are words."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
