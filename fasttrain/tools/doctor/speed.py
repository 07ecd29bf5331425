"""How fast this machine is: matrix products, copies in memory, and writes to the disk that runs go to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch

from fasttrain.disk import free_bytes
from fasttrain.metrics import StepTimer, measured_flops, peak_flops
from fasttrain.tools.doctor.finding import Finding

SECTION, DISK = "speed", "disk"
COPIED = {"cpu": 2**27, "cuda": 2**30}  # bytes: more than caches hold
SECONDS = 0.3  # of copying
WRITTEN, CHUNK, LONGEST = 2**28, 2**22, 3.0  # bytes, bytes, seconds
LITTLE = 5 * 2**30  # bytes on a disk that a few checkpoints fill


def speed(device: torch.device) -> Iterator[Finding]:
    """Of one device, in the precisions that a run may choose."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        rates[dtype] = measured_flops(device, dtype)
        name = str(dtype).removeprefix("torch.")
        text = f"{rates[dtype] / 1e12:,.2f} TFLOP/s" if device.type == "cuda" else f"{rates[dtype] / 1e9:,.1f} GFLOP/s"
        if device.type == "cuda":
            text += f", {rates[dtype] / peak_flops(device, dtype):.0%} of the vendor's figure"
        elif dtype == torch.bfloat16:
            ratio = rates[torch.float32] / rates[dtype]
            text += (
                f": {ratio:,.0f} times slower, so that CPUs train in fp32"
                if ratio > 1.5
                else ": parallel.precision bf16 may pay"
            )
        yield Finding(section=SECTION, name=f"matmul {name}", value=text, figure=rates[dtype], unit="FLOP/s")
    rate = copy_rate(device)
    yield Finding(
        section=SECTION, name="memory", value=f"{rate / 1e9:,.1f} GB/s, reading and writing", figure=rate, unit="B/s"
    )


def disk(out: Path, *, measure: bool) -> Iterator[Finding]:
    """Whether a run can write there, how much, and how fast. The directory need not exist yet, and is not made."""
    directory = out
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    free = free_bytes(directory)
    remedy = f"a few checkpoints fill it: make room in {directory}, or choose another --out"
    yield Finding(
        section=DISK, name="free", value=f"{free / 1e9:,.1f} GB in {directory.absolute()}", figure=free, unit="bytes",
        level="ok" if free >= LITTLE else "warning", remedy="" if free >= LITTLE else remedy,
    )  # fmt: skip
    try:
        written, seconds = write_and_sync(directory, WRITTEN if measure else CHUNK)
    except OSError as error:
        remedy = f"make it writable (chown, or remount), or choose another --out than {out}"
        yield Finding(
            section=DISK, name="write", value=f"cannot write: {error.strerror or error}", level="broken", remedy=remedy
        )
        return
    if measure:
        rate = written / seconds
        text = f"{rate / 1e6:,.0f} MB/s with fsync ({written / 1e6:,.0f} MB)"
        yield Finding(section=DISK, name="write", value=text, figure=rate, unit="B/s")
    else:
        yield Finding(section=DISK, name="write", value="possible")


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of the best of some copies."""
    source = torch.ones(COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # touches the pages
    best, end = 0.0, perf_counter() + SECONDS
    while not best or perf_counter() < end:
        timer = StepTimer(device)
        target.copy_(source)
        timer.mark("copy")
        best = max(best, 2 * COPIED[device.type] / timer.split()["copy"])
    return best


def write_and_sync(directory: Path, size: int) -> tuple[int, float]:
    """Bytes and seconds, of a file that is gone afterwards. Random bytes: some file systems compress."""
    chunk = os.urandom(CHUNK)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".fasttrain-doctor-") as file:
        began, written = perf_counter(), 0
        while written < size and perf_counter() - began < LONGEST:
            written += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        return written, perf_counter() - began
