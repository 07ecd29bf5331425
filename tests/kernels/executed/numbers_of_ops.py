"""python -m tests.kernels.executed.numbers_of_ops FILE: outputs and gradients, interpreted and executed, with this
environment's Triton. test_versions compares two environments."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor

from fasttrain_kernels.testing import execute, interpret
from fasttrain_kernels.testing.accuracy import _outputs_and_gradients
from tests.kernels.executed.test_ops import SHORT
from tests.kernels.numbers.cases import CASES, DTYPES


def numbers() -> dict[str, Tensor]:
    """By how, case, dtype and tensor."""
    found: dict[str, Tensor] = {}
    for name, dtype in SHORT:
        modes: dict[str, contextlib.AbstractContextManager[Any]] = {
            "interpreted": interpret(),
            "executed": execute("sm_90", bank_conflicts=False, races=False),
        }
        for how, mode in modes.items():
            torch.manual_seed(0)
            with mode:
                results = _outputs_and_gradients(CASES[name].op, CASES[name].inputs(DTYPES[dtype]), 0)
            found |= {f"{how}, {name}, {dtype}, {key}": value.detach().contiguous() for key, value in results.items()}
    return found


if __name__ == "__main__":
    torch.save(numbers(), sys.argv[1])
