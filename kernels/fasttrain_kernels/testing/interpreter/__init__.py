"""Triton kernels on CPU tensors, without a GPU and without environment variables.

    with interpret() as launches:
        y = rms_norm(x, weight)      # the op launches its kernels; their programs run one after another, in numpy
    print(launches)                  # bytes per argument, dot FLOPs, special functions

context    the switch, and the execution of a launch: start reading here
arguments  what a kernel gets: pointers and scalars, typed as Triton's JIT does
rewrite    a @triton.jit function as a Python function
language   triton.language while kernels are interpreted (reductions: tl.reduce; shapes: a cache)
numerics   arithmetic on tiles, rounded as hardware rounds (libdevice: CUDA's functions)
memory     loads and stores: checked, executed and counted
launches   counts of a launch, and errors
"""

from fasttrain_kernels.testing.interpreter.context import interpret
from fasttrain_kernels.testing.interpreter.launches import (
    KernelError,
    Launch,
    Launches,
    OutOfBounds,
    Traffic,
    WriteRace,
)

__all__ = ["KernelError", "Launch", "Launches", "OutOfBounds", "Traffic", "WriteRace", "interpret"]
