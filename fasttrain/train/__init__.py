"""Training: `python -m fasttrain.train`, or the same under torchrun for as many devices as there are.

arguments -> runtime -> setup (data, model, optimizer, progress) -> loop
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from fasttrain.cli.errors import out_of_memory, user_errors
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
            so_far = dict(step=state.progress.step, tokens=state.progress.tokens)
            logger = RunLogger(settings, **so_far, is_main=runtime.is_main, refresh_report=refresh)
        stack.callback(logger.abandon)
        signals = stack.enter_context(stop_signals())
        if runtime.is_main:
            rundir.config.write_text(to_toml(settings))
        state.record_segment()
        logger.write(at_start(state, report))
        try:
            return train(state, sets, Results(state, peak=report.peak), logger, signals)
        except (RankFailure, RuntimeError) as error:
            kind, text, code = EventKind.RANK_FAILURE, str(error), ExitCode.RANK_FAILURE
            if not isinstance(error, RankFailure):
                kind, text, code = EventKind.OUT_OF_MEMORY, out_of_memory(error, training=True), ExitCode.USER_ERROR
            if text:
                step, evidence = state.progress.step, dict(error=str(error.__cause__ or error))
                logger.write([Event(step=step, kind=kind, text=text, action="ends the run", evidence=evidence)])
                logger.close(code)
            if not text or kind is EventKind.RANK_FAILURE:
                raise
            return code
