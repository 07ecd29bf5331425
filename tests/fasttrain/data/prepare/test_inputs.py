"""Which files are found, in which order, and what they are taken for."""

import os
from pathlib import Path

import pytest

from fasttrain.data.prepare.inputs import find_inputs


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
