"""metrics.jsonl as columns: the same run that read_metrics gives, read piece by piece."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fasttrain.metrics.jsonl import read_metrics
from fasttrain.tools.report.columns import AROUND, Columns, bucket_starts, bucketed
from tests.fasttrain.tools.report.made import write_lines

LINES: st.SearchStrategy[list[Any]] = st.lists(
    st.builds(
        dict,
        step=st.integers(1, 12),
        loss=st.sampled_from([1.5, 2.25, None]),
        time=st.just(1.0),
        extra=st.sampled_from([0.5, "text", [1, 2]]),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(lines=LINES, cuts=st.lists(st.integers(0, 2000), max_size=4))
def test_columns_are_the_run_as_it_stands(lines, cuts):
    with TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        for line in lines:
            if line["loss"] is None:
                line["nonfinite"] = ["loss"]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        path.write_bytes(b"")
        columns = Columns(path)
        for end in [*sorted(cuts), len(data)]:  # as if looked at while it was written, in mid-line too
            path.write_bytes(data[:end])
            columns.refresh()
        standing = read_metrics(path.parent)
        assert columns["step"].tolist() == [line["step"] for line in standing]
        np.testing.assert_array_equal(columns["loss"], [line["loss"] for line in standing])
        taken = sum(len(gone["step"]) for gone in columns.taken_back)
        assert taken + len(columns) == len(lines)


def test_what_was_taken_back_is_kept_apart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [dict(step=s, time=s, tokens=s, loss=float(s)) for s in (1, 2, 3, 4, 3, 4, 5)])
    columns = Columns(path)
    assert columns.refresh()
    assert columns["loss"].tolist() == [1, 2, 3, 4, 5]
    (gone,) = columns.taken_back
    assert gone["step"].tolist() == [3, 4]


def test_torn_lines_and_late_columns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n[1]\n{"step": 3, "loss": 1e300, "mfu": 0.5}\n{"step": 4'
    )
    columns = Columns(path)
    columns.refresh()
    assert columns["step"].tolist() == [1, 3]
    assert columns["loss"][1] == math.inf  # beyond float32: not finite, for a curve
    assert math.isnan(columns["mfu"][0])
    assert columns["mfu"][1] == 0.5
    assert np.isnan(columns["no such figure"]).all()


def test_a_new_file_in_its_place_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [dict(step=s, loss=1.0) for s in range(1, 9)])
    columns = Columns(path)
    columns.refresh()
    path.unlink()
    write_lines(path, [dict(step=1, loss=7.0)])
    columns.refresh()
    assert columns["loss"].tolist() == [7.0]


def test_patience_ends_a_long_reading_and_the_next_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(path, [dict(step=s, loss=1.0, padding="x" * 1000) for s in range(1, 6001)])
    columns = Columns(path)
    assert not columns.refresh(patience=0)
    assert 0 < len(columns) < 6000
    while not columns.refresh(patience=0):
        pass
    assert columns["step"].tolist() == list(range(1, 6001))


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


def test_steps_around_an_event_are_single():
    starts = bucket_starts(500_000, 1500, [250_000])
    single = range(250_000 - AROUND, 250_000 + AROUND)
    assert set(single) <= set(starts.tolist())
    assert 250_000 + AROUND in starts  # the bucket after them begins there


def test_many_events_leave_half_of_the_points_for_the_rest():
    starts = bucket_starts(500_000, 1000, range(0, 500_000, 1000))
    assert len(starts) <= 1020
    assert np.diff(starts).max() < 1100


def test_a_bucket_without_a_finite_value_is_a_gap():
    values = np.array([1.0, np.nan, np.inf, 4.0])
    assert bucketed(values, np.array([0, 1, 3])).mean.tolist() == pytest.approx([1.0, np.nan, 4.0], nan_ok=True)
    assert np.isnan(bucketed(values, np.arange(4)).mean[2])


def test_a_line_nested_beyond_reason_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": ' + "[" * 100_000 + "\n" + '{"step": 3, "loss": 1}\n')
    columns = Columns(path)
    assert columns.refresh()
    assert columns["step"].tolist() == [1, 3]
