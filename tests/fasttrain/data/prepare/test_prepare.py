"""Files in, dataset out: every format, every reason to leave a document out, and where each came from."""

import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fasttrain.config import PrepareConfig
from fasttrain.data.dataset import Dataset, SourceFile
from fasttrain.data.prepare import prepare
from fasttrain.data.prepare.tokenizer import SEPARATOR
from fasttrain.data.writer import holds_out

ALL = PrepareConfig(validation=0, shortest=1)
TEXTS = [f"Document {i} says: naïve “text” and {'more ' * (i % 7)}\nof it, {i * 37}.\n" for i in range(60)]


def documents(dataset: Dataset, split: str = "train") -> list[str]:
    """Decoded, each begun by exactly one separator."""
    stream, tokenizer = dataset.split(split), dataset.tokenizer()
    tokens = stream.windows(np.array([0]), len(stream))[0]
    found = np.split(tokens, stream.document_ends[:-1])
    assert all(chunk[0] == dataset.separator and not (chunk[1:] == dataset.separator).any() for chunk in found)
    return [tokenizer.decode(chunk[1:].tolist(), skip_special_tokens=False) for chunk in found]


def prepared(out: Path, *names: Path, tokenizer="bytes", settings=ALL, workers=1, **options) -> Dataset:
    prepare(names, out, tokenizer=tokenizer, settings=settings, workers=workers, **options)
    dataset = Dataset(out)
    dataset.verify()
    return dataset


def dropped(dataset: Dataset) -> list[tuple]:
    lines = [json.loads(line) for line in (dataset.path / "dropped.jsonl").read_text().splitlines()]
    assert len(lines) == sum((dataset.manifest.dropped or {}).values())
    return [(line["reason"], Path(line["file"]).name, line.get("line", line.get("row"))) for line in lines]


def jsonl(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)).encode()


def write(path: Path, texts: list[str]) -> Path:
    """In the format of its name."""
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(jsonl(texts[:20])) + gzip.compress(jsonl(texts[20:])))  # two members
    elif path.suffix == ".zst":
        pack = zstandard.ZstdCompressor().compress
        path.write_bytes(pack(jsonl(texts[:20])) + pack(jsonl(texts[20:])))
    else:
        path.write_bytes(jsonl(texts))
    return path


def text_at(source) -> str:
    """The document, read again from where its source says it is."""
    path = source.file.path
    if path.suffix == ".parquet":
        assert source.line is None
        return parquet.read_table(path).column("text")[source.offset].as_py()
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if path.suffix == ".zst":
        content = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read()
    assert content[: source.offset].count(b"\n") + 1 == source.line
    data = content[source.offset : source.offset + source.size]
    return json.loads(data)["text"] if ".jsonl" in path.name else data.decode()


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.parquet"])
@pytest.mark.parametrize("chunk", [100, 1000, 2**22])
def test_every_format_in_chunks_of_any_size(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr("fasttrain.data.prepare.inputs.CHUNK_BYTES", chunk)
    monkeypatch.setattr("fasttrain.data.prepare.inputs.READ_BYTES", 50)
    dataset = prepared(tmp_path / "out", write(tmp_path / name, TEXTS))
    assert documents(dataset) == TEXTS
    sources = [dataset.source("train", i) for i in range(len(TEXTS))]
    assert [text_at(source) for source in sources] == TEXTS
    assert str(sources[5]) == f"{tmp_path / name}" + (", row 5" if name.endswith("parquet") else ":6")


def test_a_tree_of_texts(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / "tree" / f"{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / f"{i % 3}" / f"{i:02}.md").write_text(text)
    (tmp_path / "tree" / "packed.txt.gz").write_bytes(gzip.compress(b"packed text\nof two lines\n"))
    dataset = prepared(tmp_path / "out", tmp_path / "tree", tokenizer=400)
    wanted = [TEXTS[i] for start in range(3) for i in range(start, len(TEXTS), 3)]
    assert documents(dataset) == [*wanted, "packed text\nof two lines\n"]
    assert dataset.vocab == 400
    assert [text_at(dataset.source("train", i)) for i in (0, 30, 59)] == [wanted[i] for i in (0, 30, 59)]
    assert dataset.source("train", 60).file.path.name == "packed.txt.gz"


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_text_is_cut_at_lines_and_nothing_is_lost(tmp_path, monkeypatch, packed):
    monkeypatch.setattr("fasttrain.data.prepare.inputs.LINE_SEARCH_BYTES", 100)
    text = "".join(f"line {i} é\n" for i in range(1000)) + "".join(chr(0x4E00 + i) for i in range(3000))
    path = tmp_path / ("x.txt.gz" if packed else "x.txt")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    dataset = prepared(tmp_path / "out", path, settings=PrepareConfig(validation=0, shortest=1, longest=1024))
    found = documents(dataset)
    assert "".join(found) == text
    assert len(found) > 10
    assert all(part.endswith("\n") for part in found[:10])
    assert max(len(part.encode()) for part in found) < 1300
    assert [text_at(dataset.source("train", i)) for i in range(len(found))] == found


def test_a_line_longer_than_a_part_stays_whole_and_leaves_no_empty_parts(tmp_path):
    (tmp_path / "x.txt").write_text(text := "x" * 5000 + "\n" + "the end of it\n" * 100)
    dataset = prepared(tmp_path / "out", tmp_path / "x.txt", settings=PrepareConfig(validation=0, longest=1024))
    assert "".join(documents(dataset)) == text
    assert dropped(dataset) == []


def test_a_long_document_of_jsonl_is_cut_too(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    dataset = prepared(
        tmp_path / "out", write(tmp_path / "x.jsonl", [text]), settings=PrepareConfig(validation=0, longest=2048)
    )
    assert "".join(documents(dataset)) == text
    assert len(documents(dataset)) == 5
    assert {dataset.source("train", i).line for i in range(5)} == {1}


def test_what_is_dropped_is_reported_with_file_and_line(tmp_path):
    lines = [
        json.dumps({"text": "a first document that is kept"}),
        "",  # an empty line is nothing
        "{not json",
        json.dumps({"content": "another key"}),
        json.dumps({"text": "  short \n"}),
        json.dumps({"text": "zeros \0 in the middle of it"}),
        '{"text": "half a character \\ud800 in JSON"}',
        json.dumps({"text": "a first document that is kept"}),
        json.dumps({"text": None}),
        json.dumps(["a list, no record"]),
        json.dumps("a string by itself is a document"),
    ]
    data = (
        "\n".join(lines).encode()
        + b'\n{"text": "\xff not UTF-8, in JSON"}\n'
        + json.dumps({"text": "the last one, kept"}).encode()
    )
    (tmp_path / "x.jsonl").write_bytes(data)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.bin").write_bytes(b"\x7fELF\0\0" * 100)
    (tree / "b.txt").write_bytes("a text in\nLatin-1: é".encode("latin-1"))
    (tree / "c.txt").write_text("")
    (tree / "d.txt").write_text("a string by itself is a document")
    (tree / "e.txt").write_text("\ufeffa text with a mark of its byte order")
    table = pyarrow.table({"text": ["a row of a Parquet file", None, "tiny"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    dataset = prepared(
        tmp_path / "out", tmp_path / "x.jsonl", tree, tmp_path / "x.parquet", settings=PrepareConfig(validation=0)
    )
    assert documents(dataset) == [
        "a first document that is kept",
        "a string by itself is a document",
        "the last one, kept",
        "a text with a mark of its byte order",
        "a row of a Parquet file",
    ]
    assert dropped(dataset) == [
        ("invalid JSON", "x.jsonl", 3),
        ("no text", "x.jsonl", 4),
        ("near-empty", "x.jsonl", 5),
        ("binary", "x.jsonl", 6),
        ("undecodable", "x.jsonl", 7),
        ("duplicate", "x.jsonl", 8),
        ("no text", "x.jsonl", 9),
        ("no text", "x.jsonl", 10),
        ("undecodable", "x.jsonl", 12),
        ("binary", "a.bin", 1),
        ("undecodable", "b.txt", 2),
        ("near-empty", "c.txt", 1),
        ("duplicate", "d.txt", 1),
        ("no text", "x.parquet", 1),
        ("near-empty", "x.parquet", 2),
    ]
    kept = prepared(tmp_path / "all", tmp_path / "x.jsonl", settings=PrepareConfig(validation=0, keep_duplicates=True))
    assert len(documents(kept)) == 4


def test_lines_are_counted_over_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("fasttrain.data.prepare.inputs.CHUNK_BYTES", 64)
    texts = [f"document number {i // 2}" for i in range(40)]
    dataset = prepared(tmp_path / "out", write(tmp_path / "x.jsonl", texts))
    assert dropped(dataset) == [("duplicate", "x.jsonl", line) for line in range(2, 41, 2)]


def test_a_large_binary_file_is_not_read_to_its_end(tmp_path):
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(2**40)
    (tmp_path / "x.txt").write_text("a text beside it")
    dataset = prepared(tmp_path / "out", tmp_path / "x.bin", tmp_path / "x.txt")
    assert dropped(dataset) == [("binary", "x.bin", 1)]


def test_a_text_that_spells_the_separator_does_not_end(tmp_path):
    texts = [f"before {SEPARATOR} after", "no such thing", SEPARATOR * 3]
    for tokenizer in ("bytes", 300):
        out = tmp_path / f"{tokenizer}"
        prepare([write(tmp_path / "x.jsonl", texts)], out, tokenizer=tokenizer, settings=ALL, workers=1)
        assert documents(Dataset(out)) == texts


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=8)
)
def test_any_documents_come_back_in_their_splits(tmp_path_factory, texts):
    directory = tmp_path_factory.mktemp("any")
    path = write(directory / "x.jsonl", ["something, so that it is never empty", *texts])
    dataset = prepared(directory / "out", path, settings=PrepareConfig(validation=0.4, shortest=1))
    wanted = list(dict.fromkeys(["something, so that it is never empty", *(text for text in texts if text.strip())]))
    for split, is_held_out in (("train", False), ("validation", True)):
        chosen = [text for text in wanted if holds_out(text.encode(), 0.4) == is_held_out]
        assert (documents(dataset, split) if chosen else []) == chosen


def test_the_same_files_whatever_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr("fasttrain.data.prepare.inputs.CHUNK_BYTES", 500)
    inputs = [write(tmp_path / name, TEXTS) for name in ("x.jsonl", "y.jsonl.gz", "z.parquet")]
    write(tmp_path / "w.jsonl", [text.upper() for text in TEXTS])
    for workers in (1, 2, 3):
        prepared(
            tmp_path / f"{workers}",
            *inputs,
            tmp_path / "w.jsonl",
            tokenizer=350,
            settings=PrepareConfig(validation=0.1),
            workers=workers,
        )
    first = {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir()}
    assert len(first) == 10
    for workers in (2, 3):
        assert {path.name: path.read_bytes() for path in (tmp_path / f"{workers}").iterdir()} == first


def test_documents_keep_their_split_when_data_is_added(tmp_path):
    few = prepared(tmp_path / "few", write(tmp_path / "x.jsonl", TEXTS[:30]), settings=PrepareConfig(validation=0.2))
    all_ = prepared(tmp_path / "all", write(tmp_path / "y.jsonl", TEXTS[::-1]), settings=PrepareConfig(validation=0.2))
    for split in ("train", "validation"):
        assert set(documents(few, split)) <= set(documents(all_, split))


def test_names_of_files_need_not_be_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text("a text in a file of a strange name")
    (tmp_path / "in" / f"empty {name}").write_text("")
    result = prepare([tmp_path / "in"], tmp_path / "out", tokenizer="bytes", settings=ALL, workers=1)
    assert result.examples["near-empty"].isascii()
    assert dropped(Dataset(tmp_path / "out")) == [("near-empty", f"empty {name}", 1)]
    source = Dataset(tmp_path / "out").source("train", 0)
    assert source.file.path == tmp_path / "in" / name
    assert source.file == SourceFile.at(source.file.path)


# --- bad input


def fails(*names, kind: type[Exception] = ValueError, out: Path | None = None, **options) -> str:
    out = out or Path(names[0]).parent / "out"
    with pytest.raises(kind) as raised:
        prepared(out, *names, **options)
    assert not out.exists()
    return str(raised.value)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_a_truncated_archive_is_named(tmp_path, name):
    path = write(tmp_path / name, TEXTS)
    content = path.read_bytes()
    for size in (0, 1, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        message = fails(path, restart=True)
        assert re.search(
            rf"{name} is truncated: its \w+ stream does not end within {size} bytes; copy it again", message
        )
    path.write_bytes(content[:30] + b"garbage" * 10 + content[100:])
    assert re.search(rf"{name} is (corrupt|truncated)", fails(path, restart=True))
    path.write_bytes(content)
    assert documents(prepared(tmp_path / "out", path, restart=True)) == TEXTS


def test_a_corrupt_parquet_file(tmp_path):
    path = write(tmp_path / "x.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} cannot be read as Parquet" in fails(path)


def test_a_wrong_column_or_key_is_told_with_those_there_are(tmp_path):
    path = write(tmp_path / "x.parquet", TEXTS)
    assert fails(path, settings=PrepareConfig(text_key="content")) == (
        f"prepare: {path} has no column 'content', but id, text; set --text-key"
    )
    assert "has int64, not text, in its column 'id'; set --text-key" in fails(
        path, settings=PrepareConfig(text_key="id"), restart=True
    )
    path = write(tmp_path / "x.jsonl", TEXTS)
    assert fails(path, settings=PrepareConfig(text_key="content"), restart=True) == (
        f"prepare: {path} has more bad lines than good ones, one of them line 1: no text (no string 'content'; it has "
        "'id', 'text'); set --text-key"
    )


def test_a_file_that_is_no_jsonl(tmp_path):
    (tmp_path / "x.jsonl").write_text("some text\n" * 100)
    message = fails(tmp_path / "x.jsonl")
    assert "more bad lines than good ones, one of them line 1: invalid JSON (Expecting value" in message
    assert message.endswith("name the right file, or set --format")


def test_nothing_left_is_an_error_that_says_why(tmp_path):
    (tmp_path / "x.txt").write_text("tiny")
    (tmp_path / "y.txt").write_bytes(b"\0" * 100)
    message = fails(tmp_path / "x.txt", tmp_path / "y.txt", settings=PrepareConfig())
    assert message == (
        f"prepare: there is no document left for {tmp_path}/out: 1 near-empty, 1 binary; near-empty: "
        f"{tmp_path}/x.txt:1; binary: {tmp_path}/y.txt:1"
    )


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl", TEXTS)

    def refuse(input, begin, end):  # root may read everything
        raise PermissionError(13, "Permission denied", input.path)

    monkeypatch.setattr("fasttrain.data.prepare.documents.read_range", refuse)
    message = f"prepare: no permission for {path}; change that, or skip it with --exclude"
    assert fails(path, kind=PermissionError) == message


def test_an_input_that_changes_meanwhile(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl", TEXTS)

    def change(progress):
        with open(path, "a") as file:
            file.write("{}\n")

    message = fails(path, on_progress=change)
    assert message.startswith(f"prepare: {path} has changed since the preparation began; wait until it is written")


def test_a_full_disk(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl", TEXTS)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = fails(path, kind=OSError)
    assert message == (
        f"prepare: the disk of {tmp_path}/.out.partial-prepare is full; free some space, and the same command resumes "
        "where it stopped"
    )
    monkeypatch.undo()
    assert documents(prepared(tmp_path / "out", path)) == TEXTS


def test_an_output_that_exists(tmp_path):
    path = write(tmp_path / "x.jsonl", TEXTS)
    prepared(tmp_path / "out", path)
    with pytest.raises(FileExistsError, match="out exists; choose another directory, or delete it first"):
        prepared(tmp_path / "out", path)
