"""fasttrain eval: the numbers of the run's own validation, and of plain PyTorch; where they go, and mistakes."""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fasttrain import cli
from fasttrain.data.dataset import Dataset
from fasttrain.metrics.jsonl import read_evaluations, read_validations
from fasttrain.tools.trained_model import load_model
from tests.fasttrain.tools.generate.models import in_transformers
from tests.ranks import run_ranks
from tests.runs import train

T = 32  # data.sequence of small runs


def run_command(*arguments: object) -> int:
    try:
        return cli.main(["eval", *map(str, arguments)])
    except SystemExit as exit:
        return int(exit.code or 0)


@pytest.fixture
def scores(capsys):
    """scores(*arguments): the lines of --json by set."""

    def ask(*arguments: object, code: int = 0) -> dict[str, dict]:
        capsys.readouterr()  # what training has printed
        assert run_command(*arguments, "--json") == code
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return {line["set"]: line for line in lines}

    return ask


@pytest.fixture
def run(small_run: Path, tmp_path: Path) -> Path:
    """A copy that may change."""
    return shutil.copytree(small_run, tmp_path / "run")


@pytest.fixture
def worded(tmp_path: Path, make_text) -> tuple[Path, Path]:
    """A run, and the dataset that it was trained on."""
    data = make_text(tmp_path / "data")
    train(tmp_path / "run", "--data.path", data, "--data.lint", "off", "--batch.steps", 3)
    return tmp_path / "run", data


def test_the_runs_own_validation(run, scores):
    """The same samples, at two steps: 7 sequences, in micro-batches of 2."""
    for step in (3, 6):
        found = scores(f"{run}@{step}", "--sequences", 7)["held-out"]
        (own,) = [line for line in read_validations(run) if line["step"] == step]
        for figure in ("loss", "perplexity", "bits_per_byte", "accuracy"):
            assert found[figure] == own[figure], figure
        assert found["tokens"] == 7 * T


def by_hand(theirs: torch.nn.Module, data: Path, split: str) -> tuple[float, list[float]]:
    """Transformers and F.cross_entropy: the mean loss of all targets, and that of each pair of sequences."""
    dataset = Dataset(data)
    stream = dataset.split(split)
    count = (len(stream) - 1) // T
    losses = []
    for window in stream.windows(np.arange(count) * T, T + 1).astype(np.int64):
        starts = [0, *(np.flatnonzero(window[1:T] == dataset.separator) + 1).tolist(), T]
        for begin, end in pairwise(starts):
            piece = torch.from_numpy(window[begin:end])[None]
            with torch.no_grad():
                logits = theirs(piece).logits[0]
            losses.append(F.cross_entropy(logits, torch.from_numpy(window[begin + 1 : end + 1]), reduction="none"))
    tokens = torch.cat(losses).double()
    assert len(tokens) == count * T
    return float(tokens.mean()), [float(pair.mean()) for pair in tokens.split(2 * T)]


def test_plain_pytorch_on_a_whole_set(worded, tmp_path, make_text, scores):
    """Batches of 4 and a last one with fewer: a mean over tokens, whose exp is the perplexity."""
    run, data = worded
    more = make_text(tmp_path / "more", documents=37, seed=7)
    found = scores(run, "--set", f"more={more}", "--batch", 4)
    model = load_model(str(run), device=torch.device("cpu"), dtype=torch.float32).model
    theirs = in_transformers(model)
    for name, path in (("held-out", data), ("more", more)):
        loss, parts = by_hand(theirs, path, "validation")
        line = found[name]
        assert line["tokens"] % (4 * T), "the last batch should have fewer sequences"
        assert line["loss"] == pytest.approx(loss, rel=1e-6)
        assert line["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert line["perplexity"] != pytest.approx(sum(map(math.exp, parts)) / len(parts), rel=1e-5)
        assert line["bits_per_byte"] == pytest.approx(loss / math.log(2) / Dataset(path).bytes_per_token("validation"))
        assert not line["suspicion"]
    assert found["more"]["loss"] != found["held-out"]["loss"]


def test_the_number_of_sequences_at_a_time_changes_nothing(run, scores):
    one, five = (scores(run, "--sequences", 9, "--batch", size)["held-out"] for size in (1, 5))
    assert one["loss"] == pytest.approx(five["loss"], rel=1e-6)
    assert one["tokens"] == five["tokens"] == 9 * T


def test_two_ranks_score_as_one(run):
    run_ranks(_eval, 2, ["eval", str(run), "--sequences", "7"])
    (line,) = read_evaluations(run)  # of the first rank
    assert line["loss"] == pytest.approx(read_validations(run)[-1]["loss"], rel=1e-6)


def _eval(arguments: list[str]) -> None:
    assert cli.main(arguments) == 0


def test_components_of_a_mixture_and_sets_of_the_run(tmp_path, make_text, scores):
    a, b, c = (make_text(tmp_path / name, seed=seed) for seed, name in enumerate("abc"))
    options = ["--data.mixture.a.path", a, "--data.mixture.b.path", b, "--data.mixture.b.weight", 3]
    train(tmp_path / "run", *options, "--data.lint", "off", "--validation.sets", "c", c, "--batch.steps", 3)
    found = scores(tmp_path / "run", "--sequences", 7)
    own = {line["set"]: line["loss"] for line in read_validations(tmp_path / "run") if line["step"] == 3}
    assert {name: line["loss"] for name, line in found.items()} == own
    assert own.keys() == {"a", "b", "c", "held-out"}
    assert found["held-out"]["loss"] == pytest.approx((found["a"]["loss"] + 3 * found["b"]["loss"]) / 4)
    shutil.rmtree(c)
    assert run_command(tmp_path / "run") == 2
    assert "c2" in scores(tmp_path / "run", "--set", f"c={b}", "--set", f"c2={b}")  # a set that moved is named anew


def test_results_stay_with_the_run(run, scores, capsys):
    found = [scores(run, "--sequences", 3)["held-out"], scores(f"{run}@3", "--sequences", 3)["held-out"]]
    lines = read_evaluations(run)
    assert lines == found
    assert [line["step"] for line in lines] == [6, 3]
    assert lines[0].keys() == {
        *("step", "time", "set", "loss", "perplexity", "bits_per_byte", "accuracy", "tokens", "suspicion")
    }
    assert f'"loss":{lines[0]["loss"]}' in (run / "report.html").read_text()
    assert run_command(run, "--sequences", 3) == 0
    shown = capsys.readouterr().out
    assert f"step 6 of {run}" in shown
    assert shown.splitlines()[1].split() == ["set", "loss", "perplexity", "bits", "per", "byte", "accuracy", "tokens"]
    assert f"{found[0]['loss']:.4f}" in shown


def test_worse_than_guessing_is_a_defect(tmp_path, make_text, scores, capsys):
    """Effort A: 71 nats a token, taken for over-fitting."""
    data = make_text(tmp_path / "data")
    diverge = ["--optim.lr", 300.0, "--optim.warmup", 0, "--optim.schedule", "constant", "--optim.clip", 0]
    train(tmp_path / "run", "--data.path", data, "--data.lint", "off", "--batch.steps", 1, *diverge)
    line = scores(tmp_path / "run", code=1)["held-out"]
    assert line["loss"] > math.log(61)
    assert "worse than guessing among 61 tokens (4.11)" in line["suspicion"]
    assert run_command(tmp_path / "run") == 1
    assert "suspect the data" in capsys.readouterr().out


def test_a_checkpoint_elsewhere_is_scored_and_left_alone(run, tmp_path, scores):
    path = tmp_path / "step-00000006"
    (run / "checkpoints" / path.name).rename(path)
    before = sorted(path.iterdir())
    assert scores(path, "--sequences", 2)["held-out"]["step"] == 6
    assert sorted(path.iterdir()) == before
    assert not read_evaluations(run)


def test_data_that_is_not_what_it_was(worded, make_text, tmp_path, capsys):
    run, data = worded
    shutil.rmtree(data)
    assert run_command(run) == 2
    assert str(data) in capsys.readouterr().err
    other = make_text(tmp_path / "other", seed=9)
    assert run_command(run, "--data", other) == 0
    assert f"note: not what the run was trained on: {other}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "wiki"), "'wiki' must be NAME=PATH"),
        (("--set", "wiki=/nowhere"), "/nowhere"),
        (("--set", "held-out=/nowhere"), "is the name of the training data's own held-out documents"),
        (("--set", "other={other}"), r"was prepared with another tokenizer than the training data"),
        (("--sequences", "0"), "'0' must be a whole number from 1 to 1_000_000_000"),
        (("--perplexity",), "--perplexity"),
        (("--fewshot", "2"), "--fewshot is for tasks, and there are none; add --tasks"),
    ],
)
def test_mistakes(run, tmp_path, make_text, arguments, words, capsys):
    other = make_text(tmp_path / "other")
    assert run_command(run, *(argument.format(other=other) for argument in arguments)) == 2
    assert words in capsys.readouterr().err
    assert not read_evaluations(run)


def test_nothing_to_score(tmp_path, capsys):
    bins = tmp_path / "bins"
    bins.mkdir()
    (np.arange(2000, dtype=np.uint16) % 250).tofile(bins / "train.bin")
    options = ["--data.vocab", 300, "--data.separator", -1, "--data.lint", "off", "--batch.steps", 3]
    train(tmp_path / "run", "--data.path", bins, *options)
    assert run_command(tmp_path / "run") == 2
    assert (
        "holds no documents out, and the run has no validation.sets; name a set: --set NAME=PATH"
        in capsys.readouterr().err
    )
