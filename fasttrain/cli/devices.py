"""What the commands that run a model share: on which device, in which precision, how much."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager

import torch

from fasttrain.config import ParallelConfig
from fasttrain.distributed.runtime import DTYPES, Runtime, start


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one"
    )
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="auto: fp32 on CPUs, bf16 on GPUs that have it"
    )


def runtime_of(options: argparse.Namespace) -> AbstractContextManager[Runtime]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} sees no GPU; leave it out, or say --device cpu")
    return start(ParallelConfig(device=options.device, precision=options.dtype))


def positive(text: str) -> int:
    """The value of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)
