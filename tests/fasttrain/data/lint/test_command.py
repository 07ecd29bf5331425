"""fasttrain data lint: what it prints and writes, and its exit codes."""

import builtins
import json
import shutil
import sys

import pytest

from fasttrain import cli
from fasttrain.cli.data_lint import main
from fasttrain.data.lint import lint
from tests.fasttrain.data.lint.defects import PAD, SEPARATOR, TOKENIZER, documents, write


@pytest.fixture
def clean(tmp_path):
    return str(write(tmp_path / "clean", documents(60), documents(20, seed=1)).path)


@pytest.fixture
def doubled(tmp_path):
    return str(write(tmp_path / "doubled", [[SEPARATOR, *document] for document in documents(60)]).path)


def test_exit_codes(clean, doubled, tmp_path, capsys):
    padded = str(write(tmp_path / "padded", [[*document, PAD] for document in documents(60)]).path)
    assert cli.main(["data", "lint", clean]) == 0
    assert main([clean, "--strict"]) == 0
    assert main([doubled]) == 1
    assert main([doubled, "--quick"]) == 1
    assert main([padded]) == 0
    assert main([padded, "--strict"]) == 1
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        main([str(tmp_path / "nowhere")])
    assert exit.value.code == 2
    assert "does not exist" in capsys.readouterr().err
    for mistake in (["--colour"], ["--max-examples", "-1"], ["--plot", "picture.gif"]):
        with pytest.raises(SystemExit) as exit:
            main([clean, *mistake])
        assert exit.value.code == 2
    assert "picture.gif must end with .png or .svg" in capsys.readouterr().err


def test_the_table_says_what_is_wrong_where_and_what_to_do(doubled, capsys):
    main([doubled, "--max-examples", "1"])
    printed = capsys.readouterr().out.replace(doubled, "DIR")
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 120
    (row,) = [line for line in lines if line.startswith("error    doubled separators  train")]
    assert "60 of 120 separators follow another one" in row
    assert "doubled separators in train, for example:" in lines
    place = lines.index("  document 0, token 1")
    assert lines[place + 1].startswith("    '<|separator|><|separator|>")
    assert "in samples of" not in printed
    main([doubled, "--quick"])
    assert f"in samples of {doubled}" in capsys.readouterr().out


def test_one_split(clean, capsys):
    main([clean, "--split", "validation"])
    printed = capsys.readouterr().out
    assert "validation" in printed
    assert "train " not in printed


def test_json_holds_what_the_table_shows(doubled, tmp_path, capsys):
    assert main([doubled, "--json", str(tmp_path / "lint.json")]) == 1
    content = json.loads((tmp_path / "lint.json").read_text("utf-8"))
    printed = capsys.readouterr().out
    assert content["dataset"] == doubled
    assert all(finding["check"] in printed for finding in content["findings"])


def test_files_of_another_program(tmp_path, capsys):
    dataset = write(tmp_path / "d", [[SEPARATOR, *document] for document in documents(60)])
    (tmp_path / "raw").mkdir()
    shutil.copy(dataset.path / "train-00000.tokens", tmp_path / "raw" / "train.bin")
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    options = ["--separator", str(SEPARATOR), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main([str(tmp_path / "raw"), *options]) == 1
    printed = capsys.readouterr().out
    assert "60 of 120 separators follow another one" in printed
    assert "  token 1\n    '<|separator|><|separator|>" in printed
    with pytest.raises(SystemExit):
        main([str(tmp_path / "d"), *options])
    assert "is a prepared dataset and does; remove them" in capsys.readouterr().err
    assert main([str(tmp_path / "raw"), "--separator", "-1"]) == 0
    assert "the dataset names no separator" in capsys.readouterr().out


def test_the_plot(clean, doubled, tmp_path):
    pytest.importorskip("matplotlib")
    main([doubled, "--plot", str(tmp_path / "doubled.png")])
    assert (tmp_path / "doubled.png").read_bytes().startswith(b"\x89PNG")
    main([clean, "--quick", "--plot", str(tmp_path / "clean.svg")])
    assert "<svg" in (tmp_path / "clean.svg").read_text()


def test_a_plot_without_matplotlib_says_what_to_install(clean, tmp_path, monkeypatch, capsys):
    original = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "fasttrain.data.lint.plot", raising=False)
    with pytest.raises(SystemExit) as exit:
        main([clean, "--plot", str(tmp_path / "p.png")])
    assert exit.value.code == 2
    assert "a plot needs matplotlib: pip install 'fasttrain[plot]'" in capsys.readouterr().err


def test_progress_counts_every_token(tmp_path):
    dataset = write(tmp_path / "d", documents(60), documents(20, seed=1))
    read: list[int] = []
    lint(dataset, chunk=1000, on_progress=read.append)
    assert sum(read) == len(dataset.split("train")) + len(dataset.split("validation"))
    assert max(read) == 1000
