"""Inputs in chunks: nothing twice, nothing lost, and the same ones wherever one begins."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fasttrain.data.prepare import chunks
from fasttrain.data.prepare.chunks import Position, cut
from fasttrain.data.prepare.documents import contents
from fasttrain.data.prepare.inputs import find_inputs


def pieces_of(inputs, start=Position()):  # noqa: B008  (a tuple)
    return list(cut(inputs, start=start, text_key="text", longest=1024))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(chunks, "PIECE", 300)
    monkeypatch.setattr(chunks, "BLOCK", 64)
    monkeypatch.setattr(chunks, "FILES", 3)
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


def test_one_may_begin_at_the_end_of_any_piece(inputs):
    whole = pieces_of(inputs)
    assert len(whole) > 30
    assert all(one.next == other.start for one, other in pairwise(whole))
    assert sum(piece.size for piece in whole) == sum(input.size for input in inputs)
    for number, piece in enumerate(whole):
        rest = pieces_of(inputs, piece.next)
        assert [(p.start, p.next, p.data) for p in rest] == [(p.start, p.next, p.data) for p in whole[number + 1 :]]


def test_pieces_in_a_row_are_the_content(inputs):
    found: dict[int, bytes | list] = {}
    for piece in pieces_of(inputs):
        for content in contents(piece, inputs):
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
@given(data=st.lists(st.binary(max_size=40)).map(b"\n".join), piece=st.integers(1, 60))
def test_lines_are_in_one_piece_each(tmp_path_factory, data, piece):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(data)
    inputs = find_inputs([path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "PIECE", piece)
        found = [content for piece in pieces_of(inputs) for content in contents(piece, inputs)]
    assert b"".join(content.data for content in found) == data
    full = [content.data for content in found if content.data]
    assert all(part.endswith(b"\n") for part in full[:-1])


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "PIECE", 100)
    monkeypatch.setattr(chunks, "LONGEST_LINE", 2**20)
    for name, data in (("x.jsonl", b"x" * 2**21), ("x.jsonl.gz", gzip.compress(b"x" * 2**21))):
        (tmp_path / name).write_bytes(data)
        inputs = find_inputs([tmp_path / name])
        with pytest.raises(ValueError, match=f"{name} has a line of more than 1 MB; is it JSONL"):
            [content for piece in pieces_of(inputs) for content in contents(piece, inputs)]
