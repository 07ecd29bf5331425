"""The command `fasttrain`: finds a command by its name, and gives it the rest of the line.

A module is imported when its command is called, and imports torch once its arguments are right: neither --help nor a
mistake waits for seconds.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import fasttrain
from fasttrain.cli.errors import interruptible, user_errors


class Command(NamedTuple):
    module: str
    purpose: str
    function: str = "main"


COMMANDS = {
    "train": Command("fasttrain.train", "train a model; the same as python -m fasttrain.train"),
    "plan": Command("fasttrain.cli.plan", "what a run will be: sizes, memory, speed, days, cost"),
    "doctor": Command("fasttrain.cli.doctor", "what this machine has and lacks, and what a run will use"),
    "verify-resume": Command("fasttrain.cli.verify_resume", "try whether a killed run resumes bit-for-bit"),
    "data prepare": Command("fasttrain.cli.data_prepare", "make a dataset of text, JSONL or Parquet"),
    "data lint": Command("fasttrain.cli.data_lint", "look for what is wrong with a dataset"),
    "data locate": Command("fasttrain.cli.data_locate", "which documents a step trained on, and back"),
    "export": Command("fasttrain.cli.export", "write a Hugging Face checkpoint of a run"),
    "generate": Command("fasttrain.cli.generate", "continue a text with the model of a run"),
    "eval": Command("fasttrain.cli.eval", "score a run: loss, perplexity, bits per byte, benchmark tasks"),
    "report": Command("fasttrain.cli.report", "a page with the curves and events of runs"),
    "checkpoint list": Command("fasttrain.cli.checkpoint", "show the checkpoints of a run", "list_command"),
    "checkpoint verify": Command("fasttrain.cli.checkpoint", "look for corrupt checkpoints", "verify_command"),
    "checkpoint prune": Command("fasttrain.cli.checkpoint", "delete old checkpoints of a run", "prune_command"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code, or 2 if there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["--version"], ["-V"]):
        print(f"fasttrain {fasttrain.__version__}")
        return 0
    for length in (2, 1):  # "data prepare", then "train"
        name = " ".join(words[:length])
        if name in COMMANDS:
            command = COMMANDS[name]
            with user_errors(f"fasttrain {name}"), interruptible(f"fasttrain {name}"):  # the import takes a moment
                function = getattr(importlib.import_module(command.module), command.function)
            return function(words[length:])
    if words and words[0] not in ("-h", "--help"):
        inside = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
        if not inside or words[1:2] not in ([], ["-h"], ["--help"]):
            print(_unknown(words, inside), file=sys.stderr)
            return 2
        print(_usage(inside))
        return 0
    print(_usage(list(COMMANDS)))
    return 0 if words else 2


def _usage(names: list[str]) -> str:
    width = max(map(len, names))
    lines = [f"  fasttrain {name:<{width}}  {COMMANDS[name].purpose}" for name in names]
    return "\n".join([*lines, "", "fasttrain COMMAND --help explains the options of a command."])


def _unknown(words: list[str], inside: list[str]) -> str:
    asked = " ".join(words[: 2 if inside else 1])
    near = difflib.get_close_matches(asked, inside or COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(inside or COMMANDS)}"
    return f"fasttrain: error: there is no command {asked!r}; {hint}"
