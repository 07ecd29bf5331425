"""The model of a checkpoint: its weights, in the dtype asked for, and what stands in the way."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.tools.generate import Sampling, generate
from fasttrain.tools.trained_model import load_model
from tests.runs import train, weights

CPU: dict[str, Any] = dict(device=torch.device("cpu"), dtype=torch.float32)


def test_weights_are_those_that_were_saved(small_run):
    loaded = load_model(str(small_run), **CPU)
    saved = {name.removeprefix("model."): w for name, w in weights(small_run).items() if name.startswith("model.")}
    assert saved.keys() == loaded.model.state_dict().keys()
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, saved[name]), name
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert (loaded.run, loaded.checkpoint.step) == (small_run, 6)
    assert loaded.settings.model.kv_heads == 2
    assert loaded.separator == loaded.data.first.separator
    assert not loaded.changed_data()
    assert load_model(f"{small_run}@3", **CPU).checkpoint.step == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(small_run, dtype):
    whole, half = (load_model(str(small_run), **CPU | dict(dtype=wanted)).model for wanted in (torch.float32, dtype))
    for name, weight in half.state_dict().items():
        assert torch.equal(weight, whole.state_dict()[name].to(dtype)), name
    assert half.cos.dtype == torch.float32
    assert torch.equal(half.cos, whole.cos)
    *_, (text,) = generate(half, [[0, 5]], tokens=2, sampling=Sampling())
    assert len(text.ids) == 2


def test_a_checkpoint_far_from_its_run(small_run, tmp_path):
    """Without batches.jsonl the settings of the checkpoint itself say where the data is."""
    copy = tmp_path / "step-00000006"
    shutil.copytree(small_run / "checkpoints" / copy.name, copy)
    loaded = load_model(str(copy), **CPU)
    assert loaded.run is None
    assert loaded.checkpoint.step == 6


def test_corruption_is_found_before_anything_is_said(small_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    file = next((run / "checkpoints/step-00000006").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"is corrupt: its sha256 .* name an earlier one, RUN@STEP"):
        load_model(str(run), **CPU)
    assert load_model(f"{run}@3", **CPU).checkpoint.step == 3


def test_data_that_has_moved(tmp_path, monkeypatch, make_text):
    """The run noted where its data was; a copy elsewhere has to be named."""
    data = make_text(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", "--data.path", "data", "--data.lint", "off", "--batch.steps", 3)
    monkeypatch.chdir("/")
    assert load_model(str(tmp_path / "run"), **CPU).data.first.path == data
    moved = data.rename(tmp_path / "moved")
    with pytest.raises((ValueError, OSError), match=str(data)):
        load_model(str(tmp_path / "run"), **CPU)
    loaded = load_model(str(tmp_path / "run"), **CPU, data=moved)
    assert not loaded.changed_data()
    other = make_text(tmp_path / "other", words=40)
    assert (
        load_model(str(tmp_path / "run"), **CPU, data=other).changed_data()
        == f"not what the run was trained on: {other}"
    )


def test_data_of_another_tokenizer(small_run, tmp_path, make_text):
    large = make_text(tmp_path / "large", vocab=70_000)
    with pytest.raises(ValueError, match=r"vocabulary of 70000 tokens, and the model 4096: .* name the data"):
        load_model(str(small_run), **CPU, data=large)


def test_data_without_a_tokenizer(tmp_path, make_text):
    """nanoGPT's files say nothing of theirs."""
    import numpy as np

    bins = tmp_path / "bins"
    bins.mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(2000, dtype=np.uint16) % 250).tofile(bins / name)
    train(
        tmp_path / "run",
        "--data.path",
        bins,
        "--data.vocab",
        300,
        "--data.separator",
        -1,
        "--data.lint",
        "off",
        "--batch.steps",
        3,
    )
    with pytest.raises(ValueError, match="comes without a tokenizer.*--tokenizer FILE"):
        load_model(str(tmp_path / "run"), **CPU).tokenizer()
    file = make_text(tmp_path / "data") / "tokenizer.json"
    assert load_model(str(tmp_path / "run"), **CPU, tokenizer=file).tokenizer().get_vocab_size() > 1


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "does not exist"), ("{run}@5", "none of step '5'; it has 3, 6"), ("{run}@x", "'x'")]
)
def test_no_such_checkpoint(small_run: Path, name: str, words: str):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_model(name.format(run=small_run), **CPU)
