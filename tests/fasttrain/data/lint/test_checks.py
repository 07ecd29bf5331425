"""Before the first step: a run does not begin on data that is not fit to train on."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fasttrain.config import DataConfig
from fasttrain.data.lint.checks import suspicions
from fasttrain.train import main
from tests.fasttrain.data.lint.defects import PAD, SEPARATOR, documents, write

TINY = [
    "--model.layers", "1", "--model.hidden", "16", "--model.heads", "2", "--model.kv_heads", "2",
    "--model.head_dim", "8", "--model.ffn", "16", "--data.sequence", "16", "--batch.sequences", "4",
    "--batch.micro", "4", "--batch.steps", "1", "--optim.warmup", "0", "--log.tensorboard", "False",
    "--validation.sample", "",
]  # fmt: skip


def doubled(path: Path) -> Path:
    return write(path, [[SEPARATOR, *document] for document in documents(60)], documents(20, seed=1)).path


def padded(path: Path) -> Path:
    return write(path, [[*document, PAD] for document in documents(60)], documents(20, seed=1)).path


def ended(out: Path, arguments: Sequence[str]) -> int:
    try:
        return main([*TINY, "--out", str(out), *arguments])
    except SystemExit as exit:
        return int(str(exit.code))


def events(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def test_a_run_refuses_doubled_separators_before_its_first_step(tmp_path, capsys):
    path = doubled(tmp_path / "d")
    assert ended(tmp_path / "run", ["--data.path", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"fasttrain.train: error: data: samples of {path} are not fit to train on:" in error
    assert "doubled separators: 60 of 120 separators follow another one" in error
    assert "(first seen in train: document 0, token 1)" in error
    assert f"`fasttrain data lint {path}` looks at all of it; --data.lint warn trains on it as it is" in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("how", ["warn", "off"])
def test_unless_it_is_told_to_continue(tmp_path, how):
    path = doubled(tmp_path / "d")
    assert ended(tmp_path / "run", ["--data.path", str(path), "--data.lint", how]) == 0
    told = [event["text"] for event in events(tmp_path / "run") if event["kind"] == "data"]
    assert any("doubled separators: 60 of 120" in text for text in told) == (how == "warn")


def test_warnings_are_events_of_the_run(tmp_path):
    path = padded(tmp_path / "d")
    assert ended(tmp_path / "run", ["--data.path", str(path)]) == 0
    (event,) = [event for event in events(tmp_path / "run") if event["kind"] == "data"]
    assert event["step"] == 0
    assert event["text"].startswith(f"{path}: special tokens: 60 special tokens stand inside documents")


def test_every_dataset_of_a_run_is_asked(tmp_path):
    good, bad = (write(tmp_path / name, content) for name, content in _two())
    with pytest.raises(ValueError, match=f"samples of {bad.path} are not fit"):
        suspicions([good, bad], DataConfig())
    assert suspicions([good], DataConfig()) == []
    assert suspicions([good, bad], DataConfig(lint="off")) == []


def _two() -> list[tuple[str, list[list[int]]]]:
    content = documents(60)
    return [("good", content), ("bad", [[SEPARATOR, *document] for document in content])]


def test_a_file_that_has_changed_since_it_was_prepared_is_named_before_the_first_step(make_dataset):
    dataset = make_dataset([50, 60])
    shard = next(dataset.path.glob("train-*.tokens"))
    content = bytearray(shard.read_bytes())
    content[20] ^= 1  # the size stays
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{shard.name} is corrupt: .* prepare the dataset again"):
        suspicions([dataset], DataConfig())
    suspicions([dataset], DataConfig(lint="off"))
