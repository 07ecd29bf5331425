"""Where documents came from, as a dataset tells it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fasttrain.data import Dataset, DatasetWriter
from fasttrain.data.sources import RECORD, SourceFile


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    files = [SourceFile(path=tmp_path / name, size=3, mtime_ns=5) for name in ("a.jsonl", "b.parquet")]
    with DatasetWriter(
        tmp_path / "dataset", tokenizer="{}", vocab=9, separator=0, source="a test", files=files
    ) as writer:
        writer.add("train", np.array([1, 2]), num_bytes=2, source=(2**40, 7, 0, 50))
        writer.add("train", np.array([3]), num_bytes=1, source=(12, 0, 1, 9))
        writer.add("validation", np.array([3]), num_bytes=1, source=(0, 1, 0, 4))
    return Dataset(tmp_path / "dataset")


def test_a_document_knows_its_file_and_place(dataset, tmp_path):
    source = dataset.source("train", 0)
    assert (source.file.path, source.offset, source.size, source.line) == (tmp_path / "a.jsonl", 2**40, 50, 7)
    assert str(source) == f"{tmp_path}/a.jsonl:7"
    row = dataset.source("train", 1)
    assert (row.offset, row.line, str(row)) == (12, None, f"{tmp_path}/b.parquet, row 12")
    assert dataset.source("validation", 0).line == 1
    records = np.fromfile(dataset.path / "train.sources", RECORD)
    assert records["file"].tolist() == [0, 1]
    dataset.verify()


def test_a_file_that_has_changed(dataset, tmp_path):
    (tmp_path / "a.jsonl").write_text("abc")
    source = dataset.source("train", 0)
    assert not source.file.is_unchanged()
    state = (tmp_path / "a.jsonl").stat()
    assert SourceFile(path=source.file.path, size=3, mtime_ns=state.st_mtime_ns).is_unchanged()
    (tmp_path / "a.jsonl").unlink()
    assert not source.file.is_unchanged()


def test_a_dataset_without_sources_says_nothing(make_dataset):
    dataset = make_dataset([4])
    assert dataset.source("train", 0) is None
    assert "sources" not in (dataset.path / "dataset.json").read_text()


def test_a_document_that_is_not_there(dataset):
    with pytest.raises(ValueError, match="has no document 2 in train, which has 2"):
        dataset.source("train", 2)


def test_sources_are_no_part_of_what_the_data_is(dataset, make_dataset, tmp_path):
    with DatasetWriter(tmp_path / "other", tokenizer="{}", vocab=9, separator=0, source="") as writer:
        for split, tokens in (("train", [1, 2]), ("train", [3]), ("validation", [3])):
            writer.add(split, np.array(tokens), num_bytes=len(tokens))
    assert Dataset(tmp_path / "other").digest == dataset.digest


def test_sources_of_another_number_of_documents(dataset):
    path = dataset.path / "dataset.json"
    description = json.loads(path.read_text())
    description["splits"]["train"]["sources"] = description["splits"]["validation"]["sources"]
    path.write_text(json.dumps(description))
    message = (
        "dataset.json contradicts itself: train has 2 documents, and 24 bytes of sources; copy it again, or prepare"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Dataset(dataset.path)


@pytest.mark.parametrize("name", ["train.sources", "sources.jsonl"])
def test_sources_are_checked_as_all_other_files(dataset, name):
    content = (dataset.path / name).read_bytes()
    (dataset.path / name).write_bytes(b"x" + content[1:])
    with pytest.raises(ValueError, match=f"{name} has changed since it was prepared"):
        Dataset(dataset.path).verify()
    (dataset.path / name).write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{name} has {len(content) - 1} bytes instead of {len(content)}"):
        Dataset(dataset.path)
