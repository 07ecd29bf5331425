"""Bad command lines: exit code 1 or 2, one line that says what is wrong, and nothing left behind."""

from __future__ import annotations

import errno
import io
import shlex
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from fasttrain.cli import main
from fasttrain.tools.webpage import Axis, ticks_of
from tests.bad.commands import COMMANDS
from tests.fasttrain.conftest import *  # noqa: F403  (small_run)


@pytest.fixture(scope="session")
def run(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, with some bad files beside its own."""
    copy = Path(shutil.copytree(small_run, tmp_path_factory.mktemp("bad") / "run", symlinks=True))
    (copy / "bad.txt").write_bytes(b"a\xff")
    Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a")).save(str(copy / "small.json"))
    return copy


def ended(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(("line", "said"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_a_bad_command_is_answered_in_a_line_and_leaves_nothing(run, tmp_path, monkeypatch, capsys, line, said):
    monkeypatch.setenv("COLUMNS", "400")
    if "parquet" in line:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"body": ["a", "b"]}), run / "other.parquet")
        monkeypatch.setattr("fasttrain.data.prepare.preparation.trained_on", lambda *_, **__: pytest.fail("trained"))
    monkeypatch.chdir(tmp_path)
    words = [word.format(run=run, tmp=tmp_path) for word in shlex.split(line)]
    code, err = ended(words), capsys.readouterr().err
    assert code in (1, 2)
    assert said.format(run=run, tmp=tmp_path) in " ".join(err.split())
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["report", "{run}", "--png", "{tmp}/x.png"], ["report", "{run}", "--out", "{tmp}/x.html"],
     ["report", "{run}", "--png", "{tmp}/x.svg", "--out", "{run}/report.html"],
     ["data", "lint", "--quick", "--json", "{tmp}/x.json"], ["data", "lint", "--quick", "--plot", "{tmp}/x.png"],
     ["plan", "--gpu", "a10", "--html", "{tmp}/x.html"], ["export", "{run}", "--out", "{tmp}/x"]],
    ids=" ".join,
)  # fmt: skip
def test_a_full_disk_leaves_nothing_behind(run, tmp_path, monkeypatch, capsys, words):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr("fasttrain.fs.HashedFile.write", full)
    monkeypatch.setattr("pathlib.Path.write_text", full)
    if "lint" in words or "--png" in words:
        figure = pytest.importorskip("matplotlib.figure")

        def half(_: object, path: Path, **__: object) -> None:
            Path(path).write_bytes(b"half a picture")
            full()

        monkeypatch.setattr(figure.Figure, "savefig", half)
    assert ended([word.format(run=run, tmp=tmp_path) for word in words]) == 2
    assert "No space left on device; free some disk space" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == []


def test_a_prompt_from_the_input_that_is_not_utf8(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert ended(["generate", str(run), "--prompt-file", "-"]) == 2
    assert "--prompt-file - is not UTF-8: byte 0 is 0xff" in capsys.readouterr().err


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("power", range(-290, 290, 7))
def test_axes_of_any_size_have_steps(power, log):
    for low, high in ((1.0, 9.99), (0.5, 7.0000001), (1.0, 1000.0), (0.99999999999, 1.0)):
        ticks = ticks_of(Axis("x", str, log=log), low * 10.0**power, high * 10.0**power)
        assert len(ticks) <= 12


def test_samples_within_a_loop_are_in_one(make_text, tmp_path, capsys):
    path = make_text(tmp_path / "data", words=1, documents=4000)
    ended(["data", "lint", str(path), "--quick"])
    assert "are in 0 loops" not in " ".join(capsys.readouterr().out.split())
