"""What flash-attn's packages take, read from their files and compared with what we give them. Nothing of them is run.

make attention-packages
"""

from __future__ import annotations

import ast
import sys
import tarfile
import zipfile
from pathlib import Path

FLASH = {"softmax_scale", "causal", "window_size", "softcap", "deterministic"}
VARLEN = FLASH | {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
CUTE = (VARLEN - {"window_size", "deterministic"}) | {"q", "k", "v", "window_size_left", "window_size_right"}
# Package: the file, and for each function how many arguments it is given by place, and which by name
CALLS: dict[str, tuple[str, dict[str, tuple[int, set[str]]]]] = {
    "flash_attn-": (
        "flash_attn/flash_attn_interface.py",
        {"flash_attn_func": (3, FLASH), "flash_attn_varlen_func": (3, VARLEN)},
    ),
    "flash_attn_4-": (
        "flash_attn/cute/interface.py",
        {
            "_flash_attn_fwd": (0, CUTE | {"return_lse"}),
            "_flash_attn_bwd": (0, CUTE | {"out", "dout", "lse", "deterministic"}),
        },
    ),
}


def mismatches(source: str, calls: dict[str, tuple[int, set[str]]]) -> list[str]:
    """Functions that are missing, do not take what they are given, or need more."""
    functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    found = [f"{name} is missing" for name in calls.keys() - functions.keys()]
    for name, (by_place, by_name) in calls.items():
        if name in functions:
            args = functions[name]
            places = [arg.arg for arg in args.args]
            taken = {*places[by_place:], *(arg.arg for arg in args.kwonlyargs)}
            needed = {*places[by_place : len(places) - len(args.defaults)]}
            found += [f"{name} does not take {argument}" for argument in sorted(by_name - taken)]
            found += [f"{name} needs {argument}" for argument in sorted(needed - by_name)]
    return found


def read(package: Path) -> dict[str, str]:
    """The Python files of a wheel, or of a source distribution without its first directory."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
    with tarfile.open(package) as sources:
        files = (member for member in sources if member.name.endswith(".py") and member.isfile())
        return {m.name.partition("/")[2]: sources.extractfile(m).read().decode("utf-8", "replace") for m in files}


def main(directory: Path) -> int:
    failures = 0
    for prefix, (file, calls) in CALLS.items():
        package = max(directory.glob(f"{prefix}*"))
        files = read(package)
        found = mismatches(files[file], calls)
        if ("flash_attn/__init__.py" in files) != (prefix == "flash_attn-"):
            found.append("flash_attn/__init__.py decides which of the two is installed")
        print(f"{package.name}: {'; '.join(found) or 'takes what it is given'}")
        failures += len(found)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
