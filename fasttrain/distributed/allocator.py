"""The C library's allocator, told to keep what is freed.

A training step allocates the same blocks as the step before it. glibc gives blocks beyond 32 MB back to the system, and
the top of its heap too; the next step then takes a page fault for every 4 KB of them, 10,000 to 50,000 in a step of a
small model, and the system clears each page.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_NEVER = 2**31 - 1  # bytes, the greatest argument of mallopt
_HEAP = 2**30  # blocks up to this size come from the heap, which keeps them


def keep_freed_memory() -> bool:
    """Freed blocks stay with the process, for the next step; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS; Windows
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _HEAP) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
