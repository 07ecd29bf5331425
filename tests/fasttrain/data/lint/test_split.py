"""What is found does not depend on how the stream is read, and small samples of a huge one take no time."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fasttrain.data.dataset import Dataset
from fasttrain.data.datasets import open_dataset
from fasttrain.data.formats.dataset import ExternalDataset
from fasttrain.data.lint import lint
from fasttrain.data.stream import TokenStream
from tests.fasttrain.data.lint.defects import PAD, SEPARATOR, VOCAB, documents, faults, found, write


class Ends:
    """No array: what a stream promises of an index, and no more."""

    def __init__(self, ends: np.ndarray) -> None:
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        return self._ends[np.asarray(numbers)]

    def searchsorted(self, positions: np.ndarray, side: str) -> np.ndarray:
        assert positions.dtype == np.int64
        return self._ends.searchsorted(positions, side)  # type: ignore[call-overload]


class Arrays(ExternalDataset):
    """A dataset in memory, as other programs have theirs: with an index or without, and no tokenizer."""

    path, vocab, splits = Path("memory"), VOCAB, ["train", "validation"]

    def __init__(self, content: list[list[int]], *, indexed: bool) -> None:
        self._tokens = np.array([token for document in content for token in document], np.uint16)
        self.document_ends = Ends(np.cumsum([len(document) for document in content])) if indexed else None

    def split(self, name: str) -> "Arrays":  # type: ignore[override]
        return self

    def tokenizer(self) -> None:
        return None

    separator = SEPARATOR

    def __len__(self) -> int:
        return len(self._tokens)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        return np.stack([self._tokens[start : start + length] for start in starts])


def defects() -> st.SearchStrategy[list[list[int]]]:
    """Documents with a separator, none or two; with loops and copies; empty ones."""
    text = st.lists(st.integers(0, 5), max_size=90)
    loop = st.tuples(st.lists(st.integers(0, 250), min_size=1, max_size=5), st.integers(1, 30)).map(
        lambda t: t[0] * t[1]
    )
    head = st.sampled_from([[SEPARATOR]] * 6 + [[], [SEPARATOR, SEPARATOR]])
    tail = st.sampled_from([[]] * 6 + [[SEPARATOR], [PAD], [VOCAB + 3]])
    document = st.tuples(head, text | loop, tail).map(lambda parts: [*parts[0], *parts[1], *parts[2]])
    return st.lists(document, min_size=1, max_size=12).map(lambda content: [*content, *content[::3], [SEPARATOR, 1]])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=defects(), chunk=st.integers(3, 300), indexed=st.booleans())
def test_findings_do_not_depend_on_the_size_of_chunks(content, chunk, indexed):
    data = Arrays(content, indexed=indexed)
    whole, chunks = (lint(data, splits=["train"], chunk=size, max_examples=9) for size in (5000, chunk))
    assert chunks.findings == whole.findings
    for name, values in whole.profiles["train"].along.items():
        assert np.array_equal(values, chunks.profiles["train"].along[name], equal_nan=True), name


def test_nor_on_the_size_of_files(tmp_path):
    content = [[SEPARATOR, *document] for document in documents(30)]
    one = lint(write(tmp_path / "one", content), chunk=777)
    many = lint(write(tmp_path / "many", content, shard=100), chunk=777)
    assert many.findings == one.findings


def test_without_an_index_documents_begin_at_separators():
    content = documents(300)
    indexed, separated = (lint(Arrays(content, indexed=indexed), chunk=1000) for indexed in (True, False))
    for check in ("separators", "doubled separators", "repetition", "duplicates", "document lengths", "leak"):
        split = "validation" if check == "leak" else "train"
        one, other = found(indexed, check, split), found(separated, check, split)
        assert (one.count, one.severity, one.figures) == (other.count, other.severity, other.figures), check
    doubled = lint(Arrays([[SEPARATOR, *document] for document in content], indexed=False))
    assert found(doubled, "doubled separators").count == 300
    assert "doubled separators" in faults(lint(Arrays([[SEPARATOR] * 2, *content], indexed=False)))


def test_the_default_dataset_is_clean():
    begin = time.process_time()
    report = lint(open_dataset(), quick=True)
    assert time.process_time() - begin < 1
    assert faults(report) == {}
    report = lint(open_dataset())
    assert faults(report) == {}
    assert report.read == {name: len(open_dataset().split(name)) for name in ("train", "validation")}


def sparse(path: Path, size: int) -> Path:
    with open(path, "wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("indexed", [True, False])
def test_the_quick_part_of_a_trillion_tokens_takes_a_second(tmp_path, indexed):
    tokens, number, shards = 10**12, 10**9, 1000
    paths = [sparse(tmp_path / f"{i}.tokens", 2 * tokens // shards) for i in range(shards)]
    index = sparse(tmp_path / "ends", 8 * number)
    with open(index, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(np.array([tokens], "<i8").tobytes())

    class Huge(Arrays):
        splits = ["train"]  # noqa: RUF012

        def split(self, name):
            lengths = [tokens // shards] * shards
            return TokenStream(paths, lengths, index if indexed else None, dtype=np.dtype("uint16"), separator=0)

    begin = time.process_time()
    report = lint(Huge([[1]], indexed=False), quick=True)
    assert time.process_time() - begin < 1
    assert report.read["train"] == 64 * 2**13
    assert found(report, "doubled separators").rate == 1


def test_a_defect_of_one_document_in_fifty_shows_in_samples(tmp_path):
    content = documents(1500, words=100)  # more than is sampled
    for number in range(0, 1500, 50):
        content[number] = [SEPARATOR, *content[number]]
    dataset = write(tmp_path / "d", content)
    report = lint(dataset, quick=True)
    assert report.read["train"] < len(dataset.split("train"))
    finding = found(report, "doubled separators")
    assert finding.severity == "error"
    assert finding.rate == pytest.approx(1 / 51, rel=0.5)
    assert all(content[example.document][:2] == [SEPARATOR] * 2 for example in finding.examples)


def test_an_unknown_split_is_an_error(tmp_path):
    dataset: Dataset = write(tmp_path / "d", documents(3))
    with pytest.raises(ValueError, match="has no split 'test'"):
        lint(dataset, splits=["test"])


def test_the_report_of_one_split(tmp_path):
    dataset = write(tmp_path / "d", documents(30), documents(30, seed=1))
    report = lint(dataset, splits=["validation"])
    assert {finding.split for finding in report.findings} == {"validation"}
    assert replace(report, quick=True).exit_code() == 0
