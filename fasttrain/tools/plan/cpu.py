"""A CPU, measured on the spot: every op of a step at the run's own sizes, once, and then added up.

No table knows the machine that this runs on, and two seconds of measuring do. An op is timed forward and backward, on
at most 2,048 tokens; its time for the others, and for the other blocks, is by proportion.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fasttrain import config
from fasttrain.distributed.runtime import DTYPES, keep_freed_memory
from fasttrain.flops import block_shapes, flops_per_token, num_parameters
from fasttrain.gpus import Gpu
from fasttrain.metrics import used_memory
from fasttrain.optim.optimizer import clip, make_optimizer
from fasttrain.tools.plan.estimate import Plan, precision_of
from fasttrain.tools.plan.memory import memory
from fasttrain.tools.plan.sizes import Stated, sizes
from fasttrain.tools.plan.speed import Hardware, SpeedEstimate
from fasttrain_kernels import add_rms_norm, attention, linear, linear_cross_entropy, qk_norm_rope, rotary_table, swiglu

BAND = 0.2  # of the speed: what bench/test_plan.py allows
TOKENS = 2048  # that an op is measured on, at most
COMPILED = 0.6  # time of fused elementwise work against that of ops (bench/test_model.py)
_SECONDS = 0.15  # for an op
Clock = Callable[[], float]


def resident_memory() -> float:
    """Bytes of this process now. Its peak would not do: Linux counts that of the process that started it, too."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except OSError:  # another system
        return used_memory(torch.device("cpu"))


def cpu_hardware() -> Hardware:
    """This machine, as one device."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = Gpu(
        name="cpu", device="", architecture="cpu", memory=total, half=0.0, tf32=0.0, fp32=0.0, bandwidth=0.0, link=0.0,
        node=1, network=1.0, price=None,
    )  # fmt: skip
    return Hardware(gpu=gpu, gpus=1, node=1, network=1.0, memory=total, price=None)


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
    run = sizes(settings, vocab=vocab, stated=stated)
    of_cpu = partial(memory, vocab=vocab, precision=precision, device="cpu", process=process, compiled=compiled)
    return Plan(
        settings=settings,
        hardware=cpu_hardware(),
        precision=precision,
        compiled=compiled,
        sizes=run,
        memory=of_cpu(settings),
        plain_loss=of_cpu(settings, loss="plain"),
        speed=cpu_speed(settings, vocab=vocab, precision=precision, compiled=compiled, clock=clock),
        measured=True,
    )


def cpu_speed(
    settings: config.Config,
    *,
    vocab: int,
    precision: str = "fp32",
    compiled: bool = False,
    clock: Clock = time.perf_counter,
) -> SpeedEstimate:
    """Measure a step, with this process's number of threads."""
    keep_freed_memory()  # as the trainer does
    timer = _Timer(clock)
    model, batch, T = settings.model, settings.batch, settings.data.sequence
    dtype = DTYPES[precision]
    sequences = min(batch.micro, max(TOKENS // T, 1))
    M = sequences * T
    micros = batch.sequences / sequences  # of what is measured, in a step
    L, recompute = model.layers, settings.parallel.recompute
    matmuls = sum(_matmul(timer, M, K, N, dtype, again=recompute == "full") for K, N in block_shapes(model))
    documents = settings.data.document_mask
    streaming, streaming_forward = _streaming(timer, model, sequences, T, dtype, documents=documents)
    attending, attending_forward = _attention(timer, model, sequences, T, dtype, documents=documents)
    if recompute != "none":
        streaming += streaming_forward
    if recompute == "full":
        attending += attending_forward
    accumulating = max(batch.sequences // batch.micro - 1, 0) * _accumulation(timer, settings, vocab)
    parts = {
        "matmuls": micros * L * matmuls,
        "attention": micros * L * attending,
        "streaming": micros * L * streaming * (COMPILED if compiled else 1.0) + accumulating,
        "loss": micros * _loss(timer, model, vocab, M, dtype),
        "optimizer": _optimizer(timer, settings, vocab),
    }
    flops = flops_per_token(model, vocab, T)
    return SpeedEstimate(
        parts=parts, tokens=batch.sequences * T, flops=flops, peak=_peak(timer, model, M, dtype), band=BAND
    )


def _matmul(seconds: _Timer, M: int, K: int, N: int, dtype: torch.dtype, *, again: bool) -> float:
    x, weight, dout = torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype), torch.randn(M, N, dtype=dtype)
    forward = seconds(lambda: linear(x, weight))
    return (2 if again else 1) * forward + seconds(lambda: (linear(dout, weight.t()), linear(dout.t(), x.t())))


def _peak(seconds: _Timer, model: config.ModelConfig, M: int, dtype: torch.dtype) -> float:
    """FLOP/s of the run's largest product: what its MFU is of."""
    K, N = max(block_shapes(model), key=lambda sides: sides[0] * sides[1])
    x, weight = torch.randn(M, K, dtype=dtype), torch.randn(N, K, dtype=dtype)
    return 2 * M * K * N / seconds(lambda: x @ weight.t())


def _streaming(
    seconds: _Timer, model: config.ModelConfig, B: int, T: int, dtype: torch.dtype, *, documents: bool
) -> tuple[float, float]:
    """Two norms, the rotation and swiglu of a block: forward and backward, and forward alone."""
    C, F, D = model.hidden, model.ffn, model.head_dim

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    x, residual, weight = leaf(B, T, C), leaf(B, T, C), leaf(C)
    packed = leaf(B, T, 2 * F)
    heads = leaf(B, T, model.heads + 2 * model.kv_heads, D)
    q_norm, k_norm = (leaf(D), leaf(D)) if model.qk_norm else (None, None)
    cos, sin = rotary_table(T, D, theta=model.rope_theta)
    positions = torch.arange(T).repeat(B, 1) if documents else None
    sizes = [model.heads, model.kv_heads, model.kv_heads]

    def norm() -> tuple[Tensor, ...]:
        return add_rms_norm(x, residual, weight)

    def rotation() -> tuple[Tensor, ...]:
        q, k, v = heads.split(sizes, dim=-2)
        return *qk_norm_rope(q, k, q_norm, k_norm, cos, sin, positions=positions), v

    def gate() -> tuple[Tensor, ...]:
        return (swiglu(packed),)

    norms, rotations, gates = (seconds.with_backward(op) for op in (norm, rotation, gate))
    return 2 * norms[0] + rotations[0] + gates[0], 2 * norms[1] + rotations[1] + gates[1]


def _attention(
    seconds: _Timer, model: config.ModelConfig, B: int, T: int, dtype: torch.dtype, *, documents: bool
) -> tuple[float, float]:
    shapes = [(B, T, n, model.head_dim) for n in (model.heads, model.kv_heads, model.kv_heads)]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    ends = torch.arange(0, B * T + 1, T, dtype=torch.int32) if documents else None
    return seconds.with_backward(lambda: (attention(q, k, v, cu_seqlens=ends),))


def _loss(seconds: _Timer, model: config.ModelConfig, vocab: int, M: int, dtype: torch.dtype) -> float:
    """The head with its loss, and the embedding, whose gradient is as large."""
    hidden = torch.randn(M, model.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, model.hidden, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (M,))
    table = nn.Embedding(vocab, model.hidden, dtype=dtype)

    def head() -> None:
        hidden.grad = weight.grad = None
        linear_cross_entropy(hidden, weight, targets, reduction="sum").backward()

    def embedding() -> None:
        table.weight.grad = None
        table(targets).backward(hidden.detach())

    return seconds(head) + seconds(embedding)


def _optimizer(seconds: _Timer, settings: config.Config, vocab: int) -> float:
    """Clipping and the update of a block's parameters, for as many as there are."""
    model = settings.model

    class OneBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(K, N, bias=False) for K, N in block_shapes(model)])

    block = OneBlock()
    optimizer = make_optimizer(block, settings.optim, torch.device("cpu"))
    for parameter in block.parameters():
        parameter.grad = torch.randn_like(parameter)

    def update() -> None:
        clip(block.parameters(), settings.optim.clip)
        optimizer.step()

    measured = sum(parameter.numel() for parameter in block.parameters())
    return seconds(update) * num_parameters(model, vocab).total / measured


def _accumulation(seconds: _Timer, settings: config.Config, vocab: int) -> float:
    """Adding a micro-batch's gradients to those before it."""
    total, one = (torch.zeros(2**22) for _ in range(2))
    return seconds(lambda: total.add_(one)) * num_parameters(settings.model, vocab).total / total.numel()


class _Timer:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.other_memory = torch.zeros(2**23)  # more than caches hold

    def with_backward(self, op: Callable[[], tuple[Tensor, ...]]) -> tuple[float, float]:
        """Seconds of forward and backward, and of forward alone.

        What forward saved has left the caches by the time of backward: between the two, other memory is touched.
        """
        forward: list[float] = []
        backward: list[float] = []
        end = time.perf_counter() + 2 * _SECONDS
        while len(forward) < 4 or (time.perf_counter() < end and len(forward) < 50):
            begin = self.clock()
            outputs = op()
            forward.append(self.clock() - begin)
            gradients = [torch.ones_like(output) for output in outputs]
            self.other_memory.add_(1)
            begin = self.clock()
            torch.autograd.backward(outputs, gradients)
            backward.append(self.clock() - begin)
        first = statistics.median(forward[1:])
        return first + statistics.median(backward[1:]), first

    def __call__(self, op: Callable[[], object]) -> float:
        """The median of a few calls after one that does not count."""
        op()
        taken: list[float] = []
        end = time.perf_counter() + _SECONDS
        while len(taken) < 3 or (time.perf_counter() < end and len(taken) < 50):
            begin = self.clock()
            op()
            taken.append(self.clock() - begin)
        return statistics.median(taken)
