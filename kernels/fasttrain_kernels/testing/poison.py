"""torch.empty that holds NaN, so that what a kernel does not write is seen."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Torch fills what torch.empty and its kin return with NaN while it is asked for determinism."""
    # Not torch.use_deterministic_algorithms: it imports Inductor, four seconds that no kernel test needs.
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch._C._get_deterministic_fill_uninitialized_memory()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        try:
            yield
        finally:
            torch._C._set_deterministic_fill_uninitialized_memory(fill)
            torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)
