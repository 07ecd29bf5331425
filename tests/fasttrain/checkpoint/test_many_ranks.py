"""Saving and restoring on several ranks: bitwise on as many, equal on any number, and agreed when one rank fails."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fasttrain import config
from fasttrain.checkpoint import saver
from fasttrain.checkpoint.committed import Checkpoint, newest_valid
from fasttrain.checkpoint.retention import quarantine
from fasttrain.checkpoint.saver import Checkpoints, Failed, Saved
from fasttrain.checkpoint.state import restore
from fasttrain.fs import HashedFile
from tests.fasttrain.checkpoint.subject import FACTS, KEEP_ALL, Subject, assert_equal, run_ranks

KINDS = ("adamw", "muon")


def local(subject: Subject) -> dict[str, torch.Tensor]:
    """This rank's shards, of weights and averages."""
    tensors = {
        f"{name} {key}": tensor
        for name, p in subject.model.named_parameters()
        for key, tensor in (("", p), *subject.optimizer.state[p].items())
    }
    return {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def save_and_restore(group: dist.ProcessGroup, directory: Path) -> None:
    """On as many ranks: every shard has its bits back, and training goes on with the same bits."""
    for kind in KINDS:
        subject = Subject(kind, steps=2)
        expected, shards = subject.tensors(), local(subject)
        if dist.get_rank() == 0:
            torch.save(expected, directory / f"{kind}.expected")
        with Checkpoints(directory / kind, KEEP_ALL, group=group) as checkpoints:
            subject.save(checkpoints)
            subject.train(2)  # while it is being written, with collectives of its own
            (outcome,) = checkpoints.close()
        assert isinstance(outcome, Saved), outcome
        checkpoint = newest_valid(directory / kind, group, pytest.fail)
        assert checkpoint == Checkpoint.read(outcome.path)
        assert outcome.bytes == checkpoint.bytes
        fresh = Subject(kind, seed=1)
        assert restore(checkpoint, fresh.model, fresh.optimizer, fresh.scaler, group=group) == FACTS
        assert_equal(local(fresh), shards)
        fresh.steps = 2
        fresh.train(2)
        assert_equal(fresh.tensors(), subject.tensors())
        assert fresh.scaler.state_dict() == subject.scaler.state_dict()


def restore_elsewhere(group: dist.ProcessGroup, directory: Path) -> None:
    """On another number of ranks, and from replicas (HSDP) to shards: whole tensors are equal."""
    for kind in KINDS:
        expected = torch.load(directory / f"{kind}.expected")
        checkpoint = newest_valid(directory / kind, group, pytest.fail)
        assert checkpoint is not None
        assert {file.name for file in checkpoint.files} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        fresh = Subject(kind, seed=1, mesh=(2, 2) if dist.get_world_size() == 4 else None)
        restore(checkpoint, fresh.model, fresh.optimizer, fresh.scaler, group=group)
        assert_equal(fresh.tensors(), expected)

        with Checkpoints(directory / f"{kind}-{dist.get_world_size()}", KEEP_ALL, group=group) as checkpoints:
            again = fresh.saved(checkpoints)
        assert again.bytes < 1.5 * checkpoint.bytes  # replicas are written once
        other = Subject(kind, seed=2)
        restore(again, other.model, other.optimizer, other.scaler, group=group)
        assert_equal(other.tensors(), expected)


def test_two_ranks_continue_bitwise_and_one_or_four_have_equal_tensors(tmp_path: Path) -> None:
    run_ranks(save_and_restore, 2, tmp_path)
    run_ranks(restore_elsewhere, 1, tmp_path)
    run_ranks(restore_elsewhere, 4, tmp_path)


def fail_on_one(group: dist.ProcessGroup, directory: Path) -> None:
    subject = Subject(steps=1)
    checkpoints = Checkpoints(directory, config.CheckpointConfig(keep_last=1), group=group)
    first = subject.saved(checkpoints)
    for failing in (0, 1):
        write = HashedFile.write
        if dist.get_rank() == failing:
            HashedFile.write = full
        subject.train(1)
        start = time.monotonic()
        subject.save(checkpoints)
        checkpoints.wait()
        assert time.monotonic() - start < 20  # nobody waits for a time-out
        HashedFile.write = write
        assert checkpoints.poll() == [
            Failed(step=subject.steps, error=f"rank {failing}: OSError: [Errno 28] No space left on device")
        ]
        dist.barrier()
        assert os.listdir(directory / first.path.name)
        assert newest_valid(directory, group, pytest.fail) == first
    dist.barrier()
    assert subject.saved(checkpoints).step == 3
    cannot_copy = dist.get_rank() == 1
    if cannot_copy:
        saver.Staging.copy = full  # type: ignore[assignment]
    subject.train(1)
    subject.save(checkpoints)
    assert checkpoints.close() == [Failed(step=4, error="rank 1: OSError: [Errno 28] No space left on device")]
    if dist.get_rank() == 0:
        assert [path.name for path in directory.iterdir() if "store" not in path.name] == ["step-00000003"]


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failure_on_one_rank_is_the_outcome_on_all(tmp_path: Path) -> None:
    run_ranks(fail_on_one, 2, tmp_path)


def damage(group: dist.ProcessGroup, directory: Path) -> None:
    """Ranks read different files, and agree."""
    subject = Subject()
    with Checkpoints(directory, KEEP_ALL, group=group) as checkpoints:
        saved = []
        for _ in range(4):
            subject.train(1)
            saved.append(subject.saved(checkpoints))
    dist.barrier()
    if dist.get_rank() == 0:
        os.truncate(saved[3].path / "__1_0.distcp", 1000)
        content = bytearray((saved[2].path / "__0_0.distcp").read_bytes())
        content[5000] ^= 1
        (saved[2].path / "__0_0.distcp").write_bytes(content)
        (saved[1].path / "checkpoint.json").unlink()
    dist.barrier()
    reports: list[str] = []
    assert newest_valid(directory, group, reports.append) == saved[0]
    assert len(reports) == 3
    assert "step-00000004/__1_0.distcp is truncated, or still being copied: it has 1000 bytes" in reports[0]
    assert "step-00000003/__0_0.distcp is corrupt: its sha256 is" in reports[1]
    assert "step-00000002 has no checkpoint.json" in reports[2]
    with pytest.raises(ValueError, match="step-00000004/__1_0.distcp is truncated"):
        saved[3].verify(group)
    quarantine(saved[2:], group)
    dist.barrier()
    assert [path.exists() for path in (c.path for c in saved)] == [True, True, False, False]


def test_damage_is_found_together(tmp_path: Path) -> None:
    run_ranks(damage, 2, tmp_path)


def lose_a_rank(group: dist.ProcessGroup, directory: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torch ends all ranks with the first
    subject = Subject(steps=1)
    checkpoints = Checkpoints(directory, KEEP_ALL, group=group)
    first = subject.saved(checkpoints)
    dist.barrier()
    if dist.get_rank() == 1:
        HashedFile.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    subject.train(1)
    subject.save(checkpoints)
    start = time.monotonic()
    (outcome,) = checkpoints.close()
    assert time.monotonic() - start < 20
    assert isinstance(outcome, Failed)
    assert outcome.error.startswith("rank 0: ")
    first.verify()
    assert sorted(path.name for path in directory.iterdir() if "store" not in path.name) == ["step-00000001"]
    (directory / "store-survivor").touch()
    os._exit(0)  # leaving the group would wait for the dead


def test_a_rank_that_is_killed_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="SIGKILL"):
        run_ranks(lose_a_rank, 2, tmp_path)
    for _ in range(100):  # the rank that is left is not waited for
        if (tmp_path / "store-survivor").exists():
            return
        time.sleep(0.1)
    pytest.fail("rank 0 did not learn that rank 1 was gone")
