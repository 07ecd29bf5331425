"""Exports, as Transformers reads them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer

import fasttrain.checkpoint.state
import fasttrain.hf.export
from fasttrain.checkpoint.committed import find
from fasttrain.cli import main
from fasttrain.cli.export import main as command
from fasttrain.data.dataset import Dataset
from fasttrain.hf.export import describe, export
from tests.fasttrain.hf.names import to_huggingface
from tests.fasttrain.hf.small import ROWS, SEPARATOR, SEQUENCE, SIZES, VARIANTS, dataset, last, train

TEXT = "def f(x):\n\treturn 'é' + x  # 12 \n\n\nclass A: pass 日本 <|endoftext|> "


class Runs:
    """Of each variant, a run and its exports, made when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = dataset(directory / "data")

    def run(self, name: str = "qwen3") -> Path:
        path = self.directory / "runs" / name
        return path if path.exists() else train(path, self.data, *SIZES, *VARIANTS[name])

    def export(self, name: str = "qwen3", *options: str) -> Path:
        out = self.directory / "exports" / " ".join([name, *options])
        if not out.exists():
            assert command([str(self.run(name)), "--out", str(out), *options]) == 0
        return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("export"))


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All that the safetensors files of a directory hold."""
    found: dict[str, Any] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def fails(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as exit:
        command([*map(str, arguments)])
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_computes_the_same_logits(runs: Runs, name: str) -> None:
    theirs, info = AutoModelForCausalLM.from_pretrained(runs.export(name), output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if name.startswith("qwen3") else "LlamaForCausalLM")
    assert theirs.dtype == torch.float32
    tokens = torch.randint(257, (2, SEQUENCE))
    with torch.no_grad():
        expected = last(runs.run(name)).logits(tokens)
        logits = theirs(input_ids=tokens).logits
    assert logits.shape == (2, SEQUENCE, ROWS)
    assert expected.std() > 0.3  # it says something
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama untied, one kv head"])
def test_bf16_is_the_nearest_to_every_weight(runs: Runs, name: str) -> None:
    out, ours = runs.export(name, "--dtype", "bf16"), last(runs.run(name))
    expected = to_huggingface(ours.state_dict(), ours.config)
    written = tensors(out)
    assert written.keys() == expected.keys()
    for key, weight in expected.items():
        assert written[key].dtype == torch.bfloat16
        gap = (written[key].double() - weight.double()).abs()
        for neighbour in (-1, 1):  # in bits, the next numbers that there are
            other = (written[key].view(torch.int16) + neighbour).view(torch.bfloat16)
            assert (gap <= (other.double() - weight.double()).abs()).all()
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.bfloat16
    tokens = torch.randint(257, (1, 8))
    with torch.no_grad():
        near, exact = theirs(input_ids=tokens).logits.float(), ours.logits(tokens)
    assert (near - exact).abs().max() < 0.05 * exact.abs().max()


def test_files_are_as_large_as_asked_and_the_index_is_that_of_transformers(runs: Runs, tmp_path: Path) -> None:
    size = 20_000
    out, ours = runs.export("qwen3 untied", "--shard-size", f"{size}"), last(runs.run("qwen3 untied"))
    files = sorted(path.name for path in out.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for path in out.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            held = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
        assert sum(held.values()) <= size or len(held) == 1
    expected = to_huggingface(ours.state_dict(), ours.config)
    written = tensors(out)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    index, other = (
        json.loads((path / "model.safetensors.index.json").read_text()) for path in (out, tmp_path / "theirs")
    )
    assert index["metadata"] == other["metadata"]
    assert index["weight_map"].keys() == other["weight_map"].keys()
    for name, file in index["weight_map"].items():
        with safe_open(out / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


def test_the_configuration_says_what_transformers_would(runs: Runs, tmp_path: Path) -> None:
    """Also where our file leaves something to its defaults."""
    for name in VARIANTS:
        ours = json.loads((runs.export(name) / "config.json").read_text())
        theirs = AutoModelForCausalLM.from_pretrained(runs.export(name)).config.to_dict()
        differing = {key for key in ours if key != "rope_theta" and ours[key] != theirs[key]}
        assert not differing, {key: (ours[key], theirs[key]) for key in differing}
        assert ours["rope_theta"] == theirs["rope_parameters"]["rope_theta"]
        assert ours["vocab_size"] == ROWS
        assert ours["max_position_embeddings"] == SEQUENCE
        assert ours["bos_token_id"] == ours["eos_token_id"] == SEPARATOR


def test_the_tokenizer_is_that_of_the_data(runs: Runs) -> None:
    data, theirs = Dataset(runs.data), AutoTokenizer.from_pretrained(runs.export())
    assert theirs(TEXT).input_ids == [SEPARATOR, *data.tokenizer().encode(TEXT).ids]
    assert theirs.decode(theirs(TEXT).input_ids[1:]) == TEXT
    assert theirs.bos_token_id == theirs.eos_token_id == SEPARATOR
    ours, exported = (json.loads(path.read_text()) for path in (data.tokenizer_path, runs.export() / "tokenizer.json"))
    assert {key for key in ours if ours[key] != exported[key]} == {"post_processor"}


def test_transformers_writes_what_generate_writes_without_a_hand_made_prompt(runs: Runs, capsys) -> None:
    directory, prompt = runs.export(), "def forward(self"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    made = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)[0]
    theirs = tokenizer.decode(made, skip_special_tokens=True)
    capsys.readouterr()
    assert main(["generate", str(runs.run()), "--prompt", prompt, "--tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == theirs.rstrip("\n")


def test_text_begins_and_ends_with_the_separator(runs: Runs) -> None:
    model = AutoModelForCausalLM.from_pretrained(runs.export())
    text = model.generate(max_new_tokens=4, do_sample=False)  # without a prompt
    assert text[0, 0] == SEPARATOR
    with torch.no_grad():
        model.lm_head.weight[SEPARATOR] = 100 * model.lm_head.weight[text[0, 1]]
    assert model.generate(max_new_tokens=4, do_sample=False).tolist()[0][-1] == SEPARATOR


def test_the_model_card_has_the_facts_of_the_run(runs: Runs) -> None:
    import yaml

    text = (runs.export() / "README.md").read_text()
    _, header, body = text.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["fasttrain", "qwen3"],
    }  # fmt: skip
    checkpoint = find(runs.run())
    total = sum(parameter.numel() for parameter in last(runs.run()).parameters())
    for fact in (
        f"{total:,} parameters", "| step | 2 of 2 |", "| tokens | 256 |", f"sha256 {checkpoint.metadata['dataset']}",
        f"loss {checkpoint.loss:.4f}, perplexity", f"torch {torch.__version__}", "layers = 2", "warmup = 1",
        "the tokenizer begins a text with it",
    ):  # fmt: skip
        assert fact in body, fact
    assert str(runs.directory) not in text


def test_a_step_is_chosen_and_only_its_weights_are_loaded(runs: Runs, tmp_path: Path) -> None:
    """Of a run of two ranks, which share every tensor; averages stay on the disk."""
    asked: list[str] = []
    load = fasttrain.checkpoint.state.dcp.load  # type: ignore[attr-defined]

    def noted(state: dict[str, Any], **options: Any) -> None:
        asked.extend(state)
        load(state, **options)

    run = train(tmp_path / "run", runs.data, *SIZES, "--checkpoint.every", 1, world=2)
    first, second = (find(f"{run}@{step}") for step in (1, 2))
    with patch.object(fasttrain.checkpoint.state.dcp, "load", noted):  # type: ignore[attr-defined]
        export(describe(first), tmp_path / "first")
    assert asked
    assert all(name.startswith("model.") for name in asked)
    export(describe(second), tmp_path / "second")
    name = "model.embed_tokens.weight"
    one, two = tensors(tmp_path / "first")[name], tensors(tmp_path / "second")[name]
    assert not torch.equal(one, two)
    assert torch.equal(two, last(run).state_dict()["embedding.weight"])


def test_data_of_other_programs(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a tokenizer there are no tokenizer files, and it is said; one that is named is used."""
    source, other = Dataset(runs.data), tmp_path / "other"
    other.mkdir()
    for split, name in (("train", "train.bin"), ("validation", "val.bin")):
        stream = source.split(split)
        (other / name).write_bytes(stream.windows(np.array([0]), len(stream)).tobytes())
    said = ["--data.separator", SEPARATOR, "--data.vocab", 257]
    run = train(tmp_path / "run", other, *SIZES, *said)
    capsys.readouterr()
    assert command([str(run), "--out", str(tmp_path / "bare")]) == 0
    assert "without a tokenizer" in capsys.readouterr().out
    assert not list((tmp_path / "bare").glob("tokenizer*"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bare").generation_config.eos_token_id == SEPARATOR
    assert command([str(run), "--out", str(tmp_path / "added"), "--tokenizer", str(source.tokenizer_path)]) == 0
    expected = [SEPARATOR, *source.tokenizer().encode(TEXT).ids]
    assert AutoTokenizer.from_pretrained(tmp_path / "added")(TEXT).input_ids == expected
    named = train(tmp_path / "named", other, *SIZES, *said, "--data.tokenizer", source.tokenizer_path)
    assert command([str(named), "--out", str(tmp_path / "known")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "known").eos_token_id == SEPARATOR
    unseparated = train(
        tmp_path / "one text", other, *SIZES, "--data.separator", -1, "--data.vocab", 257, "--model.qk_norm", False
    )
    assert command([str(unseparated), "--out", str(tmp_path / "endless")]) == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "endless").config
    assert (config.bos_token_id, config.eos_token_id) == (None, None)  # not Llama's 1 and 2


def test_a_run_whose_data_is_gone(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(runs.data, data)
    train(run, data, *SIZES)
    tokenizer = shutil.move(data / "tokenizer.json", tmp_path / "tokenizer.json")
    shutil.rmtree(data)
    printed = fails(capsys, run, "--out", tmp_path / "out")
    assert f"{data} does not exist" in printed
    assert "--tokenizer tokenizer.json, or --tokenizer none to export without one" in printed
    assert command([str(run), "--out", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == SEPARATOR
    assert command([str(run), "--out", str(tmp_path / "bare"), "--tokenizer", "none"]) == 0


def test_mistakes_are_named(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = runs.run(), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert f"{out} is not empty; choose another --out, or delete it first" in fails(capsys, run, "--out", out)
    assert f"{out / 'notes.txt'} is a file" in fails(capsys, run, "--out", out / "notes.txt")
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    new = tmp_path / "new"
    assert "has none of step '7'; it has 2" in fails(capsys, f"{run}@7", "--out", new)
    assert "argument --shard-size: '3 bananas' must be a size" in fails(
        capsys, run, "--out", new, "--shard-size", "3 bananas"
    )
    assert "there is no tokenizer nowhere.json" in fails(capsys, run, "--out", new, "--tokenizer", "nowhere.json")
    other = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({str(number): number for number in range(400)}, unk_token="0")).save(str(other))
    assert "the embedding 320 rows" in fails(capsys, run, "--out", new, "--tokenizer", other)
    with patch.object(fasttrain.hf.export, "free_bytes", lambda _: 1000):
        assert "do not fit in the 1.0 kB that are free" in fails(capsys, run, "--out", new)
    assert not new.exists()


def test_a_corrupt_checkpoint_is_not_exported(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs.run(), run)
    (file,) = find(run).path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert f"{file} is corrupt" in fails(capsys, run, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_has_changed_is_not_exported(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(runs.data, tmp_path / "data")
    run = train(tmp_path / "run", data, *SIZES)
    text = (data / "tokenizer.json").read_text()
    (data / "tokenizer.json").write_text(text.replace('"!":33', '"!":34'))
    assert "tokenizer.json is corrupt" in fails(capsys, run, "--out", tmp_path / "out")


def test_an_export_that_fails_leaves_nothing(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "exports" / "out"
    with (
        patch.object(fasttrain.hf.export, "card", side_effect=OSError("disk full")),
        pytest.raises(OSError, match="disk full"),
    ):
        export(describe(find(runs.run())), out)
    assert list(out.parent.iterdir()) == []


def test_a_killed_export_leaves_nothing_that_looks_whole(runs: Runs, tmp_path: Path) -> None:
    """And the next one takes away what it left."""
    out = tmp_path / "exports" / "out"
    held = (
        "import time, fasttrain.hf.export as e; e.huggingface_config = lambda *_, **__: time.sleep(60)\n"
        f"from fasttrain.cli.export import main; main({[str(runs.run()), '--out', str(out)]!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", held])
    partial = out.parent / ".out.partial"
    try:
        while not (partial / "README.md").exists():  # all but the last file
            assert process.poll() is None
            time.sleep(0.05)
        with pytest.raises(ValueError, match="another process is writing"):
            export(describe(find(runs.run())), out)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not out.exists()
    assert (partial / "model.safetensors").exists()
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(partial)
    out.mkdir()  # an empty directory is as good as none
    export(describe(find(runs.run())), out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out.stat().st_mode & 0o666) == ((out / "model.safetensors").stat().st_mode & 0o777)
    AutoModelForCausalLM.from_pretrained(out)
