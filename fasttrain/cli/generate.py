"""fasttrain generate RUN --prompt TEXT: what the model of a run makes of a text. docs/generate.md explains it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.bounds import Bounds
from fasttrain.cli.options import MODEL, RUN, command, flag, group, number, numbers, option, trained_model
from fasttrain.config import SamplingConfig

if TYPE_CHECKING:
    from fasttrain.tools.generate import Continuation, Sampling
    from fasttrain.tools.trained_model import TrainedModel

SAMPLING = {  # the fields of SamplingConfig
    "temperature": "above 1: more daring; 0: the likeliest token, always",
    "top_k": "only the N likeliest tokens; 0: all",
    "top_p": "of these, only the likeliest that have N of the probability together",
    "seed": "the same seed gives the same text",
}


@command(
    "generate",
    __doc__,
    RUN,
    group(
        "what to continue",
        option("--prompt", "repeatable; empty: a new document", action="append", default=[], metavar="TEXT"),
        option("--prompt-file", "a text; -: the input", action="append", default=[], type=Path, metavar="FILE"),
        flag("--interactive", "ask for prompts, one a line"),
        number("--samples", "texts for each prompt", Bounds(1, 10**6), default=1),
    ),
    group(
        "how",
        number("--tokens", "length of a continuation", Bounds(1, 10**6), default=128),
        *numbers(SamplingConfig, SAMPLING),
        flag("--ignore-end", "never end a document before the last token"),
        number("--batch", "texts at a time", Bounds(1, 10**6), default=8),
        flag("--json", "a line of JSON for each text, once it has ended"),
    ),
    group("where", *MODEL),
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: all texts are there; 2: a mistake in the command."""
    prompts = _prompts(options)
    from fasttrain.tools.generate import Sampling

    with trained_model(options) as (loaded, _):
        writer = Writer(loaded, Sampling(**{name: getattr(options, name) for name in SAMPLING}), options)
        if options.interactive:
            _interact(writer)
        else:
            writer.write(prompts)
    return 0


def _prompts(options: argparse.Namespace) -> list[str]:
    named = {f"--prompt-file {path}": path for path in options.prompt_file}
    files = {name: sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes() for name, path in named.items()}
    given = [_decoded(f"--prompt {text!a}", os.fsencode(text)) for text in options.prompt]
    given += [_decoded(name, content) for name, content in files.items()]
    if options.interactive and (given or options.json):
        raise ValueError(
            "--interactive asks for its prompts and shows the texts; remove --prompt, --prompt-file and --json"
        )
    if not given and not options.interactive:
        raise ValueError("there is no prompt; add --prompt TEXT, --prompt-file FILE, or --interactive")
    return given


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8: byte {error.start} is {content[error.start]:#x}") from None


Request = tuple[str, int]  # a prompt, and which sample of it


class Writer:
    """Generates texts, and shows each token as it comes."""

    def __init__(self, loaded: TrainedModel, sampling: Sampling, options: argparse.Namespace) -> None:
        self._loaded, self._sampling, self._options = loaded, sampling, options
        self._tokenizer = loaded.tokenizer()

    def write(self, prompts: Sequence[str]) -> None:
        """All samples of all prompts, `batch` at a time."""
        options, model = self._options, self._loaded.model
        texts = list(product(prompts, range(options.samples)))
        began, tokens, cut = time.perf_counter(), 0, 0
        for first in range(0, len(texts), options.batch):
            batch = texts[first : first + options.batch]
            continuations = self._generate(batch, titled=len(texts) > 1)
            for (prompt, sample), made in zip(batch, continuations, strict=True):
                tokens += len(made.ids)
                cut += made.ended == "context"
                if options.json:
                    text = self._tokenizer.decode(made.ids)
                    line = dict(prompt=prompt, text=text, sample=sample, seed=self._sampling.seed)
                    line |= dict(tokens=len(made.ids), ended=made.ended, step=self._loaded.checkpoint.step)
                    print(json.dumps(line), flush=True)
        seconds = time.perf_counter() - began
        if cut:
            print(f"note: {cut} of {len(texts)} ended at {model.sequence} tokens, the context length", file=sys.stderr)
        print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s", file=sys.stderr)

    def _generate(self, batch: Sequence[Request], *, titled: bool) -> list[Continuation]:
        from fasttrain.tools.generate import generate

        separator, ignored = self._loaded.separator, self._options.ignore_end
        begin = [] if separator is None else [separator]
        steps = generate(
            self._loaded.model,
            [[*begin, *self._tokenizer.encode(prompt, add_special_tokens=False).ids] for prompt, _ in batch],
            tokens=self._options.tokens,
            sampling=self._sampling,
            samples=[sample for _, sample in batch],
            end=None if ignored else separator,
            never=separator if ignored else None,
            vocab=self._tokenizer.get_vocab_size(),
        )
        if not self._options.json:
            return _show(batch, steps, self._tokenizer, titled=titled)
        *_, made = steps
        return made


def _show(
    batch: Sequence[Request], steps: Iterator[list[Continuation]], tokenizer: Any, *, titled: bool
) -> list[Continuation]:
    """The first text that has not ended, token by token; then at once what the next one has so far, and so on."""
    from fasttrain.tools.generate import TextStream

    made = next(steps)
    for place, (prompt, sample) in enumerate(batch):
        title = f"--- sample {sample} ---\n" if titled else ""
        print(title + (f"\033[1m{prompt}\033[0m" if sys.stdout.isatty() else prompt), end="", flush=True)
        stream, shown = TextStream(tokenizer), 0
        while True:
            print(stream.add(made[place].ids[shown:]), end="", flush=True)
            shown = len(made[place].ids)
            if made[place].ended:
                break
            made = next(steps)
        print(stream.rest(), flush=True)
    return made


def _interact(writer: Writer) -> None:
    """A prompt a line, until the end of the input. A prompt that cannot be is said so, and the next one asked for."""
    asks = sys.stdin.isatty()
    if asks:
        print("A prompt, and Enter; \\n is a new line. Ctrl-C ends a text, Ctrl-D the program.", file=sys.stderr)
    while True:
        try:
            line = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            return
        try:
            writer.write([line.replace("\\n", "\n")])
        except KeyboardInterrupt:
            print()
        except ValueError as error:
            print(f"fasttrain generate: {error}", file=sys.stderr)
