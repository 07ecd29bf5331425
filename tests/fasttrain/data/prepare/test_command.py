"""`fasttrain data prepare`, as its user sees it."""

import json
import signal

import pytest

from fasttrain import cli
from fasttrain.cli import data_prepare
from fasttrain.data.dataset import Dataset
from fasttrain.units import clock


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(60):
        (tmp_path / "in" / f"{i}.md").write_text(f"# Text {i}\n\n" + f"It is about the number {i}. " * 20)
    (tmp_path / "in" / "empty.md").write_text("")
    return tmp_path / "in"


def command(*arguments) -> int:
    return cli.main(["data", "prepare", *map(str, arguments), "--workers", "1"])


def test_a_folder_of_text(tmp_path, texts, capsys):
    assert command(texts, "--out", tmp_path / "out", "--train-tokenizer", 300, "--validation", 0.1) == 0
    shown = capsys.readouterr()
    dataset = Dataset(tmp_path / "out")
    assert dataset.vocab == 300
    assert sum(split.documents for split in dataset.manifest.splits.values()) == 60
    assert f"next: fasttrain train --data.path {tmp_path / 'out'}" in shown.out
    assert "train" in shown.out
    assert f"1 near-empty    first: {texts}/empty.md:1" in shown.out
    assert shown.err.splitlines() == ["training a tokenizer", "encoding 0 of 0 MB, 0 documents"]


def test_every_option_acts(tmp_path, texts):
    options = ["--tokenizer", "bytes", "--separator", "<end>", "--validation", 0, "--shortest", 600, "--longest", 1024]
    options += [
        "--exclude",
        "1*",
        "--include",
        "*.md",
        "--include",
        "*.jsonl",
        "--text-key",
        "body",
        "--keep-duplicates",
    ]
    lines = [json.dumps({"body": "x" * size}) for size in (599, 600, 600, 5000)]
    (texts / "x.jsonl").write_text("\n".join(lines))
    (texts / "x.txt").write_text("y" * 700)
    assert command(texts, "--out", tmp_path / "out", *options) == 0
    dataset = Dataset(tmp_path / "out")
    assert dataset.vocab == 257
    assert dataset.tokenizer().token_to_id("<end>") == dataset.separator
    assert list(dataset.manifest.splits) == ["train"]
    assert dataset.manifest.splits["train"].documents == 2 + 5  # the md files are shorter
    assert (
        command(texts, "--out", tmp_path / "text", "--format", "text", "--include", "*.jsonl", "--tokenizer", "bytes")
        == 0
    )
    assert Dataset(tmp_path / "text").manifest.splits["train"].documents == 1


def test_nothing_held_out_is_said(tmp_path, texts, capsys):
    assert command(texts / "1.md", "--out", tmp_path / "out", "--tokenizer", "bytes", "--validation", 0) == 0
    assert "no document was held out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "bytes", "--train-tokenizer", "300"], "are two ways to one thing; choose one"),
        (["--tokenizer", "nowhere.json"], "there is no tokenizer nowhere.json"),
        (["--include", "*.rs"], "has no files that match --include *.rs; check the path"),
        (["--validation", "2"], "--validation: '2' must be a finite number from 0 to below 1"),
    ],
)
def test_mistakes_are_one_line(tmp_path, texts, capsys, options, message):
    with pytest.raises(SystemExit) as raised:
        command(texts, "--out", tmp_path / "out", *options)
    assert raised.value.code == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("fasttrain data prepare: error: ")
    assert message in shown
    assert not (tmp_path / "out").exists()


def test_interrupted_and_gone_on(tmp_path, texts, capsys, monkeypatch):
    monkeypatch.setattr("fasttrain.data.prepare.inputs.MAX_FILES", 10)
    rate = data_prepare._rate
    monkeypatch.setattr(
        data_prepare, "_rate", lambda p, *rest: signal.raise_signal(signal.SIGINT) if p.done else rate(p, *rest)
    )
    arguments = (texts, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert command(*arguments) == 130
    assert "interrupted; the same command resumes where it stopped" in capsys.readouterr().err
    monkeypatch.undo()
    assert command(*arguments) == 0
    Dataset(tmp_path / "out").verify()


def test_time_left_is_readable():
    assert [clock(seconds) for seconds in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]
