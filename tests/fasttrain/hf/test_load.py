"""Runs that start from a Hugging Face checkpoint: ours, or one that Transformers wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import fasttrain.hf.load
import fasttrain.train.setup
from fasttrain.checkpoint.committed import find
from fasttrain.cli.parse import load
from fasttrain.cli.plan import main as plan_command
from fasttrain.config import Config
from fasttrain.distributed.runtime import start
from fasttrain.events import Anomaly, Event, EventKind
from fasttrain.hf.config import TAKEN
from fasttrain.hf.export import describe, export
from fasttrain.metrics.jsonl import read_metrics
from fasttrain.metrics.record import StepRecord
from fasttrain.model import Decoder
from fasttrain.monitor import Monitor
from fasttrain.recipes import RECIPES
from fasttrain.tools.verify_resume import plan_trial
from fasttrain.train import main
from fasttrain.train.setup import StartReport, prepare
from fasttrain.train.state import TrainState
from tests.fasttrain.hf.names import to_huggingface
from tests.fasttrain.hf.small import ROWS, RUN, SIZES, VARIANTS, dataset, last, train
from tests.ranks import run_ranks
from tests.runs import events

THEIRS = dict(
    vocab_size=ROWS, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1,
)  # fmt: skip
WRITTEN = {  # by Transformers itself
    "qwen3": Qwen3Config(**THEIRS, head_dim=8, tie_word_embeddings=True),
    "qwen3 untied": Qwen3Config(**THEIRS, head_dim=8, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "llama": LlamaConfig(**THEIRS, rms_norm_eps=1e-5),
    "llama tied": LlamaConfig(**THEIRS, tie_word_embeddings=True),
}


class Place:
    """Data, and checkpoints that are made when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = dataset(directory / "data")

    def ours(self, name: str = "qwen3") -> Path:
        run, out = self.directory / "runs" / name, self.directory / "ours" / name
        if not out.exists():
            train(run, self.data, *SIZES, *VARIANTS[name])
            export(describe(find(run)), out, shard=20_000)
        return out

    def theirs(self, name: str, **options: Any) -> Path:
        out = self.directory / "theirs" / f"{name} {options}"
        if not out.exists():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(WRITTEN[name])
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms are not all the same
                    parameter.data.uniform_(0.5, 1.5)
            model.to(options.pop("dtype", torch.float32)).save_pretrained(out, **options)
        return out

    def settings(self, checkpoint: Path, *options: Any) -> Config:
        argv = [*RUN, "--data.path", self.data, "--out", self.directory / "nothing", "--from-hf", checkpoint, *options]
        return load([*map(str, argv)], RECIPES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture
def copied(place: Place, tmp_path: Path) -> Path:
    """A checkpoint to corrupt."""
    return shutil.copytree(place.theirs("qwen3 untied"), tmp_path / "copied")


@contextmanager
def started(settings: Config) -> Iterator[tuple[TrainState, StartReport]]:
    with start(settings.parallel) as runtime:
        yield prepare(settings, runtime)


@contextmanager
def prepared(settings: Config) -> Iterator[TrainState]:
    with started(settings) as (state, _):
        yield state


def whole(model: Decoder) -> dict[str, Tensor]:
    """All weights, gathered, under Transformers' names."""
    state = {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
    }
    return to_huggingface(state, model.config)


def assert_has_the_weights_of(model: Decoder, checkpoint: Path) -> None:
    """Bitwise."""
    files = [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    expected = {name: tensor for file in files for name, tensor in file.items()}
    found = whole(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.float()), name


def test_our_own_export_comes_back_bitwise(place: Place) -> None:
    for name in VARIANTS:
        with prepared(place.settings(place.ours(name))) as run:
            assert_has_the_weights_of(run.model, place.ours(name))
            own = last(place.directory / "runs" / name)
            ours, theirs = (asdict(model.config) | dict(vocab=ROWS) for model in (own, run.model))
            assert [ours[name] for name in TAKEN] == [theirs[name] for name in TAKEN]
            for (key, weight), other in zip(own.state_dict().items(), run.model.state_dict().values(), strict=True):
                assert torch.equal(weight, other), key


def start_on_ranks(settings: list[Config], checkpoints: list[Path]) -> None:
    read, rows = fasttrain.hf.load._Tensors.read, []

    def noted(tensors: Any, name: str, wanted: range) -> Any:
        rows.append(len(wanted))
        return read(tensors, name, wanted)

    for one, checkpoint in zip(settings, checkpoints, strict=True):
        rows.clear()
        with patch.object(fasttrain.hf.load._Tensors, "read", noted), prepared(one) as run:
            assert sum(rows) == sum(len(parameter) for parameter in run.model.parameters()) // 2
            assert all(isinstance(parameter, DTensor) for parameter in run.model.parameters())
            assert_has_the_weights_of(run.model, checkpoint)


def test_every_rank_reads_its_own_rows(place: Place) -> None:
    """Shards end between q and k, and with one head for keys within q."""
    checkpoints = [place.ours("qwen3"), place.theirs("qwen3 untied"), place.ours("llama untied, one kv head")]
    run_ranks(start_on_ranks, 2, [place.settings(path) for path in checkpoints], checkpoints)


@pytest.mark.parametrize("name", WRITTEN)
def test_checkpoints_of_transformers(place: Place, name: str) -> None:
    path = place.theirs(name, max_shard_size=10_000)
    assert (path / "model.safetensors.index.json").exists()
    theirs = AutoModelForCausalLM.from_pretrained(path)
    tokens = torch.randint(257, (2, 32))
    with prepared(place.settings(path)) as run, torch.no_grad():
        assert_has_the_weights_of(run.model, path)
        logits = run.model.logits(tokens)
    with torch.no_grad():
        torch.testing.assert_close(logits, theirs(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)


def test_bf16_weights_become_fp32(place: Place) -> None:
    path = place.theirs("llama", dtype=torch.bfloat16)
    with prepared(place.settings(path)) as run:
        assert_has_the_weights_of(run.model, path)


def test_a_large_tensor_is_read_in_chunks(place: Place) -> None:
    path = place.theirs("qwen3 untied")
    with patch.object(fasttrain.hf.load, "_READ_BYTES", 4 * 24 * 7), prepared(place.settings(path)) as run:
        assert_has_the_weights_of(run.model, path)


def test_a_tied_head_that_is_stored_too(copied: Path, place: Place) -> None:
    """Qwen's own small checkpoints have one. It has to be the embedding."""
    path = shutil.copytree(place.theirs("qwen3"), copied.parent / "tied")
    weights = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in weights
    embedding = weights["model.embed_tokens.weight"]
    extra = {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(weights | extra, path / "model.safetensors")
    with prepared(place.settings(path)) as run:
        assert torch.equal(whole(run.model)["model.embed_tokens.weight"], embedding)
    extra["lm_head.weight"][-1, -1] += 1
    save_file(weights | extra, path / "model.safetensors")
    with (
        pytest.raises(ValueError, match="says tie_word_embeddings, but lm_head.weight in .* is not model.embed_tokens"),
        prepared(place.settings(path)),
    ):
        pass


def test_a_run_that_starts_from_a_checkpoint(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says where its weights are from, does not take them for untrained ones, and needs them once only."""
    path = shutil.copytree(place.ours(), tmp_path / "hf")
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    argv = [*RUN, "--data.path", str(place.data), "--out", str(tmp_path / "run"), "--from_hf", str(path)]
    assert main([*argv, "--checkpoint.every", "1"]) == 0
    (began,) = events(tmp_path / "run", "start")
    assert began["text"] == f"a new run in {tmp_path / 'run'}, with the weights of {path}"
    assert began["evidence"]["from_hf"] == str(path)
    before, after = (read_metrics(run) for run in (place.directory / "runs" / "qwen3", tmp_path / "run"))
    assert after[0]["loss"] < before[0]["loss"]
    assert not events(tmp_path / "run", "first loss")
    assert not events(tmp_path / "run", "data")
    shutil.rmtree(path)
    with patch.object(fasttrain.train.setup, "load_pretrained", side_effect=AssertionError("read again")):
        assert main([*argv, "--batch.steps", "3"]) == 0
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    other = place.ours("qwen3")
    argv[-1] = str(other)
    with pytest.raises(SystemExit):
        main(argv)
    assert f"cannot be resumed with other settings: from_hf: {path} -> {other}" in capsys.readouterr().err


def test_a_run_that_rolls_back_to_its_start_has_the_weights_again(place: Place, tmp_path: Path) -> None:
    observe, anomaly = Monitor.observe, Anomaly(kind="spike", value=9.0, expected=1.0, steps=1, step=2)
    seen: list[int] = []

    def observed(monitor: Monitor, record: StepRecord) -> list[Event]:
        events = observe(monitor, record)
        if record.step == 2 and record.step not in seen:
            events.append(Event(step=2, kind=EventKind.SPIKE, text="spike", anomaly=anomaly))
        seen.append(record.step)
        return events

    argv = [*RUN, "--data.path", place.data, "--out", tmp_path, "--from-hf", place.ours(), "--batch.steps", 4]
    with (
        patch.object(Monitor, "observe", observed),
        patch.object(fasttrain.train.setup, "load_pretrained", wraps=fasttrain.train.setup.load_pretrained) as read,  # type: ignore[attr-defined]
    ):
        assert main([*map(str, argv), "--checkpoint.every", "0"]) == 0
    assert "rolled back to the initial weights" in events(tmp_path, "rollback")[0]["text"]
    assert read.call_count == 2


def test_weights_that_know_nothing_about_the_data_are_an_event(place: Place, copied: Path, tmp_path: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights["lm_head.weight"] *= 50
    save_file(weights, copied / "model.safetensors")
    train(tmp_path / "run", place.data, "--from-hf", copied)
    assert f"the weights of {copied} know nothing about this data" in events(tmp_path / "run", "first loss")[0]["text"]
    (doubt,) = events(tmp_path / "run", "data")
    assert f"{copied} has no tokenizer.json: nobody knows whether" in doubt["text"]


def test_settings_that_contradict_the_checkpoint(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place.theirs("llama")
    settings = place.settings(path, "--model.layers", 3, "--model.dropout", 0.1, "--recipe", "124m")
    assert (settings.model.layers, settings.model.qk_norm, settings.model.vocab) == (3, False, ROWS)
    assert settings.model.dropout == 0.1
    for key, stated, found in (
        ("layers", 4, 3),
        ("qk_norm", True, False),
        ("vocab", 512, ROWS),
        ("norm_eps", 0.1, 1e-5),
    ):
        file = tmp_path / "run.toml"
        file.write_text(f"from_hf = {json.dumps(str(path))}\n[model]\n{key} = {str(stated).lower()}\n")
        for argv in (["--from_hf", str(path), f"--model.{key}", str(stated)], ["--config", str(file)]):
            with pytest.raises(SystemExit):
                load(argv, RECIPES)
            assert f"model.{key} is set to {stated}, and {path} has {found}; remove it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load(["--from-hf", str(path), "--resume", "runs/other"], RECIPES)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "both say where the weights come from" in said


def test_plans_and_verify_resume_take_the_setting(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    path = place.theirs("llama")
    assert plan_command(["--from-hf", str(path), "--gpu", "h100-sxm", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert planned["parameters"] == sum(parameter.numel() for parameter in theirs.parameters())
    settings = place.settings(path)
    trial = plan_trial(settings, steps=4, kill_at=2)
    assert trial.settings.from_hf == path
    for again in (trial.calm(Path("a-checkpoint")), trial.moved(Path("a-checkpoint"))):
        assert (again.from_hf, again.model) == (None, settings.model)


def test_data_of_another_tokenizer(
    place: Place, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.from_file(str(place.data / "tokenizer.json"))
    content = json.loads(tokenizer.to_str())
    same = content | dict(
        post_processor=None, truncation=dict(direction="Right", max_length=5, strategy="LongestFirst", stride=0)
    )
    (copied / "tokenizer.json").write_text(json.dumps(same, indent=2))  # what does not change tokens may differ
    with started(place.settings(copied)) as (_, report):
        assert report.tokenizer_warning == ""
    (copied / "tokenizer.json").write_text(json.dumps(content | dict(normalizer=dict(type="Lowercase"))))
    with started(place.settings(copied)) as (_, report):
        assert "split text in different ways (normalizer)" in report.tokenizer_warning
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["A"] = vocabulary["A"], vocabulary["!"]
    (copied / "tokenizer.json").write_text(json.dumps(content))
    argv = [*RUN, "--data.path", str(place.data), "--out", str(tmp_path / "run"), "--from-hf", str(copied)]
    with pytest.raises(SystemExit):
        main(argv)
    printed = capsys.readouterr().err
    assert f"token 33 is 'A' for the weights in {copied} and '!' in the data ({place.data}), and 2 tokens" in printed
    assert f"prepare the data with --tokenizer {copied}" in printed
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | dict(vocab_size=200)))
    with pytest.raises(SystemExit):
        main(argv)
    assert (
        f"model.vocab (200) is smaller than the vocabulary of the data, 257 ({place.data}); it is that of {copied}"
        in (capsys.readouterr().err)
    )


def broken(copied: Path, how: str) -> str:
    """Break a checkpoint; what is said about it."""
    file = copied / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
        return f"{file} is corrupt, or copied in part"
    if how == "pickles":
        file.rename(copied / "pytorch_model.bin")
        return r"its weights as pickles \(.bin\), .* write them as safetensors first: AutoModelForCausalLM"
    if how == "no weights":
        file.unlink()
        return "has neither model.safetensors nor model.safetensors.index.json"
    if how == "no shard":
        (copied / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {name: "model-00001.safetensors"}})
        )
        return "model-00001.safetensors is missing, which model.safetensors.index.json names"
    if how == "a broken index":
        (copied / "model.safetensors.index.json").write_text("{}")
        return "model.safetensors.index.json is corrupt"
    if how == "missing":
        del weights[name]
    elif how == "unexpected":
        weights["model.layers.1.mlp.up_proj.bias"] = torch.zeros(40)
    elif how == "shape":
        weights[name] = weights[name][1:].clone()
    elif how == "dtype":
        weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, file)
    return {
        "missing": f"lacks {name}: not the tensors",
        "unexpected": "also has model.layers.1.mlp.up_proj.bias: not the tensors",
        "shape": rf"{name} in {file} is \[39, 24\], and its config.json says \[40, 24\]",
        "dtype": f"{name} in {file} is F8_E4M3; only F32, BF16, F16 are read",
    }[how]


@pytest.mark.parametrize(
    "how",
    ["missing", "unexpected", "shape", "dtype", "truncated", "pickles", "no weights", "no shard", "a broken index"],
)
def test_a_broken_checkpoint_is_refused_before_a_weight_is_read(copied: Path, place: Place, how: str) -> None:
    message = broken(copied, how)
    with (
        patch.object(fasttrain.hf.load._Tensors, "read", side_effect=AssertionError("read")),
        pytest.raises((ValueError, FileNotFoundError), match=message),
        prepared(place.settings(copied)),
    ):
        pass
