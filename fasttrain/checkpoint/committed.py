"""Committed checkpoints: RUN/checkpoints/step-00000100 with checkpoint.json, which says what all other files are.

A directory has this name only once everything in it is on the disk and has been compared with what was meant. A step
that is saved again goes beside the former one, as step-00000100-2, and counts instead of it; then the former one is
deleted. At no moment is there neither.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fasttrain.config import STEPS
from fasttrain.distributed.collectives import RanksFailed, on_all, on_main, rank_in
from fasttrain.fs import FileChecksum, HashedFile
from fasttrain.rundir import RunDir
from fasttrain.schema import build, parse

if TYPE_CHECKING:
    import torch.distributed as dist

FORMAT = "fasttrain checkpoint"
VERSION = 1
NAME = "checkpoint.json"
_COMMITTED = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint: its directory and the content of its checkpoint.json."""

    path: Path
    step: Annotated[int, STEPS]  # done
    loss: float | None  # of validation, at this step
    optimizer: str  # class
    scaler: dict[str, int | float]  # empty without fp16
    metadata: dict[str, Any]  # what the trainer wants to know again
    files: tuple[FileChecksum, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def write(self) -> None:
        content = dict(format=FORMAT, version=VERSION) | asdict(self)
        del content["path"]
        with HashedFile(self.path / NAME) as file:
            file.write(_dump(content | dict(sha256=_digest(content))).encode())

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Raise an error that says what is wrong unless `path` holds a committed checkpoint. Reads checkpoint.json."""
        file = path / NAME
        if path.name.startswith("."):  # it may have everything but its name
            raise ValueError(f"checkpoint: {path} was never finished, or is being deleted; name another one")
        try:
            content = parse(file.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"checkpoint: {path} has no {NAME}, so it is not a checkpoint") from None
        except ValueError as error:
            raise ValueError(f"checkpoint: {file} is corrupt ({error})") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f'checkpoint: {file} does not say "format": "{FORMAT}"; corrupt, or of another program')
        if (version := content.get("version")) != VERSION:
            remedy = f"this fasttrain reads version {VERSION}; use the fasttrain that wrote it"
            raise ValueError(f"checkpoint: {file} has version {version}, {remedy}")
        if content.pop("sha256", None) != _digest(content):
            raise ValueError(f"checkpoint: {file} is corrupt: its content does not have the sha256 that it states")
        del content["format"], content["version"]
        try:
            checkpoint: Checkpoint = build(cls, content | dict(path=str(path)))
        except ValueError as error:
            raise ValueError(f"checkpoint: {file} is not what fasttrain writes: {error}") from None
        if (name := _COMMITTED.fullmatch(path.name)) and int(name[1]) != checkpoint.step:
            raise ValueError(f"checkpoint: {path} holds step {checkpoint.step}; give it its name back")
        return checkpoint

    def verify(self, group: dist.ProcessGroup | None = None) -> None:
        """Raise unless every file is what was written; the ranks of `group`, if any, read a share of the files each."""
        rank, size = (rank_in(group), group.size()) if group else (0, 1)
        wrong = on_all(group, lambda: _errors(self, self.files[rank::size], metadata=rank == 0))
        if errors := [error for theirs in wrong for error in theirs]:
            raise ValueError(f"checkpoint: {'; '.join(errors)}; resume from an earlier one")


Verify = Callable[[Checkpoint, "dist.ProcessGroup | None"], None]  # raises ValueError or RanksFailed on every rank


def directory_name(step: int, existing: list[Path]) -> str:
    """A name for a new checkpoint of a step, that none of the existing ones has."""
    versions = [_order(path)[1] for path in existing if _order(path)[0] == step]
    return f"step-{step:08}" + (f"-{max(versions) + 1}" if versions else "")


def committed_paths(directory: Path) -> list[Path]:
    """All that is named like a checkpoint, valid or not, by step."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _COMMITTED.fullmatch(path.name)), key=_order)


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """The committed checkpoints by step, as far as their checkpoint.json can be read."""
    read = map(_readable, committed_paths(directory))
    return [found for found in read if isinstance(found, Checkpoint)]  # newest_valid names the others when it matters


def newest_valid(
    directory: Path,
    group: dist.ProcessGroup | None,
    on_warning: Callable[[str], None],
    steps: range | None = None,  # None: of any
    verify: Verify = Checkpoint.verify,
) -> Checkpoint | None:
    """The last checkpoint whose files all are what was written; on_warning() is told about those that are not."""
    paths = reversed(on_main(group, lambda: committed_paths(directory)))
    asked = (path for path in paths if steps is None or _order(path)[0] in steps)
    return next((found for path in asked if (found := valid_at(path, group, on_warning, verify))), None)


def valid_at(
    path: Path, group: dist.ProcessGroup | None, on_warning: Callable[[str], None], verify: Verify = Checkpoint.verify
) -> Checkpoint | None:
    """The checkpoint that is there, verified; None after on_warning() was told what is wrong with it."""
    try:
        checkpoint = on_main(group, lambda: _readable(path))
        if isinstance(checkpoint, str):
            raise ValueError(checkpoint)
        verify(checkpoint, group)
        return checkpoint
    except (ValueError, RanksFailed) as error:
        on_warning(str(error))
        return None


def find(name: str | Path) -> Checkpoint:
    """The checkpoint that is meant by a run's directory (its last), RUN@400, or a checkpoint's own directory."""
    return Checkpoint.read(paths_of(name)[-1])


def paths_of(name: str | Path) -> list[Path]:
    """All checkpoints of a run's directory, by step; or the one of RUN@400, or of a checkpoint's own directory."""
    path, at, step = (name, "", "") if Path(name).exists() else str(name).rpartition("@")
    run = Path(path or name)
    if not run.is_dir():
        state = "is not a directory" if run.exists() else "does not exist"
        raise FileNotFoundError(f"checkpoint: {run} {state}; name a run, RUN@STEP, or the directory of a checkpoint")
    if not at and ((run / NAME).exists() or run.name.startswith(".step-") or _COMMITTED.fullmatch(run.name)):
        return [run]
    directory = RunDir(run).checkpoints if RunDir(run).checkpoints.is_dir() else run
    if not (paths := committed_paths(directory)):
        raise ValueError(f"checkpoint: there is none in {directory}; is {run} the directory of a run?")
    if not at:
        return paths
    by_step = {_order(path)[0]: path for path in paths}  # of one step, the last
    if not step.isdecimal() or int(step) not in by_step:
        raise ValueError(f"checkpoint: {run} has none of step {step!r}; it has {', '.join(map(str, by_step))}")
    return [by_step[int(step)]]


def _order(path: Path) -> tuple[int, int]:
    """Step, and which saving of it."""
    name = _COMMITTED.fullmatch(path.name)
    assert name
    return int(name[1]), int(name[2] or 1)


def _readable(path: Path) -> Checkpoint | str:
    """The checkpoint, or what is wrong with it."""
    try:
        return Checkpoint.read(path)
    except ValueError as error:
        return str(error)


def _errors(checkpoint: Checkpoint, files: tuple[FileChecksum, ...], *, metadata: bool) -> list[str]:
    checks: list[Callable[[], object]] = [partial(file.check, checkpoint.path) for file in files]
    if metadata:
        from fasttrain.checkpoint.metadata import read_metadata  # torch, which checkpoint.json does without

        checks.append(lambda: read_metadata(checkpoint.path, checkpoint.files))
    found: dict[str, None] = {}  # each once: a corrupt file of metadata is found twice
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:  # OSError: the disk itself
            found[str(error)] = None
    return list(found)


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _digest(content: dict[str, Any]) -> str:
    """Of all that checkpoint.json says, its own checksum aside."""
    return hashlib.sha256(_dump(content).encode()).hexdigest()
