"""What torch's allocator takes of a GPU, and a step of the host's time, measured on the null GPU for `fasttrain plan`:

    python -m bench.plan_memory                 # measures all runs, prints them beside the plan; --write keeps them
    python -m bench.plan_memory 550m 300m       # some; --fits: on a card of exactly the planned size

The runs are those of tests/fasttrain/tools/plan/reserved.toml, where the figures are kept. Needs `make nullgpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.nullgpu.__main__ import ROOT
from fasttrain.cli.parse import load
from fasttrain.recipes import RECIPES
from fasttrain.tools.plan.memory import MemoryEstimate, memory
from fasttrain.tools.plan.sizes import vocab_of

TABLE = ROOT / "tests" / "fasttrain" / "tools" / "plan" / "reserved.toml"
STEPS = 8
COMMON = (
    "--batch.steps 12 --optim.warmup 2 --validation.every 4 --validation.sequences 128 --checkpoint.every 0 "
    "--log.tensorboard False"
)


def planned(row: dict[str, Any]) -> MemoryEstimate:
    settings = load([*row["run"].split(), *COMMON.split()], RECIPES)
    return memory(settings, vocab=vocab_of(settings), dp_size=row["ranks"])


def measure(row: dict[str, Any], *, steps: int = STEPS, gigabytes: float = 1000) -> dict[str, Any]:
    """A run of its own, on a null GPU of so much memory; of rank 0, allocated and reserved bytes, and seconds."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        ranks = [] if row["ranks"] == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={row['ranks']}"]
        inside = ["-m", "bench.plan_memory", "--inside", str(result), str(steps)]
        settings = [*row["run"].split(), *COMMON.split(), "--out", str(Path(directory) / "run")]
        command = [sys.executable, "-m", "bench.nullgpu", *(ranks or inside), *(inside if ranks else []), *settings]
        environment = os.environ | {"NULLGPU_DEVICES": str(row["ranks"]), "NULLGPU_MEM": repr(gigabytes)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        if not result.exists():
            raise SystemExit(f"{row['id']} failed:\n{done.stderr[-3000:]}")
        return json.loads(result.read_text())


def inside(result: Path, steps: int, arguments: list[str]) -> None:
    """In the process of a rank: the trainer, left after some steps, or at its end (0)."""
    import torch

    import fasttrain.train
    from fasttrain.train import loop
    from fasttrain.train.step import train_step

    seconds = list[float]()

    def counted(*args: Any, **options: Any) -> Any:
        begin = time.process_time()
        found = train_step(*args, **options)
        seconds.append(time.process_time() - begin)
        if len(seconds) == steps:
            finish()
            os._exit(0)
        return found

    def finish() -> None:
        stats = torch.cuda.memory_stats()
        kept = {"allocated": stats["allocated_bytes.all.peak"], "reserved": stats["reserved_bytes.all.peak"]}
        kept |= {"retries": stats["num_alloc_retries"], "steps": len(seconds)}
        if int(os.environ.get("RANK", "0")) == 0:
            result.write_text(json.dumps(kept | {"seconds": min(seconds[-4:])}))

    with patch.object(loop, "train_step", counted):
        status = fasttrain.train.main(arguments)
    if status == 0:
        finish()


def rows() -> list[dict[str, Any]]:
    return tomllib.loads(TABLE.read_text("utf-8"))["runs"]


def text(all_rows: list[dict[str, Any]]) -> str:
    head = TABLE.read_text("utf-8").partition("[[runs]]")[0]
    return head + "\n".join(
        "[[runs]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in row.items()) for row in all_rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fits", action="store_true", help="train on a card of the planned size: are there retries?")
    parser.add_argument("--write", action="store_true", help="keep what was measured in the table")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="of the table; default: all")
    asked = parser.parse_args()
    found = rows()
    for row in found:
        if asked.runs and row["id"] not in asked.runs:
            continue
        plan = planned(row)
        taken = plan.bytes - plan.process
        if asked.fits:
            seen = measure(row, gigabytes=taken / 1e9)
            print(
                f"{row['id']:<24} {taken / 2**30:8.3f} GiB: {seen['steps']} steps, {seen['retries']} retries",
                flush=True,
            )
            continue
        seen = measure(row)
        assert seen["retries"] == 0, "the card was full: what was reserved is its size"
        row |= {
            "allocated": seen["allocated"],
            "reserved": seen["reserved"],
            "host_ms": round(1e3 * seen["seconds"], 1),
        }
        print(
            f"{row['id']:<24} allocated {seen['allocated'] / 2**30:7.3f}  reserved {seen['reserved'] / 2**30:7.3f}  "
            f"planned {taken / 2**30:7.3f} GiB ({taken / seen['reserved'] - 1:+.2%})  host {row['host_ms']:.1f} ms",
            flush=True,
        )
        if asked.write:
            TABLE.write_text(text(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        main()
