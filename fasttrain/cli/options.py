"""How a command is declared, the options that several commands share, and how tables are printed.

    @command("report", __doc__, option("--out", "a page", type=Path), flag("--verify", "read all files"))
    def main(options: argparse.Namespace) -> int: ...

Options are parsed, and mistakes in them answered, before the command's function imports torch.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from fasttrain.bounds import Bounds, bounds_of
from fasttrain.cli.errors import interruptible, user_errors
from fasttrain.recipes import RECIPES

if TYPE_CHECKING:
    from fasttrain.distributed.runtime import Runtime
    from fasttrain.tools.trained_model import TrainedModel

Option = Callable[[Any], object]  # adds itself to a parser, or to a group of one


def option(name: str, help: str, **details: Any) -> Option:
    """An option or a positional argument, with argparse's details; --help shows its default.

    type: may raise ValueError with what is wrong with the text.
    """
    if details.get("default") not in (None, "", []):
        help += " (default: %(default)s)"
    if details.get("type") is Path:
        details["type"] = path_of
    if isinstance(details.get("type"), FunctionType):
        details["type"] = _said(details["type"])
    return lambda parser: parser.add_argument(name, help=help, **details)


def path_of(text: str) -> Path:
    if not text:
        raise ValueError("the path is empty")
    return Path(text)


def _said(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse keeps the text of an ArgumentTypeError only."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def flag(name: str, help: str) -> Option:
    return option(name, help, action="store_true")


def number(name: str, help: str, bounds: Bounds, kind: type = int, **details: Any) -> Option:
    """An option that is a number within bounds, which --help shows. kind: int or float."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = text
        if problem := bounds.problem(value, kind):
            raise ValueError(f"{text!r} {problem}")
        return value

    return option(name, f"{help}; {bounds}", **{"type": parse, "metavar": "N"} | details)


def numbers(kind: type, meanings: Mapping[str, str]) -> Iterator[Option]:
    """Options for fields of a dataclass, with their bounds and defaults."""
    for name, help in meanings.items():
        bounds, of = bounds_of(kind)[name]
        yield number(f"--{name.replace('_', '-')}", help, bounds, of, default=getattr(kind(), name))


def group(title: str, *options: Option) -> Option:
    return lambda parser: _add(parser.add_argument_group(title), options)


def one_of(*options: Option) -> Option:
    return lambda parser: _add(parser.add_mutually_exclusive_group(required=True), options)


def _add(parser: Any, options: Sequence[Option]) -> None:
    for add in options:
        add(parser)


@dataclass(frozen=True)
class CommandLine:
    """A command, called with the words after its name."""

    program: str
    description: str
    options: tuple[Option, ...]
    run: Callable[[argparse.Namespace], int]
    takes_settings: bool

    def __call__(self, arguments: Sequence[str]) -> int:
        with user_errors(self.program), interruptible(self.program):
            return self.run(self.parse(arguments))

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options; a mistake in them ends the program with exit code 2."""
        parser = argparse.ArgumentParser(
            prog=self.program,
            description=self.description,
            epilog=EPILOG if self.takes_settings else None,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add(parser, self.options)
        options, rest = parser.parse_known_args(arguments)
        if self.takes_settings:
            from fasttrain.cli.parse import load

            sources = [f"--recipe={options.recipe}", *(f"--config={path}" for path in options.config)]
            options.settings = load([*sources, *rest], RECIPES, self.program)
        elif rest:
            near = difflib.get_close_matches(rest[0], parser._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return options


def command(
    name: str, description: str | None, *options: Option, takes_settings: bool = False
) -> Callable[[Callable[[argparse.Namespace], int]], CommandLine]:
    """Make a command of a function. takes_settings: options.settings is the run that the other options describe."""
    if takes_settings:
        options = (*SETTINGS, *options)
    return lambda run: CommandLine(f"fasttrain {name}", description or "", options, run, takes_settings)


SETTINGS = (
    option("--recipe", f"one of {', '.join(RECIPES)}", default=next(iter(RECIPES)), metavar="NAME"),
    option("--config", "a TOML file (repeatable)", action="append", default=[], metavar="FILE"),
)
EPILOG = "Every option of fasttrain train is understood too: fasttrain train --help."
RUN = option("run", "a run, one of its steps, or a checkpoint's own directory", metavar="RUN[@STEP]")
RUN_DIRECTORY = option("run", "the directory of a run, as runs/tiny", type=Path, metavar="RUN")
MODEL = (  # where a trained model's data is, and what the model runs on
    option("--data", "where the run's data, or its tokenizer, is now, if not where it was", type=Path, metavar="PATH"),
    option("--tokenizer", "tokenizer.json, of data that comes without one", type=Path, metavar="FILE"),
    option("--device", "auto: cuda where there is one", choices=("auto", "cpu", "cuda", "mps"), default="auto"),
    option(
        "--dtype", "auto: fp32; bf16 on GPUs that have it", choices=("auto", "fp32", "bf16", "fp16"), default="auto"
    ),
)


@contextmanager
def trained_model(options: argparse.Namespace) -> Iterator[tuple[TrainedModel, Runtime]]:
    """The model of options.run, on what --device and --dtype ask for."""
    from fasttrain.config import ParallelConfig
    from fasttrain.distributed.runtime import start
    from fasttrain.tools.trained_model import load_model

    parallel = ParallelConfig(device=options.device, precision=options.dtype)
    with start(parallel, device_option="--device") as runtime:
        where = dict(data=options.data, tokenizer=options.tokenizer)
        yield load_model(options.run, device=runtime.device, dtype=runtime.dtype, **where), runtime


def console() -> Console:
    """The terminal; or a file, which has no width of its own."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=120)


FIGURES = {  # columns of tables, to the right
    "step", "size", "loss", "perplexity", "bits per byte", "accuracy", "tokens", "value", "stderr", "samples",
    "fewshot", "documents", "MB of text", "bytes per token",
}  # fmt: skip


def table(console: Console, *columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in FIGURES else "left")
    return made
