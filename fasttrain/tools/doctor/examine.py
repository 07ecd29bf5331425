"""All that the doctor looks at, in the order in which it is told: what a run will use on this machine because of what
it has, every op once against its reference in float64, and how fast matmuls and the disk are.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from fasttrain.config import Config
from fasttrain.fs import free_bytes
from fasttrain.gpus import gpu_of_device
from fasttrain.metrics.hardware import measured_flops, peak_flops
from fasttrain.tools.doctor import MachineFinding
from fasttrain.tools.doctor.hardware import cards, limits, machine, usable_cores
from fasttrain.tools.doctor.software import variables, versions
from fasttrain.units import disk_size

WRITTEN, CHUNK, LONGEST = 2**28, 2**22, 3.0  # bytes, bytes, seconds
LITTLE = 5 * 2**30  # bytes on a disk that a few checkpoints fill


def examine(settings: Config, out: Path, *, quick: bool) -> Iterator[MachineFinding]:
    """Findings as they are made. quick: nothing is measured."""
    environment = dict(os.environ)  # of the user: torch sets some variables as it goes
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpu = gpus > 0 and settings.parallel.device in ("auto", "cuda")
    for section, findings in (
        ("hardware", chain(machine(), cards())),
        ("limits", limits(gpus=gpus)),
        ("software", versions(settings, on_gpu=on_gpu)),
        ("environment", variables(environment)),
        ("a run will use", estimate(settings, usable_cores()[0])),
        ("ops", ops()),
        ("disk", disk(out, measure=not quick)),
        ("speed", () if quick else speed(torch.device("cuda" if on_gpu else "cpu"))),
    ):
        try:
            for finding in findings:
                yield replace(finding, section=section)
        except ImportError as error:  # of the trainer itself: ops() says it once more, with its remedy
            yield MachineFinding("nothing", str(error), section=section)


def estimate(settings: Config, cores: int) -> Iterator[MachineFinding]:
    """Device, precision, compilation, attention, and how to start on all devices."""
    from fasttrain.distributed.parallelize import should_compile
    from fasttrain.distributed.runtime import DTYPES, choose_device, resolve_precision
    from fasttrain.flops import flops_per_token

    parallel = settings.parallel
    try:
        device = choose_device(parallel.device)
    except ValueError as error:
        text, _, remedy = str(error).partition("; ")
        yield MachineFinding("device", text, "broken", remedy)
        return
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    precision = resolve_precision(parallel.precision, device)
    asked = "asked for" if parallel.precision != "auto" else "auto: GPUs take half precision, CPUs do not"
    yield MachineFinding("device", f"{device.type} (parallel.device is {parallel.device})")
    yield MachineFinding("precision", f"{precision} ({asked})")
    vocab = settings.model.vocab or 4096
    tokens = settings.batch.steps * settings.batch.sequences * settings.data.sequence
    flops = tokens * flops_per_token(settings.model, vocab, settings.data.sequence)
    runtime: Any = SimpleNamespace(device=device)
    try:
        compiled, why = should_compile(parallel, runtime, flops)
        yield MachineFinding("blocks", f"{'compiled' if compiled else 'not compiled'} ({why})")
    except ValueError as error:  # the compiler, which has a finding of its own
        yield MachineFinding("blocks", f"none: {error}")
    yield MachineFinding("kernels", "Triton" if device.type == "cuda" else "their CPU implementations")
    yield _attention(settings, device, DTYPES[precision])
    known = gpu_of_device(torch.cuda.get_device_name()) if device.type == "cuda" else None
    peak = f"{known.peak(precision) / 1e12:,.0f} TFLOP/s (gpus.toml)" if known else "measured at start"
    yield MachineFinding("peak for MFU", peak)
    start = "fasttrain train" if gpus < 2 else f"torchrun --nproc_per_node={gpus} -m fasttrain.train"
    threads = "" if device.type == "cuda" else f" (threads: {torch.get_num_threads()}, cores: {cores})"
    yield MachineFinding("start it with", f"{start}{threads}")


def _attention(settings: Config, device: torch.device, dtype: torch.dtype) -> MachineFinding:
    """The backend for this run's heads, and why not the ones before it that are for this device."""
    from fasttrain_kernels import cpp, explain_attention_backend
    from fasttrain_kernels.ops.attention.capabilities import TABLE

    model = settings.model
    kind: dict[str, Any] = dict(device=device, dtype=dtype, requires_grad=True)
    q, k = (torch.empty(1, 16, heads, model.head_dim, **kind) for heads in (model.heads, model.kv_heads))
    documents = torch.tensor([0, 16], dtype=torch.int32, device=device) if settings.data.document_mask else None
    answers = explain_attention_backend(q, k, k, cu_seqlens=documents, deterministic=model.deterministic)
    if (asked := model.attention_backend) != "auto":
        if answers[asked] == "ok":
            return MachineFinding("attention", f"{asked} (model.attention_backend)")
        return MachineFinding(
            "attention", f"{asked}: {answers[asked]}", "broken", "set model.attention_backend to auto"
        )
    chosen = next((name for name, answer in answers.items() if answer == "ok"), "none")
    before = list(takewhile(lambda each: each[1] != "ok", answers.items()))
    why = [f"{name}: {answer.splitlines()[0]}" for name, answer in before if not answer.startswith("device ")]
    value = f"{chosen} ({'; '.join(why)})" if why else chosen
    packages = [TABLE[name].package for name, answer in before if answer.endswith("is not installed")]
    if packages:
        return MachineFinding("attention", value, "missing", f"pip install {packages[0]}: faster on this GPU")
    if ("cpp", cpp.missing()) not in before:
        return MachineFinding("attention", value)
    remedy = "apt-get install g++ (or set CXX): without its C++, attention takes about 1.6 times as long"
    return MachineFinding("attention", value, "missing", remedy)


def ops() -> Iterator[MachineFinding]:
    """The tolerance is twice the error of eager PyTorch (fasttrain_kernels.testing.accuracy)."""
    try:
        from fasttrain_kernels.testing import self_check
    except ImportError as error:
        yield MachineFinding("kernel library", str(error), "broken", "pip install the package above")
        return
    for case in self_check.CASES:
        for implementation in self_check.training_implementations():
            yield _checked(self_check, case, implementation)


def _checked(self_check: Any, case: Any, implementation: Any) -> MachineFinding:
    name, how = case.name, f"{implementation.name}, {str(implementation.dtype).removeprefix('torch.')}"
    remedy = "do not train: run make test (make test-gpu on a GPU), and report what it says"
    try:
        results = self_check.run(case, implementation)
    except Exception as error:  # whatever an op does, it is this op that does it
        first = str(error).strip().partition("\n")[0]
        return MachineFinding(name, f"{how}: fails with {type(error).__name__}: {first}", "broken", remedy)
    least = sys.float_info.min  # a device that returns zeros has no tolerance to divide by
    share = max(result.error / max(result.tolerance, least) for result in results)
    if wrong := [result for result in results if not result.ok]:
        return MachineFinding(name, f"{how}: {wrong[0]}", "broken", remedy, share)
    return MachineFinding(name, f"{how}: OK ({share:.0%} of tolerance)", figure=share)


def speed(device: torch.device) -> Iterator[MachineFinding]:
    """Rates of one device, in the precisions that a run may choose."""
    rates = {dtype: measured_flops(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    single = rates[torch.float32]
    for dtype, rate in rates.items():
        text = f"{rate / 1e9:,.1f} GFLOP/s"
        if device.type == "cuda":
            text = f"{rate / 1e12:,.2f} TFLOP/s, {rate / peak_flops(device, dtype):.0%} of the vendor's figure"
        elif single > 1.5 * rate:
            text += f": {single / rate:,.0f} times slower, so that CPUs train in fp32"
        elif dtype == torch.bfloat16:
            text += ": parallel.precision bf16 may pay"
        yield MachineFinding(f"matmul {str(dtype).removeprefix('torch.')}", text, figure=rate, unit="FLOP/s")


def disk(out: Path, *, measure: bool) -> Iterator[MachineFinding]:
    """Whether a run can write there, how much, and how fast. The directory need not exist yet, and is not made."""
    directory = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = free_bytes(directory)
    remedy = f"a few checkpoints fill it: free some disk space in {directory}, or choose another --out"
    value = f"{disk_size(free)} in {directory.absolute()}"
    fine = free >= LITTLE
    yield MachineFinding("free", value, "ok" if fine else "warning", "" if fine else remedy, free, "bytes")
    try:
        written, seconds = write_and_sync(directory, WRITTEN if measure else CHUNK)
    except OSError as error:
        remedy = f"make it writable (chown, or remount), or choose another --out than {out}"
        yield MachineFinding("write", f"cannot write: {error.strerror or error}", "broken", remedy)
        return
    rate = written / seconds
    text = f"{rate / 1e6:,.0f} MB/s with fsync ({written / 1e6:,.0f} MB)"
    yield MachineFinding("write", text, figure=rate, unit="B/s") if measure else MachineFinding("write", "possible")


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
