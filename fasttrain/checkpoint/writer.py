"""Writing: torch's distributed checkpoint into a new directory, through files that know their checksums.

DCP by itself syncs its metadata before they have left Python's buffer, and never reads back what it wrote.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from fasttrain.distributed.collectives import Reason, text_of
from fasttrain.fs import FileChecksum, HashedFile


def write(state: dict[str, Tensor], directory: Path, group: dist.ProcessGroup) -> list[FileChecksum]:
    """Write this rank's share of a state; the files that it wrote, compared with what is on the disk."""
    writer = _Writer(directory)
    dcp.save(dict(state), storage_writer=writer, process_group=group)
    files = list(writer.files.written.values())
    for file in files:
        file.check(directory)
    return files


class _Files(FileSystem):
    """DCP's view of the file system; remembers what has been written."""

    def __init__(self) -> None:
        self.written: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        path = Path(path)
        with HashedFile(path) as stream:
            yield stream
        self.written[path.name] = stream.checksum()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        name = Path(new_path).name
        self.written[name] = replace(self.written.pop(Path(path).name), name=name)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP sends a rank's error to the others by pickling it; one that does not pickle would leave them waiting."""
    try:
        yield
    except BaseException as error:
        raise Reason(text_of(_cause(error))) from None


class _Writer(dcp.FileSystemWriter):
    def __init__(self, directory: Path) -> None:
        # Files sync themselves. Nothing to copy ahead: the state is in host memory, and a writer that looks for more
        # waits for the GPU's stream, that is, for training.
        super().__init__(directory, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self.files = self.fs = _Files()

    @_plain_errors()
    def write_data(self, plan: Any, planner: Any) -> Any:
        return super().write_data(plan, planner)

    @_plain_errors()
    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)


def _cause(error: BaseException) -> BaseException:
    """The system's error, if there is one behind this one.

    After a write that failed, torch.save still finishes its archive, and what it says then ("unexpected pos 704 vs
    598") hides that the disk is full.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error
