"""fasttrain generate RUN --prompt TEXT: what the model of a run makes of a text. docs/generate.md explains it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.cli.errors import user_errors
from fasttrain.cli.options import RUN_HELP, add_device, at_least, runtime_of
from fasttrain.config import SamplingConfig

if TYPE_CHECKING:
    from fasttrain.tools.generate import Continuation, Sampling
    from fasttrain.tools.trained_model import TrainedModel

PROGRAM = "fasttrain generate"


@dataclass(frozen=True)
class TextRequest:
    """A text to generate."""

    prompt: str
    ids: list[int]  # with the separator before it
    sample: int  # of its prompt


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: all texts are there; 2: a mistake in the command."""
    options = _parser().parse_args(arguments)
    with user_errors(PROGRAM):
        checked = SamplingConfig(
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
        )
        prompts = _prompts(options)
        from fasttrain.tools.generate import Sampling
        from fasttrain.tools.trained_model import load_model

        sampling = Sampling(**vars(checked))
        with runtime_of(options) as runtime:
            loaded = load_model(
                options.run, device=runtime.device, dtype=runtime.dtype, data=options.data, tokenizer=options.tokenizer
            )
            writer = Writer(loaded, sampling, options)
            if options.interactive:
                return _interact(writer)
            writer.write(prompts)
    return 0


class Writer:
    """Generates texts, and shows each token as it comes."""

    def __init__(self, loaded: TrainedModel, sampling: Sampling, options: argparse.Namespace) -> None:
        self._loaded, self._sampling, self._options = loaded, sampling, options
        self._tokenizer = loaded.tokenizer()
        self._vocab = self._tokenizer.get_vocab_size()

    def write(self, prompts: Sequence[str]) -> None:
        """All samples of all prompts, `batch` at a time."""
        options = self._options
        texts = [text for prompt in prompts for text in self._samples(prompt)]
        began, tokens, cut = time.perf_counter(), 0, 0
        for first in range(0, len(texts), options.batch):
            batch = texts[first : first + options.batch]
            steps = self._generate(batch)
            done = _last(steps) if options.json else _show(batch, steps, self._tokenizer, titled=len(texts) > 1)
            for text, made in zip(batch, done, strict=True):
                tokens += len(made.ids)
                cut += made.ended == "context"
                if options.json:
                    print(json.dumps(self._line(text, made)), flush=True)
        seconds = time.perf_counter() - began
        if cut:
            limit = self._loaded.model.sequence
            print(f"note: {cut} of {len(texts)} ended at {limit} tokens, the context length", file=sys.stderr)
        print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s", file=sys.stderr)

    def _samples(self, prompt: str) -> list[TextRequest]:
        separator = self._loaded.separator
        begin = [] if separator is None else [separator]
        ids = [*begin, *self._tokenizer.encode(prompt, add_special_tokens=False).ids]
        return [TextRequest(prompt, ids, sample) for sample in range(self._options.samples)]

    def _generate(self, batch: Sequence[TextRequest]) -> Iterator[list[Continuation]]:
        from fasttrain.tools.generate import generate

        separator, on = self._loaded.separator, self._options.ignore_end
        return generate(
            self._loaded.model,
            [text.ids for text in batch],
            tokens=self._options.tokens,
            sampling=self._sampling,
            samples=[text.sample for text in batch],
            end=None if on else separator,
            never=separator if on else None,
            vocab=self._vocab,
        )

    def _line(self, text: TextRequest, made: Continuation) -> dict[str, Any]:
        return dict(
            prompt=text.prompt,
            text=self._tokenizer.decode(made.ids),
            sample=text.sample,
            seed=self._sampling.seed,
            tokens=len(made.ids),
            ended=made.ended,
            step=self._loaded.checkpoint.step,
        )


def _show(
    batch: Sequence[TextRequest], steps: Iterator[list[Continuation]], tokenizer: Any, *, titled: bool
) -> list[Continuation]:
    """The first text that has not ended, token by token; then at once what the next one has so far, and so on."""
    from fasttrain.tools.generate import TextStream

    streams, shown, current = [TextStream(tokenizer) for _ in batch], [0] * len(batch), -1
    made: list[Continuation] = []
    for made in steps:
        if current < 0:
            current = _begin(batch, 0, titled=titled)
        while current < len(batch):
            ids = made[current].ids
            _print(streams[current].add(ids[shown[current] :]))
            shown[current] = len(ids)
            if not made[current].ended:
                break
            _print(streams[current].rest() + "\n")
            current = _begin(batch, current + 1, titled=titled)
    return made


def _begin(batch: Sequence[TextRequest], number: int, *, titled: bool) -> int:
    if number < len(batch):
        if titled:
            _print(f"--- sample {batch[number].sample} ---\n")
        _print(f"\033[1m{batch[number].prompt}\033[0m" if sys.stdout.isatty() else batch[number].prompt)
    return number


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _last(steps: Iterator[list[Continuation]]) -> list[Continuation]:
    *_, made = steps
    return made


def _interact(writer: Writer) -> int:
    """A prompt a line, until the end of the input. A prompt that cannot be is said so, and the next one asked for."""
    asks = sys.stdin.isatty()
    if asks:
        print("A prompt, and Enter; \\n is a new line. Ctrl-C ends a text, Ctrl-D the program.", file=sys.stderr)
    while True:
        try:
            line = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            return 0
        try:
            writer.write([line.replace("\\n", "\n")])
        except KeyboardInterrupt:
            print()
        except ValueError as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)


def _prompts(options: argparse.Namespace) -> list[str]:
    files = [sys.stdin.read() if str(path) == "-" else path.read_text("utf-8") for path in options.prompt_file]
    given = [*options.prompt, *files]
    if options.interactive and (given or options.json):
        raise ValueError(
            "--interactive asks for its prompts and shows the texts; remove --prompt, --prompt-file and --json"
        )
    if not given and not options.interactive:
        raise ValueError("there is no prompt; add --prompt TEXT, --prompt-file FILE, or --interactive")
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN[@STEP]", help=RUN_HELP)
    what = parser.add_argument_group("what to continue")
    what.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="repeatable; empty: a new document")
    what.add_argument(
        "--prompt-file", action="append", default=[], type=Path, metavar="FILE", help="a text file, - for the input"
    )
    what.add_argument("--interactive", action="store_true", help="ask for prompts, one a line")
    what.add_argument("--samples", type=at_least(1), default=1, metavar="N", help="texts for each prompt (1)")
    how, defaults = parser.add_argument_group("how"), SamplingConfig()
    how.add_argument("--tokens", type=at_least(1), default=128, metavar="N", help="length of a continuation (128)")
    how.add_argument(
        "--temperature", type=float, default=defaults.temperature, metavar="T",
        help=f"above 1: more daring; 0: the likeliest token, always ({defaults.temperature})",
    )  # fmt: skip
    how.add_argument(
        "--top-k", type=int, default=defaults.top_k, metavar="K",
        help=f"only the K likeliest tokens; 0: all ({defaults.top_k})",
    )  # fmt: skip
    how.add_argument(
        "--top-p", type=float, default=defaults.top_p, metavar="P",
        help=f"of these, only the likeliest that have P of the probability together ({defaults.top_p:g})",
    )  # fmt: skip
    how.add_argument("--seed", type=int, default=0, metavar="N", help="the same seed gives the same text (0)")
    how.add_argument("--ignore-end", action="store_true", help="never end a document before the last token")
    how.add_argument("--batch", type=at_least(1), default=8, metavar="N", help="texts at a time (8)")
    how.add_argument("--json", action="store_true", help="a line of JSON for each text, once it has ended")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--data", type=Path, metavar="PATH", help="a dataset with the run's tokenizer, if its own is gone"
    )
    where.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, of data that comes without one")
    add_device(where)
    return parser
