"""The environment of a benchmark: hardware, versions, and the source down to uncommitted changes."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fasttrain.metrics.hardware import device_name

ROOT = Path(__file__).parent.parent
PACKAGES = ("fasttrain", "torch", "triton", "transformers", "tokenizers", "liger_kernel", "cut-cross-entropy")
_NOT_SOURCE = (":!bench/results", ":!docs", ":!*.md")


def hardware() -> dict[str, Any]:
    """Return what has to be equal for two runs to be compared."""
    gpus = torch.cuda.device_count()
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if gpus else None,
        "gpus": gpus,
    }


def slug(hardware: dict[str, Any]) -> str:
    """Name the GPU or the processor, for file names."""
    name, count = (hardware["gpu"], hardware["gpus"]) if hardware["gpu"] else (hardware["cpu"], hardware["cores"])
    return f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{count}x"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def source(root: Path = ROOT) -> tuple[str, str]:
    """The commit, and a digest of what is changed against it in code; "" if nothing is."""
    try:
        commit = _git(root, "rev-parse", "--short=10", "HEAD").decode().strip()
        changed = _git(root, "diff", "HEAD", "--", ".", *_NOT_SOURCE)
        new = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", ".", *_NOT_SOURCE)
    except (OSError, subprocess.CalledProcessError):  # no git, or not a work tree
        return "unknown", ""
    digest = hashlib.sha256(changed)
    for name in sorted(filter(None, new.split(b"\0"))):
        digest.update(name + (root / name.decode()).read_bytes())
    return commit, digest.hexdigest()[:8] if changed or new else ""


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout


def _processor() -> str:
    """Name the processor, with family and model if known: in a virtual machine it may be just "AMD EPYC"."""
    name = device_name(torch.device("cpu"))
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return name
    numbers = [re.search(rf"^{field}\s*: (\d+)$", text, re.M) for field in ("cpu family", "model")]
    return f"{name} ({', '.join(n[1] for n in numbers)})" if all(numbers) else name  # type: ignore[index]
