"""Saving and restoring in one process: bitwise, at the moment of the call, and with every failure an outcome."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fasttrain import config
from fasttrain.checkpoint import retention, saver
from fasttrain.checkpoint.committed import Checkpoint, list_checkpoints, newest_valid
from fasttrain.checkpoint.saver import Checkpoints, Failed, Saved
from fasttrain.checkpoint.state import restore, verify_weights
from fasttrain.fs import FileChecksum, HashedFile
from fasttrain.optim.optimizer import make_scaler, set_learning_rate
from tests.fasttrain.checkpoint.subject import CPU, FACTS, KEEP_ALL, TINY, Subject, assert_equal, gloo

INLINE = replace(KEEP_ALL, background=False)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield gloo()
    dist.destroy_process_group()


@pytest.fixture
def checkpoints(tmp_path: Path, group: dist.ProcessGroup) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path / "checkpoints", KEEP_ALL, group=group) as made:
        yield made


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# What comes back


@pytest.mark.parametrize("settings", [KEEP_ALL, INLINE], ids=["background", "inline"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_new_process_continues_bitwise(
    tmp_path: Path, group: dist.ProcessGroup, kind: str, settings: config.CheckpointConfig
) -> None:
    subject = Subject(kind, steps=3)
    with Checkpoints(tmp_path, settings, group=group) as checkpoints:
        saved = subject.saved(checkpoints, loss=1 / 3)
    assert (saved.path, saved.step, saved.loss) == (tmp_path / "step-00000003", 3, 1 / 3)
    assert names(saved.path) == [".metadata", "__0_0.distcp", "checkpoint.json"]
    saved.verify()

    fresh = Subject(kind, seed=1)  # has never stepped
    assert restore(saved, fresh.model, fresh.optimizer, fresh.scaler, group=group) == FACTS
    assert_equal(fresh.tensors(), subject.tensors())
    assert fresh.scaler.state_dict() == subject.scaler.state_dict()
    fresh.steps = 3
    for run in (subject, fresh):
        run.train(2)
    assert_equal(fresh.tensors(), subject.tensors())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_saving_changes_nothing_and_an_optimizer_without_state_stays_so(checkpoints: Checkpoints, kind: str) -> None:
    """As after first steps that fp16 skipped. torch's own state dict counts a step for AdamW here."""
    subject, undisturbed = Subject(kind), Subject(kind)
    saved = subject.saved(checkpoints)
    assert len(subject.optimizer.state) == 0
    later = Subject(kind, steps=2)  # rolled back to before its first step
    restore(saved, later.model, later.optimizer, later.scaler)
    assert len(later.optimizer.state) == 0
    later.steps = 0
    for run in (subject, undisturbed, later):
        run.train(2)
    assert_equal(subject.tensors(), undisturbed.tensors())
    assert_equal(later.tensors(), undisturbed.tensors())


def test_gradients_on_the_way_are_no_obstacle(checkpoints: Checkpoints) -> None:
    subject = Subject(steps=2)
    saved, fresh = subject.saved(checkpoints), Subject(seed=1)
    for p in fresh.model.parameters():
        p.grad = torch.zeros_like(p)
    restore(saved, fresh.model, fresh.optimizer, fresh.scaler)
    assert_equal(fresh.tensors(), subject.tensors())


def test_settings_are_the_runs_and_not_the_checkpoints(checkpoints: Checkpoints) -> None:
    subject = Subject(steps=2)
    saved, fresh = subject.saved(checkpoints), Subject()
    set_learning_rate(
        fresh.optimizer, replace(fresh.section, lr=0.5, betas=(0.5, 0.6), weight_decay=0.7, warmup=0), 0, 9
    )
    before = [{k: v for k, v in group.items() if k != "params"} for group in fresh.optimizer.param_groups]
    fresh.scaler.set_growth_interval(7)
    restore(saved, fresh.model, fresh.optimizer, fresh.scaler)
    assert [{k: v for k, v in group.items() if k != "params"} for group in fresh.optimizer.param_groups] == before
    assert fresh.scaler.get_growth_interval() == 7
    assert fresh.scaler.get_scale() == subject.scaler.get_scale() != make_scaler("fp16", CPU).get_scale()


def test_a_scale_is_restored_before_the_first_loss_and_only_where_both_have_one(checkpoints: Checkpoints) -> None:
    subject = Subject(steps=2)
    saved = subject.saved(checkpoints)
    unused, without = make_scaler("fp16", CPU), make_scaler("fp32", CPU)
    restore(saved, subject.model, subject.optimizer, unused)
    restore(saved, subject.model, subject.optimizer, without)
    unused.scale(torch.tensor(1.0))
    assert unused.get_scale() == saved.scaler["scale"]
    assert without.state_dict() == {}
    subject.train(1)
    subject.scaler = without
    plain = subject.saved(checkpoints)
    assert plain.scaler == {}
    restore(plain, subject.model, subject.optimizer, unused)
    assert unused.get_scale() == saved.scaler["scale"]


def test_wrappers_do_not_change_names(checkpoints: Checkpoints) -> None:
    subject, wrapped = Subject(steps=2), Subject(steps=2)
    wrapped.model.blocks[0] = checkpoint_wrapper(wrapped.model.blocks[0])
    wrapped.model.blocks[1].compile()
    saved = wrapped.saved(checkpoints)
    fresh = Subject(seed=1)
    restore(saved, fresh.model, fresh.optimizer, fresh.scaler)
    assert_equal(fresh.tensors(), subject.tensors())
    fresh.model.blocks[1] = checkpoint_wrapper(fresh.model.blocks[1])
    restore(saved, fresh.model, fresh.optimizer, fresh.scaler)
    assert len(fresh.tensors()) == len(subject.tensors())


def restore_without_ranks(rank: int, path: Path, expected: Path) -> None:
    fresh = Subject(seed=1)
    assert not dist.is_initialized()
    assert restore(Checkpoint.read(path), fresh.model) == FACTS
    weights = torch.load(expected)
    assert_equal({name: p.detach() for name, p in fresh.model.named_parameters()}, weights)


def test_a_tool_reads_weights_without_ranks_or_optimizer(tmp_path: Path, checkpoints: Checkpoints) -> None:
    subject = Subject(steps=1)
    saved = subject.saved(checkpoints)
    names = [name for name, _ in subject.model.named_parameters()]
    torch.save({name: x for name, x in subject.tensors().items() if name in names}, tmp_path / "expected")
    spawn(restore_without_ranks, saved.path, tmp_path / "expected").join()


def test_another_model_or_optimizer_is_an_error_that_names_the_difference(checkpoints: Checkpoints) -> None:
    saved = Subject(steps=1).saved(checkpoints)
    muon = Subject("muon")
    with pytest.raises(
        ValueError, match=r"saved with AdamW, whose moments Muon cannot use; resume with the optim.kind"
    ):
        restore(saved, muon.model, muon.optimizer)
    wider = Subject(model=replace(TINY, ffn=64))
    with pytest.raises(
        ValueError, match=r"blocks.0.gate_up.weight is \(96, 32\) there and \(128, 32\) in the model, .*1 m"
    ):
        restore(saved, wider.model)
    deeper = Subject(model=replace(TINY, layers=3))
    with pytest.raises(
        ValueError, match=r"blocks.2.\w+ is absent there and \(\d+,\) in the model.* use the model section"
    ):
        restore(saved, deeper.model)


def test_files_that_vanish_while_loading_are_an_ordinary_error(checkpoints: Checkpoints) -> None:
    """torch's CheckpointException is no Exception, and would pass every handler of a trainer."""
    subject = Subject(steps=1)
    saved = subject.saved(checkpoints)
    (saved.path / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"could not be loaded \(rank 0: FileNotFoundError: .*__0_0.distcp.*verify it"):
        restore(saved, subject.model, subject.optimizer)


# In the background


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing begins when this is set."""
    opened = threading.Event()

    def write(*args: Any) -> list[FileChecksum]:
        assert opened.wait(30)
        return original(*args)

    original = saver.write  # type: ignore[attr-defined]
    monkeypatch.setattr(saver, "write", write)
    return opened


def test_the_state_is_that_of_the_call_while_training_goes_on(checkpoints: Checkpoints, gate: threading.Event) -> None:
    subject, metadata = Subject(steps=1), {"list": [1]}
    for _ in range(2):  # the second time with the buffers of the first
        gate.clear()
        before, scale = subject.tensors(), subject.scaler.get_scale()
        subject.save(checkpoints, metadata=metadata)
        metadata["list"].append(2)
        subject.train(1)
        assert checkpoints.poll() == []
        gate.set()
        checkpoints.wait()
        (outcome,) = checkpoints.poll()
        assert isinstance(outcome, Saved)
        fresh = Subject(seed=1)
        restored = restore(Checkpoint.read(outcome.path), fresh.model, fresh.optimizer, fresh.scaler)
        assert_equal(fresh.tensors(), before)
        assert fresh.scaler.get_scale() == scale
        assert restored == {"list": metadata["list"][:-1]}


def test_a_second_save_waits_for_the_first(checkpoints: Checkpoints, gate: threading.Event) -> None:
    subject = Subject(steps=1)
    subject.save(checkpoints)
    subject.train(1)
    begin = time.monotonic()
    threading.Timer(0.3, gate.set).start()
    subject.save(checkpoints)
    assert 0.2 < time.monotonic() - begin < 5
    outcomes = checkpoints.close()
    assert [outcome.step for outcome in outcomes] == [1, 2]
    assert all(isinstance(outcome, Saved) and outcome.seconds > 0 for outcome in outcomes)
    assert checkpoints.close() == []


def test_buffers_are_used_again(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(steps=1)
    subject.saved(checkpoints)
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: pytest.fail("a new buffer"))
    subject.steps += 1
    subject.saved(checkpoints)


def test_inline_the_save_is_done_on_return_and_needs_no_copy(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver.Staging, "copy", lambda *_: pytest.fail("copied"))
    with Checkpoints(tmp_path, INLINE, group=group) as checkpoints:
        Subject(steps=1).save(checkpoints)
        (outcome,) = checkpoints.poll()
    assert isinstance(outcome, Saved)
    assert outcome.bytes == Checkpoint.read(outcome.path).bytes > 100_000


def test_metadata_that_json_cannot_say_are_an_error_at_the_call(checkpoints: Checkpoints) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        Subject().save(checkpoints, metadata={"path": Path("x")})
    assert checkpoints.close() == []


# Failures


def fails_in(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, name: str) -> None:
    """A method of HashedFile raises on files of this name."""
    original = getattr(HashedFile, method)

    def broken(self: HashedFile, *args: Any) -> Any:
        if str(self.raw.name).endswith(name) and not self.closed:  # type: ignore[attr-defined]
            raise error
        return original(self, *args)

    monkeypatch.setattr(HashedFile, method, broken)


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("method", "error", "name", "message"),
    [
        ("write", FULL, ".distcp", r"^rank 0: OSError: \[Errno 28\] No space left on device$"),
        ("close", OSError(errno.EIO, "Input/output error"), ".distcp", r"^rank 0: OSError: \[Errno 5\] Input/output"),
        ("write", FULL, ".metadata.tmp", r"^rank 0: OSError: \[Errno 28\]"),
        ("write", FULL, "checkpoint.json", r"^rank 0: OSError: \[Errno 28\]"),
        ("write", Unpicklable("odd"), ".distcp", r"^rank 0: Unpicklable: odd$"),
        ("write", SystemExit("thread killed"), ".distcp", r"^rank 0: SystemExit: thread killed"),
    ],
)
def test_a_save_that_fails_is_an_outcome_and_harms_nothing(
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    error: BaseException,
    name: str,
    message: str,
) -> None:
    subject = Subject(steps=1)
    first = subject.saved(checkpoints)
    subject.train(1)
    with monkeypatch.context() as patch:
        fails_in(patch, method, error, name)
        subject.save(checkpoints)
        checkpoints.wait()
    (outcome,) = checkpoints.poll()
    assert isinstance(outcome, Failed)
    assert outcome.step == 2
    assert re.search(message, outcome.error), outcome.error
    assert names(tmp_path / "checkpoints") == ["step-00000001"]
    first.verify()
    assert subject.saved(checkpoints).step == 2


def test_a_disk_that_fills_up_within_a_file_is_reported_as_such(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save then finishes its archive, and fails with an error of its own."""
    original = HashedFile.write

    def write(self: HashedFile, data: Any) -> int:
        if self._size > 500:
            raise FULL
        return original(self, data)

    monkeypatch.setattr(HashedFile, "write", write)
    Subject(steps=1).save(checkpoints)
    (outcome,) = checkpoints.close()
    assert outcome == Failed(step=1, error="rank 0: OSError: [Errno 28] No space left on device")


def test_what_differs_on_the_disk_from_what_was_meant_is_not_published(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = HashedFile.close

    def close(self: HashedFile) -> None:
        path = Path(str(self.raw.name))  # type: ignore[attr-defined]
        first = not self.closed
        original(self)
        if first and path.suffix == ".distcp":
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)

    monkeypatch.setattr(HashedFile, "close", close)
    Subject(steps=1).save(checkpoints)
    (outcome,) = checkpoints.close()
    assert isinstance(outcome, Failed)
    assert "__0_0.distcp is corrupt" in outcome.error
    assert names(tmp_path / "checkpoints") == []


def test_files_that_rank_0_does_not_see_are_not_published(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = saver.write  # type: ignore[attr-defined]
    elsewhere = FileChecksum(name="__1_0.distcp", size=1, sha256="")
    monkeypatch.setattr(saver, "write", lambda *args: [*original(*args), elsewhere])
    Subject(steps=1).save(checkpoints)
    (outcome,) = checkpoints.close()
    assert isinstance(outcome, Failed)
    assert "__1_0.distcp was written by another rank, and rank 0 does not see it" in outcome.error


def test_a_state_that_cannot_be_copied_is_an_outcome(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(saver.Staging, "copy", copy)
    Subject(steps=1).save(checkpoints)
    (outcome,) = checkpoints.close()
    assert outcome == Failed(step=1, error="rank 0: MemoryError: no room")


def test_a_directory_that_has_gone_is_made_again_and_a_file_in_its_place_fails(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    subject = Subject(steps=1)
    (tmp_path / "checkpoints").rmdir()
    assert subject.saved(checkpoints).step == 1
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "checkpoints").touch()
    subject.save(checkpoints)
    (outcome,) = checkpoints.close()
    assert isinstance(outcome, Failed)
    assert "FileExistsError" in outcome.error


def test_a_directory_that_cannot_be_made_is_an_error_at_once(tmp_path: Path, group: dist.ProcessGroup) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match=r"rank 0: \w+Error: .*file"):
        Checkpoints(tmp_path / "file" / "checkpoints", KEEP_ALL, group=group)


# Retention


def test_old_checkpoints_go_only_after_a_success(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config.CheckpointConfig(keep_last=1, keep_best=True, keep_every=4)
    subject = Subject()
    with Checkpoints(tmp_path, settings, group=group) as checkpoints:
        for loss in (3.0, 1.0, 2.0, 4.0, None):
            subject.train(1)
            subject.saved(checkpoints, loss=loss)
        assert [c.step for c in list_checkpoints(tmp_path)] == [2, 4, 5]
        subject.train(1)
        with monkeypatch.context() as patch:
            fails_in(patch, "write", FULL, "checkpoint.json")
            subject.save(checkpoints)
            checkpoints.wait()
        assert [c.step for c in list_checkpoints(tmp_path)] == [2, 4, 5]
        checkpoints.poll()
        subject.saved(checkpoints)
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]


def test_what_cannot_be_deleted_is_told_and_the_new_checkpoint_counts(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    subject = Subject(steps=1)
    with Checkpoints(tmp_path, config.CheckpointConfig(keep_last=1), group=group) as checkpoints:
        subject.saved(checkpoints)
        monkeypatch.setattr(retention, "delete", delete)
        subject.train(1)
        subject.save(checkpoints)
        (outcome,) = checkpoints.close()
    assert isinstance(outcome, Saved)
    assert "step-00000001 could not be deleted (PermissionError" in outcome.trouble
    assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2]


def test_a_step_saved_again_replaces_the_former_without_a_moment_of_neither(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(steps=2)
    seen = []
    original = os.rename

    def rename(old: Path, new: Path) -> None:
        original(old, new)
        if old.parent == tmp_path:
            seen.append([c.path.name for c in list_checkpoints(tmp_path)])

    with Checkpoints(tmp_path, config.CheckpointConfig(keep_last=1), group=group) as checkpoints:
        subject.saved(checkpoints)
        subject.train(1)
        subject.steps = 2
        monkeypatch.setattr(os, "rename", rename)
        again = subject.saved(checkpoints)
    assert seen == [["step-00000002", "step-00000002-2"], ["step-00000002-2"]]
    assert newest_valid(tmp_path, group, pytest.fail) == again
    fresh = Subject(seed=1)
    restore(again, fresh.model, fresh.optimizer, fresh.scaler)
    assert_equal(fresh.tensors(), subject.tensors())


def test_the_one_just_saved_stays_though_later_steps_are_there(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """A run that went back and did not set the later ones aside."""
    subject = Subject(steps=3)
    with Checkpoints(tmp_path, config.CheckpointConfig(keep_last=1), group=group) as checkpoints:
        subject.saved(checkpoints)
        subject.steps = 2
        subject.saved(checkpoints)
    assert [c.step for c in list_checkpoints(tmp_path)] == [2]


# SIGKILL


def spawn(worker: Callable[..., None], *args: Any) -> Any:
    mp.get_context("forkserver").set_forkserver_preload(["tests.fasttrain.checkpoint.subject", "torch._dynamo"])
    return mp.start_processes(worker, args, nprocs=1, join=False, start_method="forkserver")


def die_everywhere(rank: int, original: Path, directory: Path) -> None:
    """On copies of `original`, be killed at the first moment of a save, at the second, ... until one goes through."""
    for moment in range(100):
        shutil.copytree(original, directory / str(moment))
        child = os.fork()  # nothing here has a thread yet
        if child == 0:
            with contextlib.suppress(BaseException):
                save_and_die(directory / str(moment), moment)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return


def save_and_die(directory: Path, moment: int) -> None:
    """Save step 2, which deletes step 1, and be killed just before the given one of all operations on files."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    moments = iter(range(10**6))

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(moments) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    checkpoints = Checkpoints(directory, config.CheckpointConfig(keep_last=1), group=gloo())
    for owner, name in ((HashedFile, "close"), (saver, "sync"), (os, "rename"), (shutil, "rmtree"), (os, "unlink")):
        setattr(owner, name, deadly(getattr(owner, name)))
    Subject(steps=2).save(checkpoints)
    (outcome,) = checkpoints.close()
    assert isinstance(outcome, Saved), outcome
    (directory / "survived").touch()


def test_a_kill_at_any_moment_leaves_a_sound_checkpoint_and_nothing_that_only_looks_like_one(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    with Checkpoints(tmp_path / "original", KEEP_ALL, group=group) as checkpoints:
        Subject(steps=1).saved(checkpoints)
    spawn(die_everywhere, tmp_path / "original", tmp_path / "copies").join()
    *killed, survived = sorted((tmp_path / "copies").iterdir(), key=lambda path: int(path.name))
    assert names(survived) == ["step-00000002", "survived"]
    assert len(killed) > 8
    steps, leftovers = [], 0
    for directory in killed:
        listed = list_checkpoints(directory)
        for checkpoint in listed:
            checkpoint.verify()
        steps.append([checkpoint.step for checkpoint in listed])
        leftovers += len(names(directory)) - len(listed)
        Checkpoints(directory, KEEP_ALL, group=group).close()
        assert names(directory) == [checkpoint.path.name for checkpoint in listed]
    assert steps == sorted(steps, key=[[1], [1, 2], [2]].index)  # first the old one, then both, then the new one
    assert {tuple(entry) for entry in steps} == {(1,), (1, 2), (2,)}
    assert leftovers > 5


# Weights that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_saved(
    tmp_path: Path, group: dist.ProcessGroup, checkpoints: Checkpoints, value: float
) -> None:
    subject = Subject(steps=1)
    subject.saved(checkpoints)
    poison(subject, value)
    subject.save(checkpoints)
    checkpoints.wait()
    (failed,) = checkpoints.poll()
    assert isinstance(failed, Failed)
    assert failed.is_final
    assert failed.error.startswith("model.blocks.1.down.weight has values that are not finite; resume from the last")
    assert names(tmp_path / "checkpoints") == ["step-00000001"]


def test_weights_that_are_not_finite_are_found_in_a_checkpoint(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(steps=1)
    verify_weights(subject.saved(checkpoints))
    monkeypatch.setattr(saver, "not_finite", lambda state: [])  # as one may have been written elsewhere
    poison(subject, float("nan"))
    saved = subject.saved(checkpoints)
    saved.verify()
    with pytest.raises(ValueError, match=r"model.blocks.1.down.weight of .* has values that are not finite"):
        verify_weights(saved)


def poison(subject: Subject, value: float) -> None:
    weight: Any = dict(subject.model.named_parameters())["blocks.1.down.weight"]
    with torch.no_grad():
        weight.to_local()[3, 5] = value
