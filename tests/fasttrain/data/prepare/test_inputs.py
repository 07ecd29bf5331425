"""Which files are found, in which order, and what they are taken for; and their chunks: nothing twice, nothing lost."""

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fasttrain.data.prepare.documents import contents
from fasttrain.data.prepare.inputs import Position, find_inputs, split_inputs


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    names = [
        "b.md",
        "a.txt",
        "src/main.py",
        "src/deep/x.c",
        "src/tests/t.py",
        ".hidden",
        ".git/config",
        "__pycache__/m.pyc",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def found(tree: Path, *names, **options) -> list[str]:
    return [os.path.relpath(input.path, tree) for input in find_inputs(names or (tree,), **options)]


def test_directories_are_read_in_order_without_what_is_hidden(tree):
    assert found(tree) == ["a.txt", "b.md", "src/deep/x.c", "src/main.py", "src/tests/t.py"]


def test_include_and_exclude(tree):
    assert found(tree, include=["*.py"]) == ["src/main.py", "src/tests/t.py"]
    assert found(tree, include=["src/*.py"], exclude=["tests"]) == ["src/main.py"]
    assert found(tree, exclude=["src/*", "b.*"]) == ["a.txt"]
    assert found(tree, tree / ".hidden", include=["*.py"]) == [".hidden"]  # named, so wanted


def test_inputs_keep_their_order_and_come_once(tree):
    (tree / "link.txt").symlink_to(tree / "a.txt")
    assert found(tree, tree / "src" / "main.py", tree / "*.*") == ["src/main.py", "a.txt", "b.md"]
    assert found(tree, f"{tree}/**/*.c") == ["src/deep/x.c"]


def test_links_in_circles_end(tree):
    (tree / "src" / "up").symlink_to(tree)
    (tree / "src" / "self").symlink_to(tree / "src" / "self")  # a link to nowhere
    assert len(found(tree)) == 5


@pytest.mark.parametrize(
    ("name", "kind", "packed"),
    [
        ("x.jsonl", "jsonl", ""),
        ("x.JSONL.GZ", "jsonl", "gzip"),
        ("c4.json.gz", "jsonl", "gzip"),
        ("x.ndjson.zst", "jsonl", "zstd"),
        ("x.json", "text", ""),
        ("x.txt.gz", "text", "gzip"),
        ("x.parquet", "parquet", ""),
        ("Makefile", "text", ""),
    ],
)
def test_names_tell_the_format(tmp_path, name, kind, packed):
    (tmp_path / name).write_text("x")
    (input,) = find_inputs([tmp_path / name])
    assert (input.kind, input.packed, input.size) == (kind, packed, 1)
    (asked,) = find_inputs([tmp_path / name], format="jsonl")
    assert (asked.kind, asked.packed) == ("jsonl", packed)


def test_what_is_not_there_is_an_error(tree):
    with pytest.raises(FileNotFoundError, match="x.txt does not exist; name files, directories or patterns such as"):
        find_inputs([tree / "x.txt"])
    with pytest.raises(ValueError, match=r"\*.jsonl matches nothing; check the path"):
        find_inputs([tree / "*.jsonl"])
    with pytest.raises(ValueError, match=r"has no files that match --include \*.rs; check the path"):
        find_inputs([tree], include=["*.rs"])
    (tree / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no files; check the path"):
        find_inputs([tree / "empty"])
    with pytest.raises(ValueError, match="there is no input"):
        find_inputs([])


def pieces_of(inputs, start=Position()):  # noqa: B008  (a tuple)
    return list(split_inputs(inputs, start=start, text_key="text", longest=1024))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("fasttrain.data.prepare.inputs.CHUNK_BYTES", 300)
    monkeypatch.setattr("fasttrain.data.prepare.inputs.READ_BYTES", 64)
    monkeypatch.setattr("fasttrain.data.prepare.inputs.MAX_FILES", 3)
    lines = b"".join(json.dumps({"text": f"document {i} " * (i % 9)}).encode() + b"\n" for i in range(50))
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    with parquet.ParquetWriter(tmp_path / "c.parquet", pyarrow.schema({"text": pyarrow.string()})) as writer:
        for group, size in enumerate([7, 30, 2, 1, 11]):  # of unequal sizes
            texts = [f"row {i} of group {group}" for i in range(size)]
            writer.write_table(pyarrow.table({"text": texts}), row_group_size=size)
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "d.parquet")
    for i in range(8):
        (tmp_path / f"e{i}.txt").write_text(f"text {i}\n" * i * 10)
    (tmp_path / "f.txt").write_text("".join(f"line {i}\n" for i in range(500)))
    (tmp_path / "g.txt.gz").write_bytes(gzip.compress((tmp_path / "f.txt").read_bytes()))
    return find_inputs([tmp_path])


def test_one_may_begin_at_the_end_of_any_chunk(inputs):
    whole = pieces_of(inputs)
    assert len(whole) > 30
    assert all(one.next == other.start for one, other in pairwise(whole))
    assert sum(chunk.size for chunk in whole) == sum(input.size for input in inputs)
    for number, chunk in enumerate(whole):
        rest = pieces_of(inputs, chunk.next)
        assert [(p.start, p.next, p.data) for p in rest] == [(p.start, p.next, p.data) for p in whole[number + 1 :]]


def test_chunks_in_a_row_are_the_content(inputs):
    found: dict[int, Any] = {}
    for chunk in pieces_of(inputs):
        for content in contents(chunk, inputs):
            if isinstance(content.data, bytes):
                assert len(found.get(content.file, b"")) == content.offset
            found[content.file] = found[content.file] + content.data if content.file in found else content.data
    for number, input in enumerate(inputs):
        if input.kind == "parquet":
            assert found[number] == parquet.read_table(input.path).column("text").to_pylist()
        else:
            data = Path(input.path).read_bytes()
            assert found[number] == (gzip.decompress(data) if input.packed else data)


@settings(max_examples=60, deadline=None)
@given(data=st.lists(st.binary(max_size=40)).map(b"\n".join), chunk=st.integers(1, 60))
def test_lines_are_in_one_chunk_each(tmp_path_factory, data, chunk):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(data)
    inputs = find_inputs([path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fasttrain.data.prepare.inputs.CHUNK_BYTES", chunk)
        found: list[Any] = [content.data for chunk in pieces_of(inputs) for content in contents(chunk, inputs)]
    assert b"".join(found) == data
    full = list(filter(None, found))
    assert all(part.endswith(b"\n") for part in full[:-1])


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("fasttrain.data.prepare.inputs.CHUNK_BYTES", 100)
    monkeypatch.setattr("fasttrain.data.prepare.inputs.LONGEST_LINE", 2**20)
    for name, data in (("x.jsonl", b"x" * 2**21), ("x.jsonl.gz", gzip.compress(b"x" * 2**21))):
        (tmp_path / name).write_bytes(data)
        inputs = find_inputs([tmp_path / name])
        with pytest.raises(ValueError, match=f"{name} has a line of more than 1 MB; is it JSONL"):
            [content for chunk in pieces_of(inputs) for content in contents(chunk, inputs)]
