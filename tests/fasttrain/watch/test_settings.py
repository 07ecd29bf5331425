"""The section of settings: what makes no sense is an error."""

from __future__ import annotations

import pytest

from fasttrain.watch import Watch


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"rollbacks": -1}, "watch.rollbacks \\(-1\\) must be at least 0"),
        ({"first": 10}, "watch.first \\(10\\) must be at least 64"),
        ({"slowdown": -0.1}, "watch.slowdown \\(-0.1\\) must be at least 0"),
    ],
)
def test_mistakes(values: dict, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Watch(**values)
