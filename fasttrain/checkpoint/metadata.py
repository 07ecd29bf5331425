"""DCP's metadata of a checkpoint: which tensors it holds, and where. Reading them runs no code of whoever wrote them.

They are a pickle, which could call anything; and of entries that are no tensors, DCP would unpickle the content too.
So the file is compared with its checksum first, unpickled with the few classes that DCP writes, and may describe
nothing but tensors within the files of the checkpoint.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata

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


def read_metadata(directory: Path, files: Sequence[FileChecksum]) -> Metadata:
    """Raise ValueError unless they are what fasttrain writes; files: of the checkpoint."""
    known = {file.name: file for file in files}
    if NAME not in known:
        raise ValueError(f"{directory / NAME} is not in checkpoint.json")
    known[NAME].check(directory)
    try:
        with open(directory / NAME, "rb") as file:
            metadata = _Unpickler(file).load()
        _check(metadata, {name: file.size for name, file in known.items()})
    except OSError:
        raise
    except Exception as error:  # unpickling raises anything
        raise ValueError(f"{directory / NAME} is not what fasttrain writes: {error or type(error).__name__}") from None
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _WRITTEN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs; it was not called")


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
        if not 0 <= place.offset <= place.offset + place.length <= known.get(place.relative_path, -1):
            raise ValueError(f"{index.fqn} is not within a file of the checkpoint, but in {place.relative_path}")
