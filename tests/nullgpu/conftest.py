"""Commands on "cuda", on the null GPU: skipped, with the reason, where its environment is not built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bench.nullgpu.__main__ import ENVIRONMENT, ROOT
from tests.datasets import DatasetWriter

SECONDS = 240  # of one process: compiling is the longest
# Commands, one after the other in one process: torch is imported once.
COMMANDS = """
import json, os, sys, traceback
from fasttrain.cli import main
for command in json.loads(sys.argv[1]):
    try:
        code = main(command)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = "a traceback"
    if os.environ.get("RANK", "0") == "0":
        print(f"\\n=== {code}", flush=True)
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nullgpu", action="store_true", help="the commands on the null GPU, which take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if not config.getoption("nullgpu", False):
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]
    elif not (ENVIRONMENT / ".installed").exists():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="there is no null GPU (make nullgpu)"))


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    text: str
    code: str


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 documents of words, one token each."""
    path = tmp_path_factory.mktemp("data") / "words"
    tokenizer = Tokenizer(models.WordLevel({"<|end|>": 0, **{f"w{n}": n for n in range(1, 61)}}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    draw = np.random.default_rng(0)
    with DatasetWriter(path, tokenizer=tokenizer.to_str(), vocab=61, separator=0, source="a test") as writer:
        for number in range(400):
            ids = draw.integers(1, 61, draw.integers(5, 40))
            writer.add(("train", "validation")[number % 2], ids, num_bytes=3 * len(ids))
    return path


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Answer]]:
    """run(commands, ranks=1, memory=None): each command's answer, from one process, or from one on each rank."""
    program = tmp_path_factory.mktemp("program") / "commands.py"
    program.write_text(COMMANDS)

    def start(commands: list[list[str]], *, ranks: int = 1, memory: float | None = None) -> list[Answer]:
        limit = ["env", f"NULLGPU_MEM={memory}"] if memory else []
        several = ["--ranks", str(ranks)] if ranks > 1 else []
        command = [*limit, sys.executable, "-m", "bench.nullgpu", *several, str(program), json.dumps(commands)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS, cwd=ROOT
        )
        *parts, _ = re.split(r"^=== (.*)\n", done.stdout, flags=re.MULTILINE)
        answers = [Answer(text, code) for text, code in zip(parts[::2], parts[1::2], strict=True)]
        assert len(answers) == len(commands), done.stdout
        return answers

    return start
