"""What a machine has, what a run will make of it, and what is missing: `fasttrain doctor`. docs/doctor.md explains it.

Every question is a function that gives findings. None of them needs what it asks about: a machine without triton, or
without a compiler, is told so.
"""

from fasttrain.tools.doctor.examination import examine
from fasttrain.tools.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]
