"""Metadata of NVIDIA binaries."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from fasttrain_kernels.testing.compiled import record, rules
from fasttrain_kernels.testing.compiled.survey import Row


@triton.jit
def centre_kernel(x, out, BLOCK: tl.constexpr):
    """Holds a whole row in registers: the mean needs all of it, and the subtraction again."""
    col = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * BLOCK + col)
    tl.store(out + tl.program_id(0) * BLOCK + col, row - tl.sum(row, axis=0) / BLOCK)


def floats(*shape):
    return torch.empty(shape)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_spilled_bytes_equal_those_of_ptxas(target, capsys):
    """The compiler's log is the truth, but it is lost when Triton's cache answers: we count instructions instead."""
    with knobs.nvidia.scope(), knobs.compilation.scope(), record(target) as launches:
        knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = True, True
        centre_kernel[(8,)](floats(8, 8192), floats(8, 8192), BLOCK=8192, num_warps=1)
    log = capsys.readouterr().out
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    (metadata,) = launches.metadata
    assert (metadata.spill_stores, metadata.spill_loads) == tuple(map(int, spills))
    assert metadata.spill_stores > 0
    assert metadata.registers == int(re.search(r"Used (\d+) registers", log)[1]) == 255
    assert rules.problems(Row(target, "rms_norm", "fp32", metadata=metadata))[0].startswith(
        f"spills {metadata.spill_stores} B"
    )
