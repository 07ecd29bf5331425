"""Where the time and the memory of a few steps go: `fasttrain train --profile`. docs/profile.md explains the files."""

from fasttrain.tools.profiling.profiler import Profiler, check

__all__ = ["Profiler", "check"]
