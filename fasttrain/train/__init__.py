"""Training: `python -m fasttrain.train`, or the same under torchrun for as many devices as there are.

arguments -> runtime -> setup (data, model, optimizer, progress) -> loop
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from fasttrain.cli.errors import user_errors
from fasttrain.cli.parse import load
from fasttrain.distributed.elastic import mistakes_are_final
from fasttrain.events import Event, EventKind, ExitCode
from fasttrain.recipes import RECIPES

if TYPE_CHECKING:
    from fasttrain.config import Config


@mistakes_are_final()
def main(argv: Sequence[str] | None = None) -> int:
    """Check the arguments, before anything is imported that takes seconds; then train. The exit code."""
    with user_errors():
        settings = load(sys.argv[1:] if argv is None else argv, RECIPES)
    from fasttrain.distributed.hang_detector import RankFailure

    try:
        return run(settings)
    except RankFailure as failure:
        print(f"fasttrain.train: {failure}", file=sys.stderr)
        return ExitCode.RANK_FAILURE


def run(settings: Config) -> int:
    """Train in this process, which is one rank; the exit code."""
    from fasttrain.config_toml import to_toml
    from fasttrain.distributed.hang_detector import RankFailure
    from fasttrain.distributed.runtime import start, stop_signals
    from fasttrain.fs import exclusive_lock
    from fasttrain.metrics.logger import RunLogger
    from fasttrain.rundir import RunDir
    from fasttrain.tools.report.page import ReportRefresher
    from fasttrain.tools.validation import validation_sets
    from fasttrain.train.loop import train
    from fasttrain.train.messages import at_start
    from fasttrain.train.results import Results
    from fasttrain.train.setup import prepare

    with ExitStack() as stack:
        with user_errors():
            runtime, rundir = stack.enter_context(start(settings.parallel)), RunDir(settings.out)
            if runtime.is_main:
                taken = f"another process is training in {rundir.path}"
                stack.enter_context(exclusive_lock(rundir.lock, taken))
            with runtime.hang_detector.naming_failed_ranks():
                state, report = prepare(settings, runtime)
                sets = validation_sets(state.data, settings, runtime)
            refresh = ReportRefresher(rundir) if settings.log.report and runtime.is_main else lambda running: None
            step, tokens = state.progress.step, state.progress.tokens
            logger = RunLogger(settings, step=step, tokens=tokens, is_main=runtime.is_main, refresh_report=refresh)
        stack.callback(logger.abandon)
        signals = stack.enter_context(stop_signals())
        if runtime.is_main:
            rundir.config.write_text(to_toml(settings))
        state.record_segment()
        logger.write(at_start(state, report))
        try:
            return train(state, sets, Results(state, peak=report.peak), logger, signals)
        except RankFailure as failure:
            step, kind, evidence = state.progress.step, EventKind.RANK_FAILURE, dict(error=str(failure.__cause__))
            logger.write([Event(step=step, kind=kind, text=str(failure), action="ends the run", evidence=evidence)])
            logger.close(ExitCode.RANK_FAILURE)
            raise
