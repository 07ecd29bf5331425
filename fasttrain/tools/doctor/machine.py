"""Processors, memory and limits, as this process has them: a container with 2 of 64 cores has 2.

Limits are in cgroups, of version 2 or 1, and those of parents count too; in the affinity of the process; and in ulimit.
`root` is where /proc and /sys are.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from fasttrain.metrics import device_name
from fasttrain.tools.doctor.finding import Finding, gib

SECTION, LIMITS = "hardware", "limits"
ROOT = Path("/")
FILES = 4096  # open files: ranks, shards of data, sockets
SHARED = 2**30  # bytes of /dev/shm: NCCL's buffers between the GPUs of a node


class Cores(NamedTuple):
    usable: int
    installed: int
    why: str  # not all of them; empty: all

    @classmethod
    def of(cls, root: Path = ROOT) -> Cores:
        installed = os.cpu_count() or 1
        bound, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
        usable = min(bound, max(int(min(quota, bound)), 1))
        if usable == installed:
            return cls(usable, installed, "")
        return cls(usable, installed, f"a quota of {quota:g}, by a cgroup" if quota < bound else "bound to them")


def machine(root: Path = ROOT) -> Iterator[Finding]:
    """Processors and memory."""
    cores, threads = Cores.of(root), torch.get_num_threads()
    share = f"{cores.usable} of {cores.installed} cores ({cores.why})" if cores.why else f"{cores.usable} cores"
    name = device_name(torch.device("cpu"))
    yield Finding(section=SECTION, name="processor", value=f"{name}, {share}", figure=cores.usable, unit="cores")
    if threads > cores.usable:
        yield Finding(
            section=SECTION, name="threads", value=f"{threads} threads for {cores.usable} cores", level="warning",
            remedy=f"export OMP_NUM_THREADS={cores.usable}: more threads than cores wait for each other",
        )  # fmt: skip
    installed, limit = _meminfo(root), memory_limit(root)
    total = min(installed["MemTotal"], limit)
    text = f"{gib(total)}, {gib(min(installed['MemAvailable'], limit))} of it available"
    if limit < installed["MemTotal"]:
        text += f" ({gib(installed['MemTotal'])} are installed; a cgroup has the limit)"
    yield Finding(section=SECTION, name="memory", value=text, figure=total, unit="bytes")


def limits(*, gpus: int, shared: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """What the system lets this process have."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"ulimit -n {FILES} (the hard limit is {_number(most)})"
    yield _limit("open files", _number(files), files, fine=_enough(files, FILES), remedy=remedy)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    remedy = "ulimit -l unlimited: InfiniBand and pinned memory need it"
    yield _limit("locked memory", _bytes(locked), locked, fine=gpus < 2 or _enough(locked, SHARED), remedy=remedy)
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    remedy = "ulimit -f unlimited: a checkpoint beyond it cannot be written"
    yield _limit("file size", _bytes(size), size, fine=_enough(size, 2**40), remedy=remedy)
    if shared.exists():
        status = os.statvfs(shared)
        room = status.f_blocks * status.f_frsize
        remedy = "docker run --shm-size=8g, or --ipc=host: NCCL keeps buffers there"
        yield _limit(str(shared), gib(room), room, fine=gpus < 2 or room >= SHARED, remedy=remedy)


def _limit(name: str, value: str, limit: int, *, fine: bool, remedy: str) -> Finding:
    return Finding(
        section=LIMITS,
        name=name,
        value=value,
        level="ok" if fine else "warning",
        remedy="" if fine else remedy,
        figure=None if limit == resource.RLIM_INFINITY else float(limit),
    )


def cpu_quota(root: Path = ROOT) -> float:
    """Cores that cgroups allow; inf: no limit."""
    quotas = [math.inf]
    for directory in _cgroups(root, "cpu"):
        older = _read(directory / "cpu.cfs_quota_us") + " " + _read(directory / "cpu.cfs_period_us")
        pairs = (_read(directory / "cpu.max").split(), older.split())
        # neither "max" nor -1
        quotas += [int(pair[0]) / int(pair[1]) for pair in pairs if len(pair) == 2 and "".join(pair).isdecimal()]
    return min(quotas)


def memory_limit(root: Path = ROOT) -> float:
    """Bytes that cgroups allow; inf: no limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [_read(directory / name).strip() for directory in _cgroups(root, "memory") for name in names]
    return min((float(text) for text in texts if text.isdecimal()), default=math.inf)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The directories of this process's cgroup and of its parents. Within a container, its own may be mounted as /."""
    base = root / "sys/fs/cgroup"
    mounts = [base, base / controller, base / "cpu,cpuacct"]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for mount in mounts:
            inner = mount / path.lstrip("/")
            yield from (each for each in (inner, *inner.parents) if each == mount or mount in each.parents)
    yield from mounts


def _meminfo(root: Path) -> dict[str, float]:
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    found = {words[0].rstrip(":"): float(words[1]) * 1024 for words in lines if len(words) > 1}
    return {"MemTotal": math.nan, "MemAvailable": math.nan} | found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _enough(limit: int, least: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= least


def _number(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _bytes(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:,.0f} MiB"
