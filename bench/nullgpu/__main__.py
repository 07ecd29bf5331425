"""Run a program on the null GPU: python -m bench.nullgpu [options] PROGRAM [arguments].

PROGRAM: a file, or -m and a module. It runs with the Python of .venv-nullgpu (make nullgpu).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("NULLGPU_VENV", ROOT / ".venv-nullgpu"))


def environment() -> dict[str, str]:
    """Of a process on the null GPU. Triton, pynvml and ctypes look for CUDA's libraries by LD_LIBRARY_PATH."""
    found = sorted(ENVIRONMENT.glob("lib/python3*/site-packages/nvidia/cu13/lib/libnullgpu.so"))
    if not found:
        raise SystemExit(f"there is no null GPU in {ENVIRONMENT}: make nullgpu")
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "LD_LIBRARY_PATH": str(found[0].parent),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # the null cuDNN builds no plans
        "NULLGPU_ZERO": os.environ.get("NULLGPU_ZERO", "1"),  # results are zeros, not what was in their memory before
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Of this command, and of bench.nullgpu.program, which it runs."""
    parser.add_argument("--waits", action="store_true", help="the Python stack of every wait of the last steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures of every step; a rank adds .1, ...")
    parser.add_argument("-m", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="a file, and its arguments")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.nullgpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", action="store_true", help="launches by kernel")
    parser.add_argument("--ranks", type=int, metavar="N", help="start N processes by torchrun, each with its GPU")
    options(parser)
    asked = parser.parse_args()
    program = ["-m", *asked.m] if asked.m else asked.program
    if not program:
        parser.error("give a program, or -m and a module")
    given = environment() | ({"NULLGPU_KERNELS": "1"} if asked.kernels else {})
    launcher = []
    if asked.ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={asked.ranks}"]
        given["NULLGPU_DEVICES"] = str(asked.ranks)
    kept = [*(["--waits"] if asked.waits else []), *(["--json", str(asked.json)] if asked.json else [])]
    python = str(ENVIRONMENT / "bin" / "python")
    os.execve(python, [python, *launcher, "-m", "bench.nullgpu.program", *kept, *program], given)


if __name__ == "__main__":
    main()
