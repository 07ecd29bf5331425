"""What a run will use on this machine, because of what it has."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch

from fasttrain import config
from fasttrain.gpus import gpu_of_device
from fasttrain.tools.doctor.finding import Finding

SECTION = "a run will use"


def outlook(settings: config.Config, cores: int) -> Iterator[Finding]:
    """Device, precision, compilation, attention, and how to start on all devices."""

    def finding(name: str, value: str) -> Finding:
        return Finding(section=SECTION, name=name, value=value)

    from fasttrain.distributed.parallelize import should_compile
    from fasttrain.distributed.runtime import DTYPES, resolve_precision
    from fasttrain.flops import flops_per_token

    parallel = settings.parallel
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if parallel.device == "cuda" and not gpus:
        yield Finding(
            section=SECTION, name="device", value="parallel.device is cuda, and torch sees no GPU", level="broken",
            remedy="set parallel.device to auto, or see above why no GPU is seen",
        )  # fmt: skip
        return
    device = torch.device("cuda" if gpus and parallel.device != "cpu" else "cpu")
    precision = resolve_precision(parallel.precision, device)
    asked = "asked for" if parallel.precision != "auto" else "auto: GPUs take half precision, CPUs do not"
    yield finding("device", f"{device.type} (parallel.device is {parallel.device})")
    yield finding("precision", f"{precision} ({asked})")
    vocab = settings.model.vocab or 4096
    tokens = settings.batch.steps * settings.batch.sequences * settings.data.sequence
    runtime: Any = SimpleNamespace(device=device)
    try:
        compiled, why = should_compile(
            parallel, runtime, tokens * flops_per_token(settings.model, vocab, settings.data.sequence)
        )
        yield finding("blocks", f"{'compiled' if compiled else 'not compiled'} ({why})")
    except ValueError as error:  # the compiler, which has a finding of its own
        yield finding("blocks", f"none: {error}")
    yield finding("kernels", "Triton" if device.type == "cuda" else "their CPU implementations")
    yield _attention(settings, device, DTYPES[precision])
    known = gpu_of_device(torch.cuda.get_device_name()) if device.type == "cuda" else None
    yield finding(
        "peak for MFU", f"{known.peak(precision) / 1e12:,.0f} TFLOP/s (gpus.toml)" if known else "measured at start"
    )
    start = "fasttrain train" if gpus < 2 else f"torchrun --nproc_per_node={gpus} -m fasttrain.train"
    threads = "" if device.type == "cuda" else f" (threads: {torch.get_num_threads()}, cores: {cores})"
    yield finding("start it with", f"{start}{threads}")


def _attention(settings: config.Config, device: torch.device, dtype: torch.dtype) -> Finding:
    """The backend for this run's heads, and why not the ones before it that are for this device."""
    from fasttrain_kernels import cpp, explain_attention_backend

    model = settings.model
    q, k = (
        torch.empty(1, 16, heads, model.head_dim, device=device, dtype=dtype) for heads in (model.heads, model.kv_heads)
    )
    documents = torch.tensor([0, 16], dtype=torch.int32, device=device) if settings.data.document_mask else None
    answers = explain_attention_backend(q, k, k, cu_seqlens=documents)
    chosen = next((name for name, answer in answers.items() if answer == "ok"), "none")
    before = list(takewhile(lambda each: each[1] != "ok", answers.items()))
    why = [f"{name}: {answer.splitlines()[0]}" for name, answer in before if not answer.startswith("device ")]
    value = f"{chosen} ({'; '.join(why)})" if why else chosen
    if ("cpp", cpp.missing()) not in before:
        return Finding(section=SECTION, name="attention", value=value)
    return Finding(
        section=SECTION, name="attention", value=value, level="missing",
        remedy="apt-get install g++ (or set CXX): without its C++, attention takes about 1.6 times as long",
    )  # fmt: skip
