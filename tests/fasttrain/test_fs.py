"""Durable files and locks: what is on the disk in which order, what a crash leaves, and who may write."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fasttrain.fs import (
    FileChecksum,
    HashedFile,
    check_is_new,
    close_inherited_locks,
    exclusive_lock,
    free_bytes,
    is_in_place,
    is_locked,
    new_directory,
    write_file,
)


def in_child(call: Callable[[], object]) -> int:
    """Exit status, as waitpid has it."""
    child = os.fork()
    if not child:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)  # not as a second pytest
    return os.waitpid(child, 0)[1]


def checksum_of(path: Path) -> FileChecksum:
    content = path.read_bytes()
    return FileChecksum(name=path.name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed, in order."""
    calls: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def noted_fsync(descriptor: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        calls.append(f"{source.name} -> {target.name}")
        replace(source, target)

    def noted_rename(source: Path, target: Path) -> None:
        calls.append(f"{source.name} -> {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "rename", noted_rename)
    return calls


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, calls: list[str]) -> None:
    checksum = write_file(tmp_path / "file", ["one, ", "zwölf"])
    assert (tmp_path / "file").read_text("utf-8") == "one, zwölf"
    assert checksum == checksum_of(tmp_path / "file")
    assert calls == ["sync .file.partial", ".file.partial -> file", f"sync {tmp_path.name}"]
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_is_on_the_disk_before_it_has_its_name(tmp_path: Path, calls: list[str]) -> None:
    with new_directory(tmp_path / "new" / "out") as directory:
        (directory / "a").write_text("a")
        assert not (tmp_path / "new" / "out").exists()
    assert calls == ["sync a", "sync .out.partial", ".out.partial -> out", "sync new"]
    assert (tmp_path / "new" / "out" / "a").read_text() == "a"


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_leaves_the_former_content_and_the_next_write_cleans_up(tmp_path: Path, moment: str) -> None:
    write_file(tmp_path / "file", ["former"])

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def attempt() -> None:
        setattr(os, moment, die)
        write_file(tmp_path / "file", ["later"])

    assert in_child(attempt) == signal.SIGKILL
    assert (tmp_path / "file").read_text() == "former"
    assert sorted(os.listdir(tmp_path)) == [".file.partial", "file"]
    write_file(tmp_path / "file", ["last"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "last"}


def test_an_error_leaves_the_former_content_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "file", ["former"])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", ["later"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "former"}
    with pytest.raises(OSError, match="No space left"), new_directory(tmp_path / "out") as directory:
        (directory / "a").write_text("a")
    assert os.listdir(tmp_path) == ["file"]


def test_a_killed_process_leaves_a_hidden_directory_that_the_next_one_replaces(tmp_path: Path) -> None:
    def attempt() -> None:
        with new_directory(tmp_path / "out") as directory:
            (directory / "old").write_text("old")
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(attempt) == signal.SIGKILL
    assert os.listdir(tmp_path) == [".out.partial"]
    with new_directory(tmp_path / "out") as directory:
        (directory / "new").write_text("new")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["out", "out/new"]


def test_one_process_at_a_time_writes_a_directory(tmp_path: Path) -> None:
    message = f"another process is writing {tmp_path / 'out'}; wait for it, or choose another --out"
    with new_directory(tmp_path / "out") as directory:
        (directory / "a").write_text("a")
        with pytest.raises(ValueError, match=message), new_directory(tmp_path / "out"):
            raise AssertionError
    assert (tmp_path / "out" / "a").exists()


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_is_new(tmp_path / "empty")
    check_is_new(tmp_path / "none")
    (tmp_path / "file").write_text("a")
    for path, state in ((tmp_path, "is not empty"), (tmp_path / "file", "is a file")):
        with (
            pytest.raises(ValueError, match=f"{path} {state}; choose another --out, or delete it first"),
            new_directory(path),
        ):
            raise AssertionError
    assert sorted(os.listdir(tmp_path)) == ["empty", "file"]


@pytest.mark.parametrize("keep", [0, 1, 5, 2**20 + 3])
def test_a_file_continues_after_what_is_kept(tmp_path: Path, keep: int) -> None:
    path, former = tmp_path / "file", os.urandom(2**20 + 3)
    path.write_bytes(former + b"to be cut off")
    with HashedFile(path, keep=keep) as file:
        file.write(b"more")
        assert file.sync() == keep + 4
        file.write(memoryview(b"and more"))
    assert path.read_bytes() == former[:keep] + b"moreand more"
    assert file.checksum() == checksum_of(path)
    file.checksum().check(tmp_path)


def test_a_new_file_must_be_new_and_a_kept_one_long_enough(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12")
    with pytest.raises(FileExistsError):
        HashedFile(tmp_path / "file")
    with pytest.raises(ValueError, match="file has 2 bytes instead of 3"):
        HashedFile(tmp_path / "file", keep=3)
    with pytest.raises(FileNotFoundError):
        HashedFile(tmp_path / "none", keep=3)
    assert (tmp_path / "file").read_bytes() == b"12"


def test_a_finished_file_is_on_the_disk(tmp_path: Path, calls: list[str]) -> None:
    file = HashedFile(tmp_path / "file")
    file.write(b"content")
    assert file.finish() == checksum_of(tmp_path / "file")
    assert calls == ["sync file"]
    assert file.closed


def test_a_file_that_is_not_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    checksum = write_file(path, ["content"])
    checksum.check(tmp_path)
    path.write_text("Content")
    checksum.check_size(tmp_path)
    with pytest.raises(ValueError, match=rf"^{path} is corrupt: its sha256 is \w{{12}}... instead of \w{{12}}...$"):
        checksum.check(tmp_path)
    for content, state in (("conten", "truncated, or still being copied"), ("contents", "too long")):
        path.write_text(content)
        for check in (checksum.check, checksum.check_size):
            with pytest.raises(ValueError, match=f"^{path} is {state}: it has {len(content)} bytes instead of 7$"):
                check(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"^{path} is missing$"):
        checksum.check(tmp_path)


def test_a_lock_keeps_others_out_and_is_free_once_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "lock"
    assert not is_locked(path)
    with exclusive_lock(path, "it is taken") as locked:
        assert locked
        assert is_locked(path)
        with (
            pytest.raises(ValueError, match="it is taken; wait for it, or choose another --out"),
            exclusive_lock(path, "it is taken"),
        ):
            raise AssertionError
    assert not is_locked(path)

    def die() -> None:
        with exclusive_lock(path, "it is taken"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == signal.SIGKILL
    with exclusive_lock(path, "it is taken"):
        pass


def test_a_lock_can_be_waited_for(tmp_path: Path) -> None:
    def hold() -> None:
        with exclusive_lock(tmp_path / "lock", None):
            (tmp_path / "held").touch()
            time.sleep(0.2)
            (tmp_path / "done").touch()

    child = os.fork()
    if not child:
        try:
            hold()
        finally:
            os._exit(0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with exclusive_lock(tmp_path / "lock", None):
        assert (tmp_path / "done").exists()
    os.waitpid(child, 0)


def test_a_forked_child_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    path, (ready, go) = tmp_path / "lock", (os.pipe(), os.pipe())
    with exclusive_lock(path, "it is taken"):
        child = os.fork()
        if not child:
            try:
                close_inherited_locks()
                os.write(ready[1], b"1")
                os.read(go[0], 1)
            finally:
                os._exit(0)
        os.read(ready[0], 1)
        assert is_locked(path)
    assert not is_locked(path)  # while the child lives
    os.write(go[1], b"1")
    os.waitpid(child, 0)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no locks")

    monkeypatch.setattr("fcntl.flock", fail)
    with exclusive_lock(tmp_path / "lock", "it is taken") as locked:
        assert not locked
        assert not is_locked(tmp_path / "lock")


def test_free_space_is_that_of_the_next_directory_above(tmp_path: Path) -> None:
    asked: list[Path] = []

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(path)
        return os.statvfs_result((4096, 512, 100, 50, 7, 0, 0, 0, 0, 255))

    assert free_bytes(tmp_path / "not" / "there", statvfs) == 7 * 512
    assert asked == [tmp_path]


def test_a_lock_is_in_place_until_its_directory_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "run" / ".lock"
    with exclusive_lock(lock, "taken"):
        assert is_in_place(lock)
        for number, there in ((errno.EIO, True), (errno.ESTALE, False)):
            with monkeypatch.context() as patch:
                patch.setattr(os, "stat", lambda *_, number=number: (_ for _ in ()).throw(OSError(number, "no")))
                assert is_in_place(lock) == there
        lock.parent.rename(tmp_path / "away")
        assert not is_in_place(lock)
        lock.parent.mkdir()
        lock.touch()
        assert not is_in_place(lock)
        assert is_in_place(tmp_path / "away" / ".lock")
