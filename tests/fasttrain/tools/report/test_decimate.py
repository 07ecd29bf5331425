"""Decimation: no extreme gets lost, and steps that matter keep a bucket of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fasttrain.tools.report.decimate import AROUND, bucket_starts, bucketed

VALUES = arrays(
    np.float64, st.integers(1, 400), elements=st.floats(-1e6, 1e6) | st.sampled_from([np.nan, np.inf, -np.inf])
)


@given(values=VALUES, points=st.integers(2, 200), data=st.data())
def test_extremes_are_kept_and_means_lie_between(values, points, data):
    places = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=5))
    starts = bucket_starts(len(values), points, places)
    assert starts[0] == 0
    assert (np.diff(starts) > 0).all()
    mean, low, high = bucketed(values, starts)
    finite = values[np.isfinite(values)]
    if not len(finite):
        assert np.isnan(mean).all()
        return
    assert np.nanmin(low) == finite.min()
    assert np.nanmax(high) == finite.max()
    assert not np.isinf(mean).any()
    known = np.isfinite(mean)
    assert (low[known] <= mean[known] + 1e-6).all()
    assert (mean[known] <= high[known] + 1e-6).all()


@given(steps=st.integers(1, 100_000), points=st.integers(100, 2000), place=st.integers(0, 99_999))
def test_number_of_buckets(steps, points, place):
    starts = bucket_starts(steps, points, [place % steps])
    assert len(starts) <= points + 10
    assert starts[-1] == steps - 1  # the last step is alone


def test_steps_around_an_incident_are_single():
    starts = bucket_starts(500_000, 1500, [250_000])
    single = range(250_000 - AROUND, 250_000 + AROUND)
    assert set(single) <= set(starts.tolist())
    assert 250_000 + AROUND in starts  # the bucket after them begins there


def test_many_incidents_leave_half_of_the_points_for_the_rest():
    starts = bucket_starts(500_000, 1000, range(0, 500_000, 1000))
    assert len(starts) <= 1020
    assert np.diff(starts).max() < 1100


def test_a_bucket_without_a_finite_value_is_a_gap():
    values = np.array([1.0, np.nan, np.inf, 4.0])
    assert bucketed(values, np.array([0, 1, 3])).mean.tolist() == pytest.approx([1.0, np.nan, 4.0], nan_ok=True)
    assert np.isnan(bucketed(values, np.arange(4)).mean[2])
