"""Metadata of strangers: whatever a checkpoint's pickle holds, nothing of it runs, and what is wrong is said."""

import contextlib
import dataclasses
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from fasttrain.checkpoint.committed import Checkpoint, _digest, find
from fasttrain.checkpoint.metadata import NAME, read_metadata
from fasttrain.checkpoint.state import TensorReader, saved_tensors
from fasttrain.cli import main
from fasttrain.fs import FileChecksum, sha256_of


class Call:
    """Pickled, it is a call of anything."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def signed_again(path: Path, content: bytes, **changes: Any) -> Checkpoint:
    """As somebody would who can compute checksums."""
    (path / NAME).write_bytes(content)
    before = Checkpoint.read(path)
    files = tuple(
        FileChecksum(name=f.name, size=(path / f.name).stat().st_size, sha256=sha256_of(path / f.name))
        for f in before.files
    )
    (path / "checkpoint.json").unlink()
    after = dataclasses.replace(before, **dict(files=files) | changes)
    after.write()
    return after


@pytest.fixture
def stolen(small_run: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be changed."""
    return Path(shutil.copytree(small_run, tmp_path / "run", symlinks=True))


def newest(run: Path) -> Path:
    return find(run).path


@pytest.mark.parametrize("function", [os.mkdir, eval], ids=["os", "builtins"])
def test_no_command_runs_code_of_a_checkpoint(stolen, tmp_path, capsys, function):
    marker = tmp_path / "ran"
    argument = str(marker) if function is os.mkdir else f"__import__('os').mkdir({str(marker)!r})"
    signed_again(newest(stolen), pickle.dumps(Call(function, argument)))
    pickle.loads((newest(stolen) / NAME).read_bytes())
    assert marker.exists(), "it would run"
    marker.rmdir()
    for command in (
        ["checkpoint", "verify", str(stolen)],
        ["generate", str(stolen), "--prompt", "a", "--tokens", "1"],
        ["eval", str(stolen)],
        ["export", str(stolen), "--out", str(tmp_path / "exported")],
        ["train", "--out", str(tmp_path / "new"), "--resume", str(newest(stolen))],
    ):
        try:
            code = main(command)
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        assert code in (1, 2), command
        assert "which no checkpoint needs; it was not called" in " ".join((said.out + said.err).split()), command
        assert not marker.exists()
        assert not (tmp_path / "exported").exists()


def test_an_entry_that_is_no_tensor_is_refused(stolen):
    """DCP would unpickle its content, whatever the metadata's own classes are."""
    path = newest(stolen)
    metadata = read_metadata(path, Checkpoint.read(path).files)
    metadata.state_dict_metadata["model.embedding.weight"] = BytesStorageMetadata()
    after = signed_again(path, pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"metadata\.BytesStorageMetadata, which no checkpoint needs"):
        saved_tensors(after)


@pytest.mark.parametrize("place", ["../../../secret", "/etc/passwd", "checkpoint.json", ""])
def test_a_tensor_lies_within_files_of_the_checkpoint(stolen, place):
    path = newest(stolen)
    metadata = read_metadata(path, Checkpoint.read(path).files)
    index, info = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = dataclasses.replace(info, relative_path=place)
    with pytest.raises(ValueError, match=r"is not within a file of the checkpoint, but in"):
        TensorReader(signed_again(path, pickle.dumps(metadata)))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/b", "..", "", 3, None])
def test_names_in_checkpoint_json_cannot_leave_its_directory(stolen, name):
    path = newest(stolen)
    signed_again(path, (path / NAME).read_bytes())
    file = path / "checkpoint.json"
    content = json.loads(file.read_bytes())
    del content["sha256"]
    content["files"][0]["name"] = name
    file.write_text(json.dumps(content | {"sha256": _digest(content)}))
    match = "is no name of a file beside it" if isinstance(name, str) else f"files.name is {name}"
    with pytest.raises(ValueError, match=f"checkpoint.json is not what fasttrain writes: .*{match}"):
        Checkpoint.read(path)


@pytest.mark.parametrize(
    "changes", [dict(step="7"), dict(loss="low"), dict(optimizer=None), dict(scaler=[]), dict(metadata="x")]
)
def test_a_value_of_another_kind_is_named(stolen, changes):
    path = newest(stolen)
    signed_again(path, (path / NAME).read_bytes(), **changes)
    with pytest.raises(ValueError, match=rf"not what fasttrain writes: {next(iter(changes))} is "):
        Checkpoint.read(path)


def nested(levels: int) -> bytes:
    """A tuple of itself twice, of itself twice, ...: few bytes whose hash and text take forever."""
    return b")" + b"".join(b"\x94h" + bytes([level]) + b"\x86" for level in range(levels))


@pytest.mark.parametrize(
    ("opcodes", "match"),
    [
        (b"Nr\xff\xff\xff\x7f.", "not what fasttrain writes"),  # a memo of 2^31 entries: 32 GB
        (b"\x96\x00\x00\x00\x00\x04\x00\x00\x00.", "not what fasttrain writes"),  # 16 GB of bytes
        (b"}(" + nested(100) + b"Nu.", "it has keys that are no names"),
        (b"}" + nested(100) + b"Ns.", "it has keys that are no names"),
        (b"\x8c\x07pathlib\x8c\x09PosixPath\x93N}\x8c\x04openNs\x86b.", "it would change .*PosixPath"),
        (b"\x8c\x05torch\x8c\x07float32\x93}b.", "it would change torch.float32"),
    ],
    ids=["memo", "bytes", "keys", "key", "class", "dtype"],
)
def test_what_pickles_can_do_without_a_call(tmp_path, opcodes, match):
    """Take all memory or all time, or change a class for the whole process."""
    (tmp_path / NAME).write_bytes(b"\x80\x04" + opcodes)
    file = FileChecksum(name=NAME, size=2 + len(opcodes), sha256=sha256_of(tmp_path / NAME))
    with pytest.raises(ValueError, match=match):
        read_metadata(tmp_path, [file])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_is_an_error_or_right(small_run, tmp_path, data):
    """Bytes of the pickle changed, and signed again: a ValueError, or metadata that describe tensors of the files."""
    checkpoint = find(small_run)
    content = bytearray((checkpoint.path / NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / NAME).write_bytes(content)
    own = FileChecksum(name=NAME, size=len(content), sha256=sha256_of(tmp_path / NAME))
    files = [own, *(file for file in checkpoint.files if file.name != NAME)]
    with contextlib.suppress(ValueError):
        metadata = read_metadata(tmp_path, files)
        entries = metadata.state_dict_metadata.values()
        assert all(isinstance(e, TensorStorageMetadata) and isinstance(e.size, torch.Size) for e in entries)
