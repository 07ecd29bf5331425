"""Kernels compiled ahead of time, without a GPU: registers, spills, shared memory, occupancy and instructions.

    with record("sm_90") as launches:
        swiglu(torch.empty(8192, 14336, dtype=torch.bfloat16), torch.empty(8192, 14336, dtype=torch.bfloat16))
    for facts in launches.facts:
        print(facts.kernel, facts.registers, facts.spills, facts.occupancy, facts.loads)

`python -m fasttrain_kernels.testing.compiled` prints the table for every kernel that fasttrain ships.

    recording          a Triton driver that compiles what is launched, and runs nothing
    listing            instructions, loops and counts; nvidia and amd read them from a binary
    facts              what comes out
    cases, survey      the launches that fasttrain ships, compiled for a target
    rules              what they must satisfy, and the stored figures
"""

from fasttrain_kernels.testing.compiled.facts import Facts
from fasttrain_kernels.testing.compiled.recording import RecordedLaunch, RecordedLaunches, record

__all__ = ["Facts", "RecordedLaunch", "RecordedLaunches", "record"]
