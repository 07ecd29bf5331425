"""Windows: the same quantiles as numpy's, over the last values."""

from __future__ import annotations

import numpy as np
import pytest

from fasttrain.monitor.spikes import Window


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_quantiles_are_those_of_the_last_values(size: int) -> None:
    values = np.random.default_rng(0).integers(0, 9, 100).astype(float)  # with equal ones
    window = Window(size)
    for count, value in enumerate(values.tolist(), 1):
        window.add(value)
        last = values[max(0, count - size) : count]
        assert window.values() == last.tolist()
        assert window.is_full == (count >= size)
        assert window.median == np.median(last)
        assert window.quantile(0.25) == pytest.approx(np.quantile(last, 0.25))


def test_spread_is_the_deviation_of_normal_values_whatever_a_few_do() -> None:
    values = np.random.default_rng(0).standard_normal(4000) * 3
    values[::20] = 1e9
    assert Window(4000, values.tolist()).spread == pytest.approx(3, rel=0.1)
