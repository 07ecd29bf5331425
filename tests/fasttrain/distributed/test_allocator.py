"""Memory that a step frees is there for the next one: without page faults."""

import platform
import subprocess
import sys

import pytest

# A process of its own: the setting is the process's, and cannot be taken back.
PROGRAM = """
import resource, sys
import torch
from fasttrain.distributed.runtime import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(10, 2**20) for _ in range(8)]  # 40 MB each: more than glibc would keep
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_used_again():
    faults = {}
    for setting in ("keep", "default"):
        run = subprocess.run([sys.executable, "-c", PROGRAM, setting], capture_output=True, text=True, check=True)
        faults[setting] = int(run.stdout)
    assert faults["keep"] < faults["default"] / 10
