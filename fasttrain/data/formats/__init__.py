"""Datasets of other programs, read where they are, without conversion: nanoGPT, llm.c, modded-nanogpt and Megatron.

What they are is recognised by their content. What they do not say is `Described`.
"""

from __future__ import annotations

from pathlib import Path

from fasttrain.data.dataset import NAME
from fasttrain.data.formats import bins, megatron
from fasttrain.data.formats.dataset import NO_SEPARATOR, Described, ExternalDataset

__all__ = ["NO_SEPARATOR", "Described", "ExternalDataset", "open_external"]


def open_external(path: Path, described: Described) -> ExternalDataset | None:
    """The dataset at `path`: a directory, a file, or Megatron's prefix of two files. None: nobody's that is known."""
    if (path / NAME).exists():
        return None
    found = megatron.find(path) or bins.find(path)
    return ExternalDataset(path, found, described) if found else None
