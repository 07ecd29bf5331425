"""fasttrain generate: prompts from everywhere, the same text for the same seed, shown as it comes."""

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fasttrain import cli
from fasttrain.tools.trained_model import load_model
from tests.fasttrain.tools.generate.models import in_transformers
from tests.runs import events


def run_command(*arguments: object) -> int:
    try:
        return cli.main(["generate", *map(str, arguments)])
    except SystemExit as exit:
        return int(exit.code or 0)


@pytest.fixture
def texts(capsys):
    """texts(*arguments): the lines of --json."""

    def ask(*arguments: object) -> list[dict]:
        assert run_command(*arguments, "--json") == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return ask


def test_greedy_is_what_transformers_makes_of_the_weights(small_run, texts):
    prompts = ["def ", "import os\nimport sys\n", "class Point:\n    def __init__(self"]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    found = texts(small_run, *arguments, "--temperature", 0, "--tokens", 12, "--ignore-end")
    loaded = load_model(str(small_run), device=torch.device("cpu"), dtype=torch.float32)
    theirs, tokenizer = in_transformers(loaded.model), loaded.tokenizer()
    assert loaded.separator is not None
    for prompt, line in zip(prompts, found, strict=True):
        ids = torch.tensor([[loaded.separator, *tokenizer.encode(prompt, add_special_tokens=False).ids]])
        made = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0,
            bad_words_ids=[[loaded.separator]], eos_token_id=None,
        )  # fmt: skip
        assert line["text"] == tokenizer.decode(made[0, ids.shape[1] :].tolist())
        assert (line["prompt"], line["tokens"], line["ended"], line["step"]) == (prompt, 12, "tokens", 6)


def test_the_sample_at_the_end_of_the_run(small_run, texts):
    """One way to do a thing: the command gives the same text."""
    (line,) = texts(small_run, "--prompt", "def ", "--tokens", 3)
    assert events(small_run, "sample")[-1]["text"] == line["prompt"] + line["text"]


def test_seeds_samples_and_batches(small_run, texts):
    options = ("--tokens", 8, "--temperature", 1, "--top-k", 0)
    four = texts(small_run, "--prompt", "a", "--prompt", "def b", "--samples", 2, *options)
    assert [(line["prompt"], line["sample"]) for line in four] == [("a", 0), ("a", 1), ("def b", 0), ("def b", 1)]
    assert len({line["text"] for line in four}) == 4
    alone = texts(small_run, "--prompt", "def b", "--samples", 2, *options, "--batch", 1)
    assert [line["text"] for line in alone] == [line["text"] for line in four[2:]]
    (other,) = texts(small_run, "--prompt", "a", "--seed", 1, *options)
    assert other["text"] != four[0]["text"]


def test_prompts_from_files_and_the_input(small_run, texts, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("def é(", "utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from the input")))
    found = texts(
        small_run, "--prompt", "", "--prompt-file", tmp_path / "prompt.txt", "--prompt-file", "-", "--tokens", 2
    )
    assert [line["prompt"] for line in found] == ["", "def é(", "from the input"]


def test_what_is_shown(small_run, capsys, texts):
    expected = texts(small_run, "--prompt", "def ", "--samples", 3, "--tokens", 6)
    assert run_command(small_run, "--prompt", "def ", "--samples", 3, "--tokens", 6, "--batch", 2) == 0
    shown = capsys.readouterr()
    parts = [f"--- sample {line['sample']} ---\ndef {line['text']}\n" for line in expected]
    assert shown.out == "".join(parts)
    assert "tokens/s" in shown.err
    assert run_command(small_run, "--prompt", "def ", "--tokens", 6) == 0
    assert capsys.readouterr().out == f"def {expected[0]['text']}\n"


def test_the_end_of_the_context(small_run, capsys):
    assert run_command(small_run, "--prompt", "def ", "--tokens", 100, "--ignore-end") == 0
    assert "note: 1 of 1 ended at 32 tokens, the context length" in capsys.readouterr().err
    assert run_command(small_run, "--prompt", "x = 1\n" * 30) == 2
    assert "the model knows texts of 32 (data.sequence of its run); shorten the prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is no prompt; add --prompt TEXT"),
        (("--prompt", "a", "--temperature", "-1"), "--temperature: '-1' must be a finite number from 0 to 1_000"),
        (("--prompt", "a", "--top-p", "0"), "--top-p: '0' must be a finite number above 0 and at most 1"),
        (("--prompt", "a", "--tokens", "0"), "'0' must be a whole number from 1 to 1_000_000"),
        (("--prompt", "a", "--device", "cuda"), "--device is cuda, but torch"),
        (("--prompt", "a", "--data", "/nowhere"), "/nowhere"),
        (("--prompt-file", "/nowhere"), "/nowhere"),
        (("--prompt", "a", "--top-q", "1"), "--top-q"),
        (("--prompt", "a", "--interactive"), "remove --prompt"),
    ],
)
def test_mistakes(small_run, arguments, words, capsys):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run_command(small_run, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_is_not_there(capsys, tmp_path):
    assert run_command(tmp_path / "nowhere", "--prompt", "a") == 2
    assert "does not exist; name a run, RUN@STEP" in capsys.readouterr().err


def test_interactive_from_a_pipe(small_run, capsys, monkeypatch, texts):
    """A prompt that is too long is said so, and the next one is answered."""
    expected = texts(small_run, "--prompt", "def ", "--prompt", "import\n", "--tokens", 4)
    monkeypatch.setattr(sys, "stdin", io.StringIO("def \n" + "x = 1; " * 40 + "\nimport\\n\n"))
    assert run_command(small_run, "--interactive", "--tokens", 4) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(f"{line['prompt']}{line['text']}\n" for line in expected)
    assert "shorten the prompt" in shown.err


def test_interactive_at_a_terminal(small_run: Path):
    """Through a pty: it asks, shows the prompt in bold and the text after it, and ends with Ctrl-D."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "fasttrain", "generate", str(small_run), "--interactive", "--tokens", "4"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, close_fds=True)
    os.close(child)
    os.set_blocking(parent, False)
    seen, deadline = b"", time.monotonic() + 120

    def until(words: bytes, count: int = 1) -> None:
        nonlocal seen
        while seen.count(words) < count:
            assert time.monotonic() < deadline, seen
            try:
                seen += os.read(parent, 4096)
            except BlockingIOError:
                time.sleep(0.05)

    try:
        until(b"> ")
        os.write(parent, b"def \n")
        until(b"tokens/s")
        until(b"> ", 2)
        assert b"\x1b[1mdef \x1b[0m" in seen
        os.write(parent, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(parent)
