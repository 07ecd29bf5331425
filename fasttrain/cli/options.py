"""Options that several commands share: their types, the device that a model runs on, and how tables are printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fasttrain.distributed.runtime import Runtime

RUN_HELP = "a run, one of its steps, or a checkpoint's own directory"  # RUN[@STEP]


def at_least(least: int, why: str = "") -> Callable[[str], int]:
    """The type of an option that is a whole number."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}{why and f': {why}'}")
        return int(text)

    return number


def parsed(parse: Callable[[str], float]) -> Callable[[str], float]:
    """The type of an option that a function of fasttrain.units reads."""

    def value(text: str) -> float:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )
    parser.add_argument(
        "--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
        help="auto: fp32 on CPUs, bf16 on GPUs that have it",
    )  # fmt: skip


def runtime_of(options: argparse.Namespace) -> AbstractContextManager[Runtime]:
    """Start what --device and --dtype ask for."""
    import torch

    from fasttrain.config import ParallelConfig
    from fasttrain.distributed.runtime import start

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} sees no GPU; leave it out, or say --device cpu")
    return start(ParallelConfig(device=options.device, precision=options.dtype))


def console() -> Console:
    """The terminal; or a file, which has no width of its own."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=120)


def table(console: Console, *columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in ("step", "size", "loss") else "left")
    return made
