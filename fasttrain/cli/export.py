"""fasttrain export: a checkpoint of a run as a Hugging Face checkpoint, for Transformers, vLLM and others.

It loads as Qwen3, or as Llama if the model has no qk_norm. Weights are written file by file: however large the model,
in memory is one file of --shard-size and little more. docs/export.md explains the files.
"""

import argparse
import shlex
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fasttrain.cli.options import RUN, command, option
from fasttrain.fs import check_is_new
from fasttrain.units import disk_size, parse_bytes


@command(
    "export",
    __doc__,
    RUN,
    option("--out", "a new or an empty directory", type=Path, required=True, metavar="DIR"),
    option("--dtype", "of the weights; bf16: rounded to nearest", choices=("fp32", "bf16"), default="fp32"),
    option("--shard-size", "of a file of weights, at most", type=parse_bytes, default="5GB", metavar="BYTES"),
    option("--tokenizer", "in place of that of the run's data; none: export without one", metavar="FILE"),
)
def main(options: argparse.Namespace) -> int:
    """Exit code 0: written; 2: a mistake in the command, or a corrupt checkpoint."""
    check_is_new(options.out)
    from fasttrain.checkpoint.committed import find
    from fasttrain.distributed.runtime import DTYPES
    from fasttrain.hf.export import Weights, describe, export

    checkpoint = find(options.run)
    source = describe(checkpoint, options.tokenizer)
    found = Weights(checkpoint, source.settings.model, DTYPES[options.dtype])
    screen = Console(stderr=True, highlight=False)
    with screen.status(f"comparing {checkpoint.path} with its checksums, {disk_size(checkpoint.bytes)}"):
        checkpoint.verify()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("writing", total=found.bytes)
        export(
            source, options.out, dtype=options.dtype, shard=int(options.shard_size),
            on_progress=lambda written: progress.advance(task, written),
        )  # fmt: skip
    family = "Qwen3" if source.settings.model.qk_norm else "Llama"
    where = f"step {checkpoint.step} of {source.run}"
    print(f"{options.out}: {family}, {found.parameters:,} parameters in {options.dtype}, {where}")
    for file in sorted(options.out.iterdir()):
        print(f"  {file.name:<36}{disk_size(file.stat().st_size):>10}")
    if source.tokenizer is None:
        print("without a tokenizer, so that texts are tokens only; --tokenizer tokenizer.json adds one")
    print("\nnext:")
    print(f'  python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained({str(options.out)!r})"')
    path = shlex.quote(str(options.out))
    if source.tokenizer is not None:
        print(f"  vllm serve {path}")
    print(f"  fasttrain train --from-hf {path} --data.path DATA --out RUN")
    return 0
