"""A CPU, measured on the spot: models of one block and of three take a step, and the rest is by proportion.

No table knows the machine that this runs on, and a few seconds of measuring do.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from fasttrain import config
from fasttrain.distributed.parallelize import parallelize
from fasttrain.distributed.runtime import DTYPES, keep_freed_memory
from fasttrain.flops import block_shapes, flops_per_token, num_parameters
from fasttrain.gpus import Gpu
from fasttrain.metrics.hardware import resident_memory as resident_memory  # what `process` is measured with
from fasttrain.model import Decoder
from fasttrain.optim.optimizer import clip, make_optimizer
from fasttrain.tools.plan.estimate import Plan
from fasttrain.tools.plan.memory import memory, precision_of
from fasttrain.tools.plan.sizes import Stated, sizes
from fasttrain.tools.plan.speed import Hardware, SpeedEstimate
from fasttrain_kernels.ops.linear import matmul_out

BAND = 0.2  # of the speed: what bench/test_plan.py allows
TOKENS = 2048  # that are measured, at most
COMPILED = 0.93  # time of a compiled block (docs/log.md, "CPU step")
_SECONDS = 2.0
Clock = Callable[[], float]


def cpu_hardware() -> Hardware:
    """This machine, as one device."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = Gpu(
        name="cpu", device="", architecture="cpu", memory=total, half=0.0, tf32=0.0, fp32=0.0, bandwidth=0.0, link=0.0,
        node=1, network=1.0, price=None,
    )  # fmt: skip
    return Hardware.of(gpu, 1)


def estimate_on_cpu(
    settings: config.Config,
    *,
    vocab: int,
    process: float,  # bytes of a process that has loaded the trainer
    stated: Stated = Stated(),  # noqa: B008
    compiled: bool = False,
    clock: Clock = time.perf_counter,
) -> Plan:
    """The plan of a run on this machine's CPU."""
    precision = precision_of(settings.parallel, cpu=True)
    needed = memory(settings, vocab=vocab, device="cpu", process=process, compiled=compiled)
    return Plan(
        settings=settings,
        hardware=cpu_hardware(),
        precision=precision,
        sizes=sizes(settings, vocab=vocab, stated=stated),
        memory=needed,
        speed=_measured(settings, vocab, DTYPES[precision], compiled, clock),
        measured=True,
    )


def _measured(settings: config.Config, vocab: int, dtype: torch.dtype, compiled: bool, clock: Clock) -> SpeedEstimate:
    """A step's speed, with this process's number of threads."""
    keep_freed_memory()  # as the trainer does
    model, T = settings.model, settings.data.sequence
    B = min(settings.batch.micro, max(TOKENS // T, 1))
    tokens = torch.randint(vocab, (B, T))
    positions = torch.arange(T, dtype=torch.int32).repeat(B, 1) if settings.data.document_mask else None
    ends = torch.arange(0, B * T + 1, T, dtype=torch.int32) if settings.data.document_mask else None

    def passes(decoder: Decoder) -> Callable[[], None]:
        return lambda: decoder(tokens, tokens, ends, positions).backward()

    def update() -> None:
        clip(three.parameters(), settings.optim.clip)
        optimizer.step()

    one, three = (_decoder(settings, layers, vocab, dtype) for layers in (1, 3))
    optimizer = make_optimizer(three, settings.optim, torch.device("cpu"))
    K, N = max(block_shapes(model), key=math.prod)  # the run's largest product: what its MFU is of
    x, weight, out = (torch.randn(shape, dtype=dtype) for shape in ((B * T, K), (K, N), (B * T, N)))
    measured: list[Callable[[], object]] = [passes(one), passes(three), update, lambda: matmul_out(x, weight, out)]
    alone, longer, updating, product = _medians(measured, clock)
    block = max(longer - alone, 0.0) / 2
    micros = settings.batch.sequences / B  # of what is measured, in a step
    parts = {
        "blocks": micros * model.layers * block * (COMPILED if compiled else 1.0),
        "loss": micros * max(alone - block, 0.0),
        "optimizer": updating * num_parameters(model, vocab).total / num_parameters(three.config, vocab).total,
    }
    tokens_per_step, flops, peak = settings.batch.sequences * T, flops_per_token(model, vocab, T), 2 * B * T * K * N
    return SpeedEstimate(parts=parts, tokens=tokens_per_step, flops=flops, peak=peak / product, band=BAND)


def _decoder(settings: config.Config, layers: int, vocab: int, dtype: torch.dtype) -> Decoder:
    decoder = Decoder(replace(settings.model, layers=layers), vocab=vocab, sequence=settings.data.sequence).to(dtype)
    alone: Any = SimpleNamespace(world_size=1, dtype=torch.float32, precision="fp32", device=torch.device("cpu"))
    parallelize(decoder, settings.parallel, alone, compiled=False)
    with torch.no_grad():
        for parameter in decoder.parameters():  # as small as a model's: large logits make slow denormal gradients
            parameter.normal_(0, settings.model.init_std)
    return decoder


def _medians(works: list[Callable[[], object]], clock: Clock) -> list[float]:
    """Seconds of each, interleaved, so that all find the machine alike; the first ones do not count."""
    rounds: list[list[float]] = []
    end = time.perf_counter() + _SECONDS
    while len(rounds) < 4 or (time.perf_counter() < end and len(rounds) < 50):
        instants = [clock()]
        for work in works:
            work()
            instants.append(clock())
        rounds.append([after - before for before, after in pairwise(instants)])
    return [statistics.median(each) for each in zip(*rounds[1:], strict=True)]
