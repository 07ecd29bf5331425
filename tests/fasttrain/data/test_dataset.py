"""Datasets as they are written and read, what is wrong with one, and where its documents came from."""

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import fasttrain.data.stream
from fasttrain.data.batches import Batches
from fasttrain.data.dataset import RECORD, Dataset, Manifest, SourceFile, Split
from fasttrain.data.datasets import open_dataset
from fasttrain.data.stream import DocumentIndex, TokenStream
from fasttrain.data.writer import holds_out
from fasttrain.fs import FileChecksum
from tests.datasets import DatasetWriter

AGAIN = "copy it again, or prepare the dataset again"
HELD_OUT = [17, 62, 129, 137, 194]


def stream_of(dataset: Dataset, split: str = "train") -> list[int]:
    stream = dataset.split(split)
    return stream.windows(np.array([0]), len(stream))[0].tolist()


def fails(call, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as raised:
        call()
    return str(raised.value)


def edit(path: Path, **changes) -> None:
    file = path / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def writer_at(path: Path, **options) -> DatasetWriter:
    given: dict[str, Any] = dict(tokenizer="{}", vocab=100, separator=0, source="a test")
    return DatasetWriter(path, **given | options)


@pytest.mark.parametrize("shard_tokens", [1, 2, 3, 7, 2**30])
def test_what_is_written_is_read_back_whatever_the_size_of_shards(make_dataset, shard_tokens):
    dataset = make_dataset([4, 2, 3], [3], shard_tokens=shard_tokens)
    assert stream_of(dataset) == [0, 1, 2, 3, 0, 4, 0, 5, 6]
    assert stream_of(dataset, "validation") == [0, 1, 2]
    stream = dataset.split("train")
    assert stream.document_ends.tolist() == [4, 6, 9]
    assert stream.windows(np.array([5, 0, 1]), 4).tolist() == [[4, 0, 5, 6], [0, 1, 2, 3], [1, 2, 3, 0]]
    assert dataset.bytes_per_token("train") == 3
    dataset.verify()


def test_boundaries_are_document_ends_after_the_start_of_a_window_up_to_its_end(make_dataset):
    stream = make_dataset([4, 2, 3, 5]).split("train")  # ends 4, 6, 9, 14
    starts = np.array([0, 4, 6, 8, 1])
    rows, offsets = stream.boundaries(starts, stream.windows(starts, 6))
    assert rows.tolist() == [0, 1, 1, 2, 3, 4, 4]
    assert offsets.tolist() == [4, 2, 5, 3, 1, 3, 5]


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(256, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32"), (2**18, "uint32")]
)
def test_tokens_take_two_bytes_where_the_vocabulary_allows(tmp_path, vocab, dtype):
    with writer_at(tmp_path / "d", vocab=vocab) as writer:
        writer.add("train", np.array([1, vocab - 1]), num_bytes=1)
    dataset = Dataset(tmp_path / "d")
    assert dataset.manifest.dtype == dtype
    assert stream_of(dataset) == [0, 1, vocab - 1]


def test_the_digest_is_of_the_data_not_of_its_origin(make_dataset, tmp_path):
    one, same, other = make_dataset([4], name="one"), make_dataset([4], name="same"), make_dataset([5], name="other")
    edit(tmp_path / "same", source="elsewhere")
    assert one.digest == Dataset(same.path).digest != other.digest


# --- what is wrong with a directory


def test_a_missing_directory(tmp_path):
    message = f"dataset: {tmp_path}/x does not exist; name a prepared dataset, or none for Python's standard library"
    assert fails(lambda: open_dataset(tmp_path / "x"), FileNotFoundError) == message


def test_a_file_in_place_of_a_directory(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"1234")
    message = f"dataset: {tmp_path}/notes.txt is a file; name the directory that holds dataset.json"
    assert fails(lambda: open_dataset(tmp_path / "notes.txt")) == message


def test_a_directory_of_something_else(tmp_path):
    message = f"dataset: {tmp_path} has no dataset.json: no dataset, or copied in part; copy it again"
    assert fails(lambda: open_dataset(tmp_path)) == message


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "parquet", "version": 1}'])
def test_a_description_of_another_program(tmp_path, text):
    (tmp_path / "dataset.json").write_text(text)
    path = tmp_path / "dataset.json"
    message = f'dataset: {path} does not say "format": "fasttrain dataset"; another program has written it'
    assert fails(lambda: open_dataset(tmp_path)) == message


def test_another_version(make_dataset):
    path = make_dataset([4]).path
    edit(path, version=2)
    message = (
        f"dataset: {path}/dataset.json has version 2, this fasttrain reads version 1; prepare the dataset again, or "
        "use the fasttrain that wrote it"
    )
    assert fails(lambda: open_dataset(path)) == message


def test_a_corrupt_description(make_dataset):
    path = make_dataset([4]).path
    edit(path, colour="blue")
    assert re.fullmatch(
        rf"dataset: {path}/dataset.json is corrupt \(colour is unknown\); {AGAIN}",
        fails(lambda: open_dataset(path)),
    )
    (path / "dataset.json").write_bytes((path / "dataset.json").read_bytes()[:-30])
    assert re.fullmatch(rf"dataset: {path}/dataset.json is corrupt \(.*\); {AGAIN}", fails(lambda: open_dataset(path)))


@pytest.mark.parametrize("changes", [dict(dtype="uint32")])
def test_a_description_that_contradicts_itself(make_dataset, changes):
    path = make_dataset([4, 5]).path
    edit(path, **changes)
    message = (
        f"dataset: {path}/dataset.json contradicts itself: train has 9 tokens of {changes['dtype']} in 18 bytes, "
        f"2 documents in 16 bytes; {AGAIN}"
    )
    assert fails(lambda: open_dataset(path)) == message


@pytest.mark.parametrize("name", ["train-00001.tokens", "train.documents", "tokenizer.json"])
def test_every_file_must_be_there_and_whole(make_dataset, name):
    path = make_dataset([4, 5], shard_tokens=4).path
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-1])
    sizes = f"it has {len(content) - 1} bytes instead of {len(content)}"
    assert (
        fails(lambda: open_dataset(path))
        == f"dataset: {path / name} is truncated, or still being copied: {sizes}; {AGAIN}"
    )
    (path / name).write_bytes(content + b"12")
    sizes = f"it has {len(content) + 2} bytes instead of {len(content)}"
    assert fails(lambda: open_dataset(path)) == f"dataset: {path / name} is too long: {sizes}; {AGAIN}"
    (path / name).unlink()
    assert fails(lambda: open_dataset(path), FileNotFoundError) == f"dataset: {path / name} is missing; {AGAIN}"


@pytest.mark.parametrize("name", ["train-00000.tokens", "train.documents", "tokenizer.json"])
def test_one_changed_bit_is_found_by_the_checksum(make_dataset, name):
    path = make_dataset([4, 5]).path
    content = bytearray((path / name).read_bytes())
    content[1] ^= 1
    (path / name).write_bytes(content)
    dataset = open_dataset(path)
    assert isinstance(dataset, Dataset)
    message = rf"dataset: {path / name} is corrupt: its sha256 is \w{{12}}... instead of \w{{12}}...; {AGAIN}"
    assert re.fullmatch(message, fails(dataset.verify))
    if name == "tokenizer.json":
        assert re.fullmatch(message, fails(dataset.tokenizer))


def test_an_index_of_other_tokens(make_dataset):
    path, other = make_dataset([4, 5]).path, make_dataset([4, 6], name="other").path
    (path / "train.documents").write_bytes((other / "train.documents").read_bytes())
    message = (
        f"dataset: by {path}/train.documents, the last document ends at token 10, but there are 9 tokens: the files do "
        "not belong together; copy them again, or prepare the dataset again"
    )
    assert fails(lambda: open_dataset(path).split("train")) == message


def test_a_split_that_is_not_there(make_dataset):
    dataset = make_dataset([4])
    message = (
        f"dataset: {dataset.path} has no split 'validation', only train; prepare it with more documents or a larger "
        "share of validation"
    )
    assert fails(lambda: dataset.split("validation")) == message


# --- writing


def test_an_exception_while_writing_leaves_nothing(tmp_path):
    with suppress(KeyboardInterrupt), writer_at(tmp_path / "d") as writer:
        writer.add("train", np.array([1]), num_bytes=1)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="dataset: no documents for .*; check the inputs"), writer_at(tmp_path / "d"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_dataset_is_never_overwritten(make_dataset, tmp_path):
    message = f"dataset: {tmp_path}/dataset exists; choose another directory, or delete it first"
    with ExitStack() as stack:
        late = stack.enter_context(writer_at(tmp_path / "dataset"))
        late.add("train", np.array([1]), num_bytes=1)
        first = make_dataset([4])  # completed while the other one is being written
        assert fails(stack.pop_all().close, FileExistsError) == message
    assert fails(lambda: writer_at(first.path), FileExistsError) == message
    assert list(tmp_path.iterdir()) == [first.path]
    assert stream_of(first) == [0, 1, 2, 3]


def _write_and_die(path: Path, moment: str) -> None:
    with writer_at(path) as writer:
        for _ in range(1000):
            writer.add("train", np.arange(1, 9), num_bytes=1)
        if moment == "writing":
            os.kill(os.getpid(), signal.SIGKILL)
        os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["writing", "completing"])
def test_a_killed_writer_leaves_nothing_that_looks_whole(tmp_path, moment):
    process = os.fork()
    if not process:
        try:
            _write_and_die(tmp_path / "d", moment)
        finally:
            os._exit(1)  # not as a second pytest
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    message = f"dataset: {left} was never finished: its preparation stopped early; prepare it again"
    assert fails(lambda: open_dataset(left)) == message
    fails(lambda: open_dataset(tmp_path / "d"), FileNotFoundError)


# --- held-out documents


def test_the_content_of_a_document_decides_about_its_split():
    documents = [f"document {i}".encode() for i in range(20_000)]
    held_out = {document for document in documents if holds_out(document, 0.02)}
    assert abs(len(held_out) - 400) < 4 * 20
    assert held_out <= {document for document in documents if holds_out(document, 0.03)}  # a larger share only adds
    assert not any(holds_out(document, 0.0) for document in documents)
    assert all(holds_out(document, 1.0) for document in documents)
    assert [i for i, document in enumerate(documents[:200]) if holds_out(document, 0.02)] == HELD_OUT  # frozen


# --- a trillion tokens


def sparse(path: Path, size: int, end: bytes = b"") -> FileChecksum:
    with open(path, "wb") as file:
        file.truncate(size)
        file.seek(size - len(end))
        file.write(end)
    return FileChecksum(name=path.name, size=size, sha256="")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_trillion_tokens_open_and_read_at_once(tmp_path):
    tokens, documents, shards = 10**12, 10**9, 1000
    split = Split(
        tokens=tokens,
        documents=documents,
        bytes=3 * tokens,
        shards=tuple(sparse(tmp_path / f"train-{i:05}.tokens", 2 * tokens // shards) for i in range(shards)),
        index=sparse(tmp_path / "train.documents", 8 * documents, np.array([tokens], "<i8").tobytes()),
    )
    tokenizer = sparse(tmp_path / "tokenizer.json", 2)
    manifest = Manifest(
        source="zeros", dtype="uint16", vocab=9, separator=0, tokenizer=tokenizer, splits={"train": split}
    )
    (tmp_path / "dataset.json").write_text(manifest.dump())
    before, begin = resident(), time.process_time()
    stream = open_dataset(tmp_path).split("train")
    batches = Batches(stream, sequence=2048, sequences=64, seed=0, document_mask=True)
    for step in (0, 10**6):
        assert batches.at(step).tokens.sum() == 0
    assert time.process_time() - begin < 1
    assert resident() - before < 64e6


def test_the_ends_of_many_documents_are_those_of_an_array(tmp_path, monkeypatch):
    monkeypatch.setattr(fasttrain.data.stream, "HELD_ENDS", 0)
    ends = np.cumsum(np.random.default_rng(0).integers(0, 5, 20_000)).astype("<i8")
    ends.tofile(tmp_path / "ends")
    sparse(tmp_path / "tokens", 2 * int(ends[-1]))
    stream = TokenStream([tmp_path / "tokens"], [int(ends[-1])], tmp_path / "ends", dtype=np.dtype("uint16"))
    found = stream.document_ends
    assert isinstance(found, DocumentIndex)
    for numbers in (np.arange(3), np.array([-1, 7, 19_999, 8, 5000]), np.empty(0, np.int64)):
        assert found[numbers].tolist() == ends[numbers].tolist()
    positions = np.arange(-1, ends[-1] + 2, 7)
    sides: list[Literal["left", "right"]] = ["left", "right"]
    for side in sides:
        assert found.searchsorted(positions, side=side).tolist() == ends.searchsorted(positions, side=side).tolist()
    for place, side in itertools.product([*positions[::97], *ends[::4096], ends[-1]], sides):
        alone, fresh = np.array([place]), DocumentIndex(len(ends), lambda numbers: ends[numbers])
        assert fresh.searchsorted(alone, side=side) == ends.searchsorted(alone, side=side)


@pytest.mark.parametrize("cached", [True, False], ids=["in memory", "not in memory"])
def test_many_windows_are_asked_for_at_once_where_they_are_not_in_memory(tmp_path, monkeypatch, cached):
    tokens = np.arange(10_000, dtype="<u2")
    tokens.tofile(tmp_path / "tokens")
    stream = TokenStream([tmp_path / "tokens"], [10_000], None, dtype=np.dtype("uint16"))

    def preadv(file: int, buffers: Sequence[bytearray], place: int, flags: int) -> int:
        if not cached and place > 5000:  # one of them
            raise BlockingIOError
        return len(buffers[0])

    asked = []
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(fasttrain.data.stream, "advise", lambda _, advice, begins, size: asked.extend(begins))
    starts = np.arange(0, 9000, 30)
    assert (stream.windows(starts, 7) == tokens[starts[:, None] + np.arange(7)]).all()
    assert asked == ([] if cached else (2 * starts).tolist())


def test_a_deleted_file_is_still_read_and_a_truncated_one_is_an_error_that_names_it(tmp_path):
    """A mapped page would end the process with SIGBUS."""
    path = tmp_path / "tokens"
    np.arange(10_000, dtype="<u2").tofile(path)
    stream = TokenStream([path], [10_000], None, dtype=np.dtype("uint16"))
    path.rename(tmp_path / "away")
    assert stream.windows(np.array([9000]), 3).tolist() == [[9000, 9001, 9002]]
    os.truncate(tmp_path / "away", 8192)
    assert stream.windows(np.array([0]), 3).tolist() == [[0, 1, 2]]
    with pytest.raises(OSError, match=f"{path} is truncated: it has 8192 bytes instead of 20000; copy it again"):
        stream.windows(np.array([9000]), 3)
    with pytest.raises(OSError, match="is truncated: it has 8192 bytes instead of 20000"):
        TokenStream([tmp_path / "away"], [10_000], None, dtype=np.dtype("uint16"))


def bytes_read() -> int:
    """From disks, by this process. Nothing on file systems in memory."""
    return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])


def test_only_the_pages_of_a_batch_are_read(tmp_path):
    tokens, ends = np.zeros(2**25, "<u2"), np.arange(8, 2**25 + 1, 8, dtype="<i8")  # 67 and 34 MB
    for name, array in (("tokens", tokens), ("ends", ends)):
        with open(tmp_path / name, "wb") as file:
            file.write(array.tobytes())
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = bytes_read()
    stream = TokenStream([tmp_path / "tokens"], [len(tokens)], tmp_path / "ends", dtype=np.dtype("uint16"), separator=0)
    assert bytes_read() - before < ends.nbytes / 7  # a page of the index in eight, here or with the first batch
    batches = Batches(stream, sequence=2048, sequences=64, seed=0, document_mask=True)
    batches.at(0)
    first = bytes_read()
    assert first - before < ends.nbytes / 7 + 64 * 80 * 1024
    batches.at(1)
    assert bytes_read() - first < 64 * 80 * 1024  # for a window: 3 pages, and those of its documents in the index


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
    with pytest.raises(ValueError, match=f"{name} is corrupt: its sha256 is"):
        Dataset(dataset.path).verify()
    (dataset.path / name).write_bytes(content[:-1])
    with pytest.raises(
        ValueError,
        match=f"{name} is truncated, or still being copied: it has {len(content) - 1} bytes instead of {len(content)}",
    ):
        Dataset(dataset.path)
