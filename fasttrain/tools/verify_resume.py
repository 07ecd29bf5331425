"""Whether a run that is killed resumes as if it had not been: tried with the user's own settings, in real processes.

    whole    steps 1 to N at once
    killed   the same, but all its processes are killed once step k is saved; the same command resumes it, up to N
    moved    from the whole run's checkpoint of step k to N, on another number of ranks
    calm     as moved, on as many ranks as the others; only where there is dropout

`killed` has to be `whole` bit by bit. `moved` adds up in another order: it has to see the same batches and to have the
losses of `whole` within rounding. Each rank draws its own dropout: `moved` goes without, and is compared with `calm`.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from fasttrain.checkpoint.compare import Difference, differences, names
from fasttrain.checkpoint.resume import Change, changed_settings
from fasttrain.config import Config
from fasttrain.config_toml import to_toml
from fasttrain.distributed.runtime import choose_device, resolve_precision
from fasttrain.metrics.hardware import device_name
from fasttrain.tools.run_process import OnProgress, Runs
from fasttrain.units import plural

FORMAT, VERSION = "fasttrain verify-resume", 1
FIGURES = ("loss", "grad_norm")
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}  # relative, of losses on another number of ranks
_SHOWN, _STORED = 3, 20  # tensors that differ, the greatest differences first

Steps = dict[int, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial. Settings are those of the run `whole`, as short as it can be."""

    settings: Config
    changed: list[Change]  # against the user's
    digest: str  # of the user's
    kill_at: int
    ranks: int
    other_ranks: int  # 0: not tried
    gpus: int  # 0: on the CPU

    @property
    def precision(self) -> str:
        return resolve_precision(self.settings.parallel.precision, torch.device("cuda" if self.gpus else "cpu"))

    def moved(self, checkpoint: Path) -> Config:
        """The same for the other number of ranks, whose share of a step may need smaller micro-batches."""
        calm = self.calm(checkpoint)
        micro = math.gcd(calm.batch.micro, calm.batch.sequences // self.other_ranks)
        return replace(calm, batch=replace(calm.batch, micro=micro))

    def calm(self, checkpoint: Path) -> Config:
        """Without dropout, from a checkpoint of the whole run."""
        model = replace(self.settings.model, dropout=0.0, attention_dropout=0.0)
        return replace(self.settings, model=model, resume=str(checkpoint), from_hf=None)  # one place to start from


def plan_trial(
    settings: Config,
    *,
    steps: int,
    kill_at: int,
    save_every: int = 1,
    ranks: int | None = None,  # None: as many as there are GPUs; as few as possible on a CPU
    other_ranks: int | None = None,  # None: any other number that is possible; 0: none
) -> Trial:
    """The trial that is asked for. Numbers of ranks that cannot be are an error."""
    gpus = torch.cuda.device_count() if choose_device(settings.parallel.device).type == "cuda" else 0
    ranks = _ranks(settings, gpus, ranks)
    other_ranks = _other_ranks(settings, gpus, ranks, other_ranks)
    short = shortened(settings, steps=steps, save_every=save_every)
    before = to_toml(replace(settings, out=Path("run"), resume="auto"))  # equal for equal runs, wherever they are
    return Trial(
        settings=short, changed=changed_settings(before, short), digest=hashlib.sha256(before.encode()).hexdigest(),
        kill_at=kill_at, ranks=ranks, other_ranks=other_ranks, gpus=gpus,
    )  # fmt: skip


def shortened(settings: Config, *, steps: int, save_every: int) -> Config:
    """The same run in fewer steps, whose checkpoints all stay, and without what is no part of its state."""
    optim, validation = settings.optim, settings.validation
    decay = optim.decay_fraction if optim.schedule == "wsd" else 0.0
    return replace(
        settings,
        resume="auto",
        batch=replace(settings.batch, steps=steps),
        optim=replace(optim, warmup=min(optim.warmup, steps // 4, int(steps * (1 - decay)))),
        checkpoint=replace(settings.checkpoint, every=save_every, keep_last=steps),
        validation=replace(validation, every=0, sequences=min(validation.sequences, 1), sample=""),
        log=replace(settings.log, tensorboard=False, wandb=""),
    )


def _ranks(settings: Config, gpus: int, asked: int | None) -> int:
    most, micro = gpus or settings.parallel.dp_replicate or 1, settings.batch.micro
    possible = (n for n in range(most, 0, -1) if not _problem(settings, gpus, n, micro))
    ranks = next(possible, most) if asked is None else asked
    if problem := _problem(settings, gpus, ranks, micro):
        raise ValueError(f"--ranks {ranks}: {problem}")
    return ranks


def _other_ranks(settings: Config, gpus: int, ranks: int, asked: int | None) -> int:
    if asked is None:
        others = (*range(ranks - 1, 0, -1), *range(ranks + 1, (gpus or 4 * ranks) + 1))
        return next((n for n in others if not _problem(settings, gpus, n)), 0)
    if asked == ranks:
        raise ValueError(f"--other-ranks {asked} is the number of ranks itself; choose another, or 0 for none")
    if asked and (problem := _problem(settings, gpus, asked)):
        raise ValueError(f"--other-ranks {asked}: {problem}")
    return asked


def _problem(settings: Config, gpus: int, ranks: int, micro: int = 1) -> str:
    """Why the settings cannot run on so many ranks; empty: they can."""
    if gpus and ranks > gpus:
        return f"there are {gpus} GPUs"
    return settings.parallel.indivisible(ranks) or replace(settings.batch, micro=micro).indivisible(ranks)


@dataclass(frozen=True)
class ResumeResult:
    """The outcome of a comparison."""

    name: str
    result: Literal["bitwise", "within rounding", "differs", "not tried"]
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)


def verify_resume(trial: Trial, directory: Path, on_progress: OnProgress) -> dict[str, Any]:
    """Do the runs in a directory that is empty, and compare them; what verify_resume.json says."""
    runs = Runs(directory, on_progress)
    runs.finish("whole", trial.settings, trial.ranks)
    results = [_killed(trial, runs), _moved(trial, runs)]
    metadata = runs.checkpoints("whole")[trial.kill_at].metadata
    device = torch.device("cuda" if trial.gpus else "cpu")
    found = {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "passed": all(each.result != "differs" for each in results),
        "results": [asdict(each) for each in results],
        "steps": trial.settings.batch.steps,
        **{name: getattr(trial, name) for name in ("kill_at", "ranks", "other_ranks")},
        "settings": {"sha256": trial.digest, "changed": [asdict(change) for change in trial.changed]},
        "data": metadata["dataset"],
        "versions": metadata["versions"],
        "hardware": {"device": device.type, "name": device_name(device), "precision": trial.precision},
        "seconds": {name: round(seconds, 1) for name, seconds in runs.seconds.items()},
    }
    # JSON has no nan and no inf: they are words
    return json.loads(json.dumps(found), parse_constant=lambda word: str(float(word)))


def _killed(trial: Trial, runs: Runs) -> ResumeResult:
    """Against the whole run: all figures of all steps, all tensors of all checkpoints."""
    runs.kill("killed", trial.settings, trial.ranks, trial.kill_at)
    trained = max(runs.steps("killed"))
    runs.finish("killed", trial.settings, trial.ranks)
    start = runs.resumed_from("killed")
    repeated = max(trained - start, 0)
    evidence: dict[str, Any] = {"resumed_from": start, "repeated": repeated}
    resumed = f"resumed from step {start}, {plural(repeated, 'step')} repeated"
    if start < trial.kill_at:
        text = f"{resumed}, though step {trial.kill_at} was saved"
        return ResumeResult("killed", "differs", text, evidence)
    runs.on_progress("killed: is compared with whole", 0)
    steps = range(1, trial.settings.batch.steps + 1)
    whole, killed = runs.checkpoints("whole"), runs.checkpoints("killed")
    saved = sorted(whole.keys() & killed.keys())
    figure = _unequal(runs.steps("whole"), runs.steps("killed"), steps, FIGURES)
    after, found = next(((n, found) for n in saved if (found := differences(whole[n], killed[n]))), (None, []))
    if figure is None and after is None:
        tensors = len(names(whole[saved[-1]]))
        text = f"{resumed}; {tensors} tensors in each of {plural(len(saved), 'checkpoint')}, and the losses and "
        text += f"gradient norms of {plural(len(steps), 'step')} are equal"
        return ResumeResult("killed", "bitwise", text, evidence | {"checkpoints": saved})
    first = min(n for n in (after, figure and figure["step"]) if n)
    text = f"{resumed}; the first difference is at step {first}"
    if first <= start:
        text += ", before the kill: with these settings this machine does not repeat a run bit-for-bit, killed or not"
    if found:
        most = ", ".join(map(str, found[:_SHOWN])) + f", and {len(found) - _SHOWN} more" * (len(found) > _SHOWN)
        text += f"; after step {after} {plural(len(found), 'tensor')} differ: {most}"
    if figure:
        text += f"; {figure['name']} of step {figure['step']} is {figure['values'][0]} and {figure['values'][1]}"
    evidence |= {"first_step": first, "figure": figure, "tensors_after": after, **_evidence(found)}
    return ResumeResult("killed", "differs", text, evidence)


def _moved(trial: Trial, runs: Runs) -> ResumeResult:
    """Against the whole run, or the calm one: the same batches, losses within rounding."""
    if not trial.other_ranks:
        return ResumeResult("moved", "not tried", "not asked for, or no other number is possible")
    source = runs.checkpoints("whole")[trial.kill_at].path
    calm, moved = trial.calm(source), trial.moved(source)
    reference = "whole" if calm.model == trial.settings.model else "calm"
    if reference == "calm":
        runs.finish("calm", calm, trial.ranks)
    runs.finish("moved", moved, trial.other_ranks)
    start, steps = runs.resumed_from("moved"), range(trial.kill_at + 1, moved.batch.steps + 1)
    text = f"resumed from step {start} with batch.micro {moved.batch.micro}"
    text += " and without dropout" if reference == "calm" else ""
    evidence: dict[str, Any] = {"resumed_from": start, "against": reference, "micro": moved.batch.micro}
    if start != trial.kill_at:
        return ResumeResult("moved", "differs", f"{text}, instead of step {trial.kill_at}", evidence)
    runs.on_progress(f"moved: is compared with {reference}", 0)
    one, other = runs.steps(reference), runs.steps("moved")
    if batches := _unequal(one, other, steps, ("valid_tokens",)):
        text += f"; its batches are others from step {batches['step']} on"
        return ResumeResult("moved", "differs", text, evidence)
    last, tolerance = steps[-1], TOLERANCE[trial.precision]
    gaps = {name: max((_gap(one[n][name], other[n][name]), n) for n in steps) for name in FIGURES}
    found = differences(runs.checkpoints(reference)[last], runs.checkpoints("moved")[last])
    evidence |= {"greatest": {name: {"relative": gap, "step": n} for name, (gap, n) in gaps.items()}}
    evidence |= {"tolerance": tolerance, **_evidence(found)}
    if not found and not any(gap for gap, _ in gaps.values()):
        return ResumeResult("moved", "bitwise", text, evidence)
    greatest = ", ".join(f"{name} {gap:.1e} at step {n}" for name, (gap, n) in gaps.items())
    text += f"; greatest relative differences: {greatest} ({tolerance:g} is allowed for the loss)"
    text += f"; of {plural(len(found), 'tensor')} that differ after step {last}, most: {found[0]}" if found else ""
    within = gaps["loss"][0] <= tolerance
    return ResumeResult("moved", "within rounding" if within else "differs", text, evidence)


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


def _evidence(found: list[Difference]) -> dict[str, Any]:
    return {"differing_tensors": len(found), "tensors": [asdict(difference) for difference in found[:_STORED]]}
