"""All that is looked at, in the order in which it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fasttrain.config import Config
from fasttrain.tools.doctor.cards import cards
from fasttrain.tools.doctor.estimate import SECTION as OUTLOOK
from fasttrain.tools.doctor.estimate import outlook
from fasttrain.tools.doctor.finding import Finding
from fasttrain.tools.doctor.machine import Cores, limits, machine
from fasttrain.tools.doctor.ops import ops
from fasttrain.tools.doctor.software import variables, versions
from fasttrain.tools.doctor.speed import disk, speed


def examine(settings: Config, out: Path, *, quick: bool) -> Iterator[Finding]:
    """Findings as they are made. quick: nothing is measured."""
    environment = dict(os.environ)  # of the user: torch sets some variables as it goes
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpu = gpus > 0 and settings.parallel.device != "cpu"
    yield from machine()
    yield from cards()
    yield from limits(gpus=gpus)
    yield from versions(settings, on_gpu=on_gpu)
    yield from variables(environment)
    try:
        yield from outlook(settings, Cores.of().usable)
    except ImportError as error:  # of the trainer itself: ops() says it once more, with its remedy
        yield Finding(section=OUTLOOK, name="nothing", value=str(error))
    yield from ops()
    yield from disk(out, measure=not quick)
    if not quick:
        yield from speed(torch.device("cuda" if on_gpu else "cpu"))
