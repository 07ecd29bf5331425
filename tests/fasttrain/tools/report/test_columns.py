"""metrics.jsonl as columns: the same run that read_metrics gives, read piece by piece."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.metrics import read_metrics
from fasttrain.tools.report.columns import Columns
from tests.fasttrain.tools.report.made import write_lines

LINES = st.lists(
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
