"""Cores, memory and limits, on machines that are made of files."""

import math
import os
import resource

import pytest

from fasttrain.tools.doctor import machine as subject
from fasttrain.tools.doctor.machine import Cores, cpu_quota, limits, machine, memory_limit

MEMINFO = "MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n"


@pytest.fixture
def root(tmp_path):
    def make(**files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def test_a_container_with_2_of_64_cores_says_2(root, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(subject.torch, "get_num_threads", lambda: 64)
    place = root(**{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"})
    assert Cores.of(place) == (2, 64, "a quota of 2, by a cgroup")
    processor, threads, memory = machine(place)
    assert processor.value.endswith("2 of 64 cores (a quota of 2, by a cgroup)")
    assert processor.figure == 2
    assert (threads.level, threads.value) == ("warning", "64 threads for 2 cores")
    assert threads.remedy.startswith("export OMP_NUM_THREADS=2")
    assert memory.value == "64.0 GiB, 32.0 GiB of it available"


def test_affinity_counts_too(root, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7})
    assert Cores.of(root()) == (3, 64, "bound to them")
    half = root(**{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert Cores.of(half).usable == 1  # there is at least one


@pytest.mark.parametrize(("files", "quota"), [
    ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
    ({"sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5),  # a parent's
    ({"sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "400000\n", "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n"}, 4),
    ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
    ({}, math.inf),
])  # fmt: skip
def test_quotas_of_both_versions_of_cgroups(files, quota, root):
    assert cpu_quota(root(**{"proc/self/cgroup": "4:cpu,cpuacct:/a/b\n0::/a/b\n", **files})) == quota


def test_memory_is_what_the_cgroup_allows(root):
    place = root(**{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{8 * 2**30}\n"})
    assert memory_limit(place) == 8 * 2**30
    memory = list(machine(place))[-1]
    assert memory.value == "8.0 GiB, 8.0 GiB of it available (64.0 GiB are installed; a cgroup has the limit)"
    assert memory.figure == 8 * 2**30
    assert memory_limit(root(**{"sys/fs/cgroup/memory.max": "max\n"})) == math.inf


def test_small_limits_are_told_with_their_remedy(monkeypatch, tmp_path):
    values = {
        resource.RLIMIT_NOFILE: (256, 1024),
        resource.RLIMIT_MEMLOCK: (65536, 65536),
        resource.RLIMIT_FSIZE: (2**30, 2**30),
    }
    monkeypatch.setattr(resource, "getrlimit", values.__getitem__)
    monkeypatch.setattr(os, "statvfs", lambda _: type("Status", (), {"f_blocks": 16, "f_frsize": 2**22}))  # 64 MiB
    files, locked, size, shared = limits(gpus=8, shared=tmp_path)
    assert (files.level, files.remedy) == ("warning", "ulimit -n 4096 (the hard limit is 1,024)")
    assert locked.remedy.startswith("ulimit -l unlimited")
    assert size.remedy.startswith("ulimit -f unlimited")
    assert shared.remedy.startswith("docker run --shm-size=8g")
    assert [finding.level for finding in limits(gpus=1, shared=tmp_path)] == ["warning", "ok", "warning", "ok"]


def test_no_limits_are_fine(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    findings = list(limits(gpus=8))[:3]
    assert [(finding.value, finding.level) for finding in findings] == [("unlimited", "ok")] * 3
