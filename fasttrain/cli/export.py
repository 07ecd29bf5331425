"""fasttrain export: a checkpoint of a run as a Hugging Face checkpoint, for Transformers, vLLM and others.

It loads as Qwen3, or as Llama if the model has no qk_norm. Weights are written file by file: however large the model,
in memory is one file of --shard-size and little more. docs/export.md explains the files.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fasttrain.cli.errors import user_errors
from fasttrain.cli.options import RUN_HELP, parsed
from fasttrain.fs import check_is_new
from fasttrain.units import disk_size, parse_bytes

if TYPE_CHECKING:
    from fasttrain.hf.export import Exported, ExportSource

PROGRAM = "fasttrain export"


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: written; 2: a mistake in the command, or a corrupt checkpoint."""
    options = _parser().parse_args(arguments)
    with user_errors(PROGRAM):
        check_is_new(options.out)
        from fasttrain.checkpoint import find
        from fasttrain.distributed.runtime import DTYPES
        from fasttrain.hf.export import describe, export, weights

        checkpoint = find(options.run)
        source = describe(checkpoint, options.tokenizer)
        total = weights(checkpoint, source.settings.model, DTYPES[options.dtype]).bytes
        screen = Console(stderr=True, highlight=False)
        with screen.status(f"comparing {checkpoint.path} with its checksums, {disk_size(checkpoint.bytes)}"):
            checkpoint.verify()
        with _progress(screen) as progress:
            task = progress.add_task("writing", total=total)
            result = export(
                source, options.out, dtype=options.dtype, shard=int(options.shard_size),
                on_progress=lambda written: progress.advance(task, written),
            )  # fmt: skip
    _tell(result, source, options.dtype)
    return 0


def _tell(result: Exported, source: ExportSource, dtype: str) -> None:
    """Print what is where, and what can be done with it."""
    family = "Qwen3" if source.settings.model.qk_norm else "Llama"
    where = f"step {source.checkpoint.step} of {source.run}"
    print(f"{result.path}: {family}, {result.parameters:,} parameters in {dtype}, {where}")
    for name, length in result.files.items():
        print(f"  {name:<36}{disk_size(length):>10}")
    if source.tokenizer is None:
        print("without a tokenizer, so that texts are tokens only; --tokenizer tokenizer.json adds one")
    print("\nnext:")
    print(f'  python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(result.path)!r})"')
    path = shlex.quote(str(result.path))
    if source.tokenizer is not None:
        print(f"  vllm serve {path}")
    print(f"  fasttrain train --from-hf {path} --data.path DATA --out RUN")


def _progress(screen: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN[@STEP]", help=RUN_HELP)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or an empty directory")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of the weights: fp32 as they were trained (default), or bf16, rounded to nearest",
    )
    parser.add_argument(
        "--shard-size",
        type=parsed(parse_bytes),
        default=5 * 10**9,
        metavar="BYTES",
        help="of a file of weights, at most: 5GB (default), 500MB, ...",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json, in place of that of the run's data; none: export without one",
    )
    return parser
