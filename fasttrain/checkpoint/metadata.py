"""DCP's metadata of a checkpoint: which tensors it holds, and where. Reading them runs no code of whoever wrote them.

They are a pickle, which could call anything; and of entries that are no tensors, DCP would unpickle the content too.
So the file is compared with its checksum first, unpickled with the few opcodes and classes that DCP writes, and may
describe nothing but tensors within the files of the checkpoint.
"""

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fasttrain.fs import FileChecksum

NAME = ".metadata"
_DCP = "torch.distributed.checkpoint."
_WRITTEN = {  # module: names that DCP's metadata refer to, besides dtypes
    f"{_DCP}metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}  # fmt: skip
_BUILT = (
    ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, _StorageInfo,
)  # fmt: skip
_OPCODES = (  # what DCP's metadata consist of
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.BINUNICODE,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
    pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD,
)  # fmt: skip


def read_metadata(directory: Path, files: Sequence[FileChecksum]) -> Metadata:
    """Raise ValueError unless they are what fasttrain writes; files: of the checkpoint."""
    known = {file.name: file for file in files}
    if NAME not in known:
        raise ValueError(f"{directory / NAME} is not in checkpoint.json")
    known[NAME].check(directory)
    try:
        metadata = _Unpickler(io.BytesIO((directory / NAME).read_bytes())).load()
        _check(metadata, {name: file.size for name, file in known.items()})
    except OSError:
        raise
    except Exception as error:  # unpickling raises anything
        raise ValueError(f"{directory / NAME} is not what fasttrain writes: {error or type(error).__name__}") from None
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


_InPython: Any = pickle._Unpickler


class _Unpickler(_InPython):  # type: ignore[misc]
    """Not the one in C, which allocates as much memory as a single opcode asks for, until the process is killed."""

    dispatch: ClassVar = {code[0]: _InPython.dispatch[code[0]] for code in _OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _WRITTEN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs; it was not called")

    def set_items(self) -> None:
        """Other keys could be tuples of tuples of tuples, whose hash takes forever."""
        for key in self.stack[::2]:
            is_index = isinstance(key, MetadataIndex) and isinstance(key.offset, torch.Size | None)
            if not isinstance(key.fqn if is_index else key, str):
                raise pickle.UnpicklingError("it has keys that are no names")
        self.load_setitems()

    def set_item(self) -> None:
        """As set_items, which expects the items on a stack of their own."""
        self.metastack.append(self.stack[:-2])
        del self.stack[:-2]
        self.set_items()

    def build(self) -> None:
        """On anything but a new object of DCP it would change what the whole process uses."""
        if type(self.stack[-2]) not in _BUILT:
            raise pickle.UnpicklingError(f"it would change {self.stack[-2]}")
        self.load_build()

    dispatch |= {pickle.SETITEMS[0]: set_items, pickle.SETITEM[0]: set_item, pickle.BUILD[0]: build}


def _check(metadata: Any, known: dict[str, int]) -> None:
    """Raise unless every entry is a tensor whose chunks lie within files that checkpoint.json knows."""
    if not isinstance(metadata, Metadata):
        raise TypeError("no metadata of DCP")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor")
        if not all(isinstance(chunk, ChunkStorageMetadata) for chunk in entry.chunks):
            raise TypeError(f"{name} has no chunks")
        sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
        if not all(isinstance(size, torch.Size) and len(size) == len(entry.size) for size in sizes):
            raise TypeError(f"{name} has no shape")
        if not isinstance(entry.properties.dtype, torch.dtype):
            raise TypeError(f"{name} has no dtype")
    for index, place in (metadata.storage_data or {}).items():
        if not isinstance(place, _StorageInfo) or place.transform_descriptors:
            raise TypeError(f"{index.fqn} is not stored as fasttrain does")
        known_size = known.get(place.relative_path, -1) if isinstance(place.relative_path, str) else -1
        if not 0 <= place.offset <= place.offset + place.length <= known_size:
            raise ValueError(f"{index.fqn} is not within a file of the checkpoint, but in {place.relative_path}")
