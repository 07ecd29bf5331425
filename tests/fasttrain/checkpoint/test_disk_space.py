"""DiskSpace for checkpoints: counted as retention will hold them, and found by what it would delete."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from fasttrain import config
from fasttrain.checkpoint.committed import Checkpoint, list_checkpoints
from fasttrain.checkpoint.disk_space import before_run, before_save, checkpoint_bytes
from fasttrain.checkpoint.retention import expendable, quarantine
from fasttrain.checkpoint.saver import Checkpoints
from fasttrain.flops import state_bytes
from fasttrain.fs import HashedFile, free_bytes
from fasttrain.optimizers import OPTIMIZERS, OptimizerKind
from tests.fasttrain.checkpoint.subject import KEEP_ALL, TINY, VOCAB, Subject, gloo

MB = 10**6
RESERVE = 64 * 2**20


def disk(free: int) -> Callable[[Path], os.statvfs_result]:
    """A file system with so many bytes for users, and more for root."""
    return lambda path: os.statvfs_result((4096, 512, 10**9, 2 * free // 512, free // 512, 0, 0, 0, 0, 255))


def save(directory: Path, step: int, loss: float | None = None, size: int = 1000) -> Path:
    path = directory / f"step-{step:08}"
    path.mkdir(parents=True)
    with HashedFile(path / "weights") as file:
        file.write(bytes(size))
    files = (file.checksum(),)
    Checkpoint(path=path, step=step, loss=loss, optimizer="AdamW", scaler={}, metadata={}, files=files).write()
    return path


@pytest.mark.parametrize("every", [0, 7, 100])
@pytest.mark.parametrize("keep_last", [1, 3])
@pytest.mark.parametrize("keep_every", [0, 14, 200])
@pytest.mark.parametrize("keep_best", [True, False])
def test_before_a_run_counts_at_least_what_it_will_hold(
    tmp_path: Path, every: int, keep_last: int, keep_every: int, keep_best: bool
) -> None:
    keep = config.CheckpointConfig(every=every, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    steps, present, most = 430, [], 0
    for step in range(1, steps + 1):
        if step == steps or (every and step % every == 0):
            path = Path(f"step-{step:08}")
            loss = abs(math.sin(step))
            present.append(
                Checkpoint(path=path, step=step, loss=loss, optimizer="", scaler={}, metadata={}, files=())
            )  # written before the old ones go
            most = max(most, len(present))
            present = [c for c in present if c not in expendable(present, keep)]
    size = 100 * MB
    assert before_run(tmp_path, keep, size=size, steps=steps, statvfs=disk(2 * 10**12)).state == "enough"
    room = before_run(tmp_path, keep, size=size, steps=steps, statvfs=disk(most * size))
    assert room.state == "not enough"  # there is a reserve
    assert most <= round((room.needed - RESERVE) / size / 1.02, 6) <= most + 1 + keep_best


def test_what_a_run_holds_already_needs_no_room_again(tmp_path: Path) -> None:
    keep = config.CheckpointConfig(every=10, keep_last=2, keep_best=False)
    without = before_run(tmp_path, keep, size=1000, steps=100, statvfs=disk(10**9)).needed
    save(tmp_path, 10)
    assert before_run(tmp_path, keep, size=1000, steps=100, statvfs=disk(10**9)).needed == without - 1000


def test_before_a_save_only_what_is_needed_goes(tmp_path: Path) -> None:
    size = 10 * MB
    paths = [save(tmp_path, step, loss, size) for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0))]
    keep = config.CheckpointConfig(keep_last=2, keep_best=True)

    def room(free: int):
        return before_save(tmp_path, keep, size=size, step=50, statvfs=disk(RESERVE + free))

    assert room(11 * MB).state == "enough"
    assert room(10 * MB).prune == (paths[1],)  # 10 is the best
    assert room(1 * MB).prune == (paths[1],)
    assert room(-8 * MB).prune == (paths[1], paths[2])
    assert room(-20 * MB).state == "not enough"
    assert all(path.exists() for path in paths)  # it only judges


def test_the_newest_never_goes_first(tmp_path: Path) -> None:
    save(tmp_path, 10, None, 10 * MB)
    keep = config.CheckpointConfig(keep_last=1, keep_best=False)
    assert before_save(tmp_path, keep, size=10 * MB, step=20, statvfs=disk(RESERVE)).state == "not enough"
    assert before_save(tmp_path / "none", keep, size=10 * MB, step=20, statvfs=disk(0)).state == "not enough"


def test_what_was_set_aside_goes_first_and_its_room_counts(tmp_path: Path) -> None:
    size, keep = 10 * MB, config.CheckpointConfig(every=10, keep_last=2, keep_best=False)
    for step in (10, 20, 30, 40):
        save(tmp_path, step, None, size)
    quarantine(list_checkpoints(tmp_path)[-1:], None)
    room = before_save(tmp_path, keep, size=size, step=40, statvfs=disk(RESERVE + MB))
    assert [path.name.rpartition("-")[0] for path in room.prune] == ["quarantined-step-00000040"]
    room = before_save(tmp_path, keep, size=size, step=40, statvfs=disk(RESERVE + MB - size))
    assert [path.name[:13] for path in room.prune] == ["quarantined-s", "step-00000010"]
    needed = before_run(tmp_path, keep, size=size, steps=40, statvfs=disk(0)).needed
    assert needed == RESERVE + max(int(3 * size * 1.02) - 4 * size, 0)


def test_free_bytes_are_the_users_and_of_the_nearest_directory(tmp_path: Path) -> None:
    asked = []

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path)
        return disk(512 * 1000)(path)

    assert free_bytes(tmp_path / "not" / "yet", statvfs) == 512_000
    assert asked == [tmp_path]
    assert free_bytes(tmp_path) > 0


def test_texts_have_the_numbers_and_the_remedy(tmp_path: Path) -> None:
    keep = config.CheckpointConfig(keep_last=1, keep_best=False)
    save(tmp_path, 10, None, 10 * MB)
    save(tmp_path, 20, None, 10 * MB)
    room = before_save(tmp_path, keep, size=10 * MB, step=30, statvfs=disk(RESERVE + MB))
    assert "77.3 MB are needed and 68.1 MB are free" in str(room)
    assert "deleting step-00000010 is enough" in str(room)
    short = before_save(tmp_path, keep, size=10**9, step=30, statvfs=disk(0))
    assert "keep fewer checkpoints (checkpoint.keep_last" in str(short)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_size_of_a_checkpoint_is_known_before_there_is_one(tmp_path: Path, kind: OptimizerKind) -> None:
    """With many parameters. Those of this one are few, and their names take more room than they do."""
    expected = checkpoint_bytes(tmp_path, state_bytes(TINY, VOCAB, kind))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Checkpoints(tmp_path, KEEP_ALL, group=gloo()) as saver:
            saved = Subject(kind, steps=1).saved(saver)
    finally:
        dist.destroy_process_group()
    tensors = 4 * len(list(Subject(kind).model.parameters()))
    assert saved.bytes <= expected + 2000 * tensors  # what torch adds to each
    assert saved.bytes >= expected
    assert checkpoint_bytes(tmp_path, expected) == saved.bytes == list_checkpoints(tmp_path)[-1].bytes
