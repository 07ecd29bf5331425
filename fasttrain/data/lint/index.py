"""The index: where documents end, in ascending order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fasttrain.data.lint.findings import Finding
from fasttrain.data.lint.source import Source

BLOCK = 2**16  # documents at a time
SAMPLES, SAMPLE = 64, 2**9  # of the quick part: a page each


def check_index(source: Source, *, quick: bool) -> list[Finding]:
    """One finding, or none where there is no index. A bad index is not used by the checks that follow."""
    ends = source.ends
    if ends is None:
        return []
    size = SAMPLE if quick else BLOCK
    starts: Sequence[int] = range(0, len(ends), size)
    if quick and len(starts) > SAMPLES:
        starts = np.linspace(0, len(ends) - size, SAMPLES).astype(np.int64).tolist()
    wrong = read = 0
    for start in starts:
        block = ends[np.arange(start, min(start + size + 1, len(ends)))]
        wrong += int((np.diff(block) < 0).sum()) + int(block[0] < 0) + int(block[-1] > len(source))
        read += min(len(block), size)
    if not wrong:
        return [source.finding("index", "ok", 0, read, "documents", f"{len(ends):,} documents, one after the other")]
    source.ends = None
    text = (
        f"{wrong:,} documents end before they begin, or after the last token: the index is damaged, and is not used "
        "below; copy the dataset again, or prepare it again"
    )
    return [source.finding("index", "error", wrong, read, "documents", text)]
