"""Triton kernels executed on CPU tensors as they are compiled: the PTX, instruction by instruction, without a GPU.

    with execute("sm_90") as launches:
        y = rms_norm(x, weight)      # the op launches its kernels; Triton compiles them for sm_90
    print(launches)                  # instructions by class, bytes, bank conflicts, and what hardware leaves undefined

context      the switch, and the arguments of a launch: start reading here
ptx          the text of a kernel; program: translated
machine      batches of blocks, barriers, schedules; lanes: control flow
translate    operands, and the registry of rules; values: the types of PTX
arithmetic   rules: a table to be read beside the PTX manual
accesses     rules: loads, stores, asynchronous copies, atomics
warps        rules: shuffles, matrices, mma; wgmma (sm_90), tcgen05 (sm_100), descriptors
tma          rules: bulk copies of tiles, tensor maps; mbarriers; specialised: warps with different tasks
memory       bounds, initialisation, races (hazards), bank conflicts (conflicts)
launches     counts and findings of a launch
"""

from fasttrain_kernels.testing.executed.context import execute
from fasttrain_kernels.testing.executed.launches import ExecutedLaunch, ExecutedLaunches
from fasttrain_kernels.testing.executed.memory import Fault
from fasttrain_kernels.testing.executed.ptx import Unsupported

__all__ = ["ExecutedLaunch", "ExecutedLaunches", "Fault", "Unsupported", "execute"]
