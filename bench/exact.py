"""Bytes that each op allocates on a CPU at its peak: exact, so that `make test` holds them to the stored ones.

python -m bench.exact              print what has changed; exit code 1 if anything has
python -m bench.exact --update     store the current figures
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from bench.kernels import check
from bench.kernels.baselines import OURS, implementations
from bench.kernels.comparison import BOTH, FORWARD, KernelCase, inputs_of, runs_of
from bench.memory import peak_on_cpu

STORED = Path(__file__).parent / "results" / "exact.json"
SIZES = {
    "rms_norm": dict(M=64, C=128),
    "add_rms_norm": dict(M=64, C=128),
    "qk_norm_rope": dict(M=64, T=32, H=4, K=2, D=32),
    "attention": dict(M=512, T=256, H=2, K=1, D=32),
    "linear": dict(M=256, C=512, F=256),
    "linear_cross_entropy": dict(M=1024, C=32, V=4096),
    "swiglu": dict(M=64, F=128),
}


def measured() -> dict[str, int]:
    found = {}
    for op, size in SIZES.items():
        case = KernelCase(op=op, size=tuple(size.items()), dtype=torch.float32, device="cpu")
        function, inputs = implementations(op, "cpu")[OURS].make(), inputs_of(case)
        runs = runs_of(function, inputs, check.upstream_of(check.call(function, inputs)))
        for passes, run in zip((FORWARD, BOTH), runs, strict=True):
            run()  # once before: what is made once and kept is not the op's
            found[f"{case.name} {passes}"] = peak_on_cpu(run)
    return found


def changes(now: dict[str, int], stored: dict[str, int]) -> list[str]:
    """Return a line for each figure that differs, marked "worse" where it is more."""
    lines = []
    for name in now.keys() | stored.keys():
        a, b = stored.get(name), now.get(name)
        if a != b:
            change = "new" if a is None else "gone" if b is None else "worse" if b > a else "better"
            lines.append(f"{name}: {a} -> {b} bytes, {change}")
    return sorted(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.exact", description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="store the current figures")
    update = parser.parse_args(argv).update
    now = measured()
    found = changes(now, json.loads(STORED.read_text()) if STORED.exists() else {})
    print("\n".join(found) or "as stored")
    if update:
        STORED.write_text(json.dumps(now, indent=1) + "\n")
    return 0 if update or not found else 1


if __name__ == "__main__":
    sys.exit(main())
