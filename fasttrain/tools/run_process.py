"""Runs as processes, started as a user starts them: to the end, or killed on the way. None is left behind."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fasttrain.checkpoint.committed import Checkpoint, committed_paths, list_checkpoints
from fasttrain.config import Config
from fasttrain.config_toml import to_toml
from fasttrain.events import EventKind
from fasttrain.metrics.jsonl import read_events, read_metrics
from fasttrain.rundir import RunDir
from fasttrain.units import plural

TRAINER = ("-m", "fasttrain.train")
USER_ERROR = "fasttrain.train: error: "  # what its words about a user's mistake begin with
_TAIL = 20  # lines of a failed run to show
_ATTEMPTS = 3  # to kill a run before it ends by itself

OnProgress = Callable[[str, int], None]  # what is running, and the last step that it has saved


class RunFailed(Exception):
    """A run ended with an error; its last lines."""


class Runs:
    """Runs by name. Each has a directory, a file of settings and a log: NAME, NAME.toml, NAME.log."""

    def __init__(self, directory: Path, on_progress: OnProgress) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.on_progress = on_progress
        self._directory = directory

    def checkpoints(self, name: str) -> dict[int, Checkpoint]:
        """Checkpoints by step."""
        return {saved.step: saved for saved in list_checkpoints(RunDir(self._directory / name).checkpoints)}

    def steps(self, name: str) -> dict[int, dict[str, Any]]:
        """Figures by step."""
        return {line["step"]: line for line in read_metrics(self._directory / name)}

    def resumed_from(self, name: str) -> int:
        """The step that it resumed from by its own account; 0: it started anew."""
        events = read_events(self._directory / name)
        return max((event["step"] for event in events if event["kind"] == EventKind.RESUME), default=0)

    def finish(self, name: str, settings: Config, ranks: int) -> None:
        """Run to the end, from wherever the run is."""
        self._run(name, settings, ranks, f"{name}: to step {settings.batch.steps}")

    def kill(self, name: str, settings: Config, ranks: int, step: int) -> None:
        """Run until a step is saved, and kill it then, whatever it is doing."""
        for _ in range(_ATTEMPTS):
            self._run(name, settings, ranks, f"{name}: until it is killed after step {step}", kill_at=step)
            if max(self.checkpoints(name)) < settings.batch.steps:
                return
            shutil.rmtree(self._directory / name)
        raise ValueError(f"the run ended before it could be killed, {_ATTEMPTS} times; raise --steps")

    def _run(self, name: str, settings: Config, ranks: int, what: str, kill_at: int | None = None) -> None:
        file, out = self._directory / f"{name}.toml", self._directory / name
        file.write_text(to_toml(replace(settings, out=out)))
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
        start = time.monotonic()
        with open(self._directory / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *torchrun, *TRAINER, "--config", str(file)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process alone, which then ends the run
            )  # fmt: skip
            try:
                self._watch(process, f"{what}, on {plural(ranks, 'rank')}", RunDir(out).checkpoints, kill_at)
            finally:
                killed = process.poll() is None
                if killed:
                    kill_tree(process.pid)
                code = process.wait()
        self.seconds[name] += time.monotonic() - start
        if code and not killed:
            text = (self._directory / f"{name}.log").read_text(errors="replace")
            if USER_ERROR in text:  # torchrun has an exit code of its own
                raise ValueError("\n".join(text.rpartition(USER_ERROR)[2].splitlines()[:_TAIL]))
            tail = "\n".join(text.splitlines()[-_TAIL:])
            raise RunFailed(f"the run {name!r} ended with exit code {code}; its last lines:\n{tail}")

    def _watch(self, process: subprocess.Popen[bytes], what: str, directory: Path, kill_at: int | None) -> None:
        """Until the process has ended, or has to be killed."""
        saved, since, took = 0, time.monotonic(), 0.0
        while process.poll() is None:
            self.on_progress(what, saved)
            newest = max((int(path.name.split("-")[1]) for path in committed_paths(directory)), default=0)
            if newest > saved:
                now = time.monotonic()
                saved, since, took = newest, now, now - since if saved else 0.0
            if kill_at is not None and saved >= kill_at:
                time.sleep(random.uniform(0, took))  # in a step, or in a save
                return
            time.sleep(0.002 if kill_at else 0.05)


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all that it has started, torchrun's ranks for example; returns when none is left."""
    tree = _stopped(pid)
    for each in tree:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    while any(map(_is_running, tree)):
        time.sleep(0.005)


def _stopped(pid: int) -> list[int]:
    """A process and its descendants, halted one by one so that none starts another before it is looked at."""
    try:
        os.kill(pid, signal.SIGSTOP)
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]  # of every thread
    except (ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
        return [pid]
    return [pid, *(each for child in " ".join(lists).split() for each in _stopped(int(child)))]


def _is_running(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"  # ended, and not asked about by its parent yet
    return False
