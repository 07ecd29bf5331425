from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.data.prepare.documents import DIGEST, SeenDigests, digest


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=20), st.integers(0, 5))
def test_as_a_set_would_say(batches, reopened):
    """Digests of few different bytes, many of them zero: numpy hides zeros at the end."""
    seen = SeenDigests()
    kept: list[Any] = []
    known: set[Any] = set()
    for number, batch in enumerate(batches):
        if number == reopened:
            seen = SeenDigests(np.array(kept, DIGEST).tobytes())
        wanted = []
        for value in batch:
            wanted.append(value not in known)
            known.add(value)
        digests = np.array([value.to_bytes(1, "big") + b"\0" * 15 for value in batch], DIGEST)
        fresh = seen.add(digests)
        kept.extend(digests[fresh])
        assert fresh.tolist() == wanted


def test_memory_is_16_bytes_a_document():
    seen = SeenDigests()
    for first in range(0, 20_000, 1000):
        assert seen.add(np.array([digest(str(i).encode()) for i in range(first, first + 1000)], DIGEST)).all()
    assert sum(array.nbytes for array in seen._arrays) == 16 * 20_000
    assert len(seen._arrays) <= 6
