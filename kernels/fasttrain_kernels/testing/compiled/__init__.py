"""Kernels compiled ahead of time, without a GPU: registers, spills, shared memory, occupancy and instructions.

    with record("sm_90") as launches:
        swiglu(torch.empty(8192, 14336, dtype=torch.bfloat16), torch.empty(8192, 14336, dtype=torch.bfloat16))
    for metadata in launches.metadata:
        print(metadata.kernel, metadata.registers, metadata.spills, metadata.occupancy, metadata.loads)

`python -m fasttrain_kernels.testing.compiled` prints the table for every kernel that fasttrain ships.

    recording          a Triton driver that compiles launches, and runs nothing
    listing            instructions, loops and counts; nvidia and amd read them from a binary
    fences             proxy fences between asynchronous copies and matmuls
    metadata           the resources that a kernel takes
    cases, survey      the launches that fasttrain ships, compiled for a target
    rules              what they must satisfy; reading and writing of stored figures
"""

from fasttrain_kernels.testing.compiled.metadata import KernelMetadata
from fasttrain_kernels.testing.compiled.recording import RecordedLaunch, RecordedLaunches, record

__all__ = ["KernelMetadata", "RecordedLaunch", "RecordedLaunches", "record"]
