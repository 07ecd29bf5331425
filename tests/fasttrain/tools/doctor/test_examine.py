import os
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import pytest
import torch

from fasttrain.tools.doctor import examine as subject
from fasttrain.tools.doctor.examine import disk, speed, write_and_sync

CPU = torch.device("cpu")


def test_rates_are_measured():
    """By other means: a product, timed here. A busy machine changes them; not tenfold."""
    single, half = speed(CPU)
    for finding, dtype, size in ((single, torch.float32, 512), (half, torch.bfloat16, 256)):
        a = torch.randn(size, size).to(dtype)
        begins = [(perf_counter(), a @ a)[0] for _ in range(20)]
        best = min(b - a for a, b in pairwise(begins))
        assert 0.1 < finding.figure / (2 * size**3 / best) < 10, finding.name
    assert ("times slower, so that CPUs train in fp32" in half.value) == (single.figure > 1.5 * half.figure)


def test_writing_leaves_nothing(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size) or fsync(number))
    written, seconds = write_and_sync(tmp_path, 2**23)
    assert written == 2**23
    assert synced == [2**23]  # all of it
    assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_yet_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "WRITTEN", 2**22)
    free, write = disk(tmp_path / "runs" / "tiny", measure=True)
    assert free.value.endswith(f"GB in {tmp_path}")
    assert write.unit == "B/s"
    assert not (tmp_path / "runs").exists()


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")  # root may write anywhere: a real one would not refuse it

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    for measure in (True, False):
        write = list(disk(tmp_path, measure=measure))[-1]
        assert (write.level, write.value) == ("broken", "cannot write: Permission denied")
        assert write.remedy == f"make it writable (chown, or remount), or choose another --out than {tmp_path}"


@pytest.mark.skipif(not Path("/proc/sys").exists(), reason="needs Linux")
def test_a_place_where_really_nobody_writes():
    write = list(disk(Path("/proc/sys/runs"), measure=False))[-1]
    assert write.level == "broken"


def test_little_disk_space_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(subject, "free_bytes", lambda _: 10**9)
    free = next(iter(disk(tmp_path, measure=False)))
    assert (free.level, free.figure) == ("warning", 10**9)
    assert "free some disk space" in free.remedy
