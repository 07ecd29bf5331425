"""A CPU, measured on the spot: every op of a step at the run's own sizes, once, and then added up.

No table knows the machine that this runs on, and two seconds of measuring do. An op is timed forward and backward, on
at most 2,048 tokens; its time for the others, and for the other blocks, is by proportion.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain import config
from fasttrain.distributed.runtime import DTYPES, keep_freed_memory
from fasttrain.flops import block_shapes, flops_per_token, num_parameters
from fasttrain.gpus import Gpu
from fasttrain.metrics.hardware import resident_memory as resident_memory  # what `process` is measured with
from fasttrain.optim.optimizer import clip, make_optimizer
from fasttrain.tools.plan.estimate import Plan
from fasttrain.tools.plan.memory import memory, precision_of
from fasttrain.tools.plan.sizes import Stated, sizes
from fasttrain.tools.plan.speed import Hardware, SpeedEstimate
from fasttrain_kernels import add_rms_norm, attention, linear, linear_cross_entropy, qk_norm_rope, rotary_table, swiglu

BAND = 0.2  # of the speed: what bench/test_plan.py allows
TOKENS = 2048  # that an op is measured on, at most
COMPILED = 0.6  # time of fused elementwise work against that of ops (bench/test_model.py)
_SECONDS = 0.15  # for an op
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
        speed=_MeasuredStep(settings, vocab, DTYPES[precision], clock).speed(compiled=compiled),
        measured=True,
    )


class _MeasuredStep:
    """A step to be measured, with this process's number of threads."""

    def __init__(self, settings: config.Config, vocab: int, dtype: torch.dtype, clock: Clock) -> None:
        self.settings, self.model, self.vocab, self.dtype, self.clock = settings, settings.model, vocab, dtype, clock
        self.T = settings.data.sequence
        self.B = min(settings.batch.micro, max(TOKENS // self.T, 1))
        self.M = self.B * self.T
        self.parameters = num_parameters(self.model, vocab).total
        self.other_memory = torch.zeros(2**23)  # more than caches hold

    def speed(self, *, compiled: bool) -> SpeedEstimate:
        keep_freed_memory()  # as the trainer does
        batch, recompute = self.settings.batch, self.settings.parallel.recompute
        micros = batch.sequences / self.B  # of what is measured, in a step
        again = recompute == "full"
        blocks = micros * self.model.layers
        matmuls = sum(self.matmul(K, N, again=again) for K, N in block_shapes(self.model))
        streaming, streaming_forward = self.streaming()
        attention, attention_forward = self.attention()
        streaming += streaming_forward if recompute != "none" else 0.0
        accumulating = max(batch.sequences // batch.micro - 1, 0) * self.accumulation()
        parts = {
            "matmuls": blocks * matmuls,
            "attention": blocks * (attention + again * attention_forward),
            "streaming": blocks * streaming * (COMPILED if compiled else 1.0) + accumulating,
            "loss": micros * self.loss(),
            "optimizer": self.optimizer(),
        }
        tokens, flops = batch.sequences * self.T, flops_per_token(self.model, self.vocab, self.T)
        return SpeedEstimate(parts=parts, tokens=tokens, flops=flops, peak=self.peak(), band=BAND)

    def matmul(self, K: int, N: int, *, again: bool) -> float:
        x, weight, dout = self.random(self.M, K), self.random(N, K), self.random(self.M, N)
        forward = self.seconds(lambda: linear(x, weight))
        backward = self.seconds(lambda: (linear(dout, weight.t()), linear(dout.t(), x.t())))
        return (1 + again) * forward + backward

    def peak(self) -> float:
        """FLOP/s of the run's largest product: what its MFU is of."""
        K, N = max(block_shapes(self.model), key=math.prod)
        x, weight = self.random(self.M, K), self.random(N, K)
        return 2 * self.M * K * N / self.seconds(lambda: x @ weight.t())

    def streaming(self) -> tuple[float, float]:
        """Two norms, the rotation and swiglu of a block: forward and backward, and forward alone."""
        model, B, T, C, D = self.model, self.B, self.T, self.model.hidden, self.model.head_dim
        x, residual, weight, packed = map(self.leaf, ((B, T, C), (B, T, C), (C,), (B, T, 2 * model.ffn)))
        heads = self.leaf((B, T, model.heads + 2 * model.kv_heads, D))
        q_norm, k_norm = (self.leaf((D,)), self.leaf((D,))) if model.qk_norm else (None, None)
        cos, sin = rotary_table(T, D, theta=model.rope_theta)
        positions = torch.arange(T).repeat(B, 1) if self.settings.data.document_mask else None

        def rotation() -> tuple[Tensor, ...]:
            q, k, v = heads.split([model.heads, model.kv_heads, model.kv_heads], dim=-2)
            return *qk_norm_rope(q, k, q_norm, k_norm, cos, sin, positions=positions), v

        norms = self.with_backward(lambda: add_rms_norm(x, residual, weight))
        rotations, gates = self.with_backward(rotation), self.with_backward(lambda: (swiglu(packed),))
        return 2 * norms[0] + rotations[0] + gates[0], 2 * norms[1] + rotations[1] + gates[1]

    def attention(self) -> tuple[float, float]:
        model = self.model
        q, k, v = (self.leaf((self.B, self.T, n, model.head_dim)) for n in (model.heads, *[model.kv_heads] * 2))
        documents = self.settings.data.document_mask
        ends = torch.arange(0, self.M + 1, self.T, dtype=torch.int32) if documents else None
        return self.with_backward(lambda: (attention(q, k, v, cu_seqlens=ends),))

    def loss(self) -> float:
        """The head with its loss, and the embedding, whose gradient is as large."""
        C, targets = self.model.hidden, torch.randint(self.vocab, (self.M,))
        # Weights as small as a model's: logits of hundreds make denormal gradients, which some CPUs multiply slowly
        hidden, weight = self.leaf((self.M, C)), self.leaf((self.vocab, C), scale=self.model.init_std)
        table = nn.Embedding(self.vocab, C, dtype=self.dtype)

        def head() -> None:
            hidden.grad = weight.grad = None
            linear_cross_entropy(hidden, weight, targets, reduction="sum").backward()

        def embedding() -> None:
            table.weight.grad = None
            table(targets).backward(hidden.detach())

        return self.seconds(head) + self.seconds(embedding)

    def optimizer(self) -> float:
        """Clipping and the update of a block's parameters, for as many as there are."""
        block, optim = nn.Module(), self.settings.optim
        block.blocks = nn.ModuleList([nn.Linear(K, N, bias=False) for K, N in block_shapes(self.model)])
        optimizer = make_optimizer(block, optim, torch.device("cpu"))
        for parameter in block.parameters():
            parameter.grad = torch.randn_like(parameter)
        seconds = self.seconds(lambda: (clip(block.parameters(), optim.clip), optimizer.step()))
        return seconds * self.parameters / sum(parameter.numel() for parameter in block.parameters())

    def accumulation(self) -> float:
        """Adding a micro-batch's gradients to those before it."""
        total, one = (torch.zeros(2**22) for _ in range(2))
        return self.seconds(lambda: total.add_(one)) * self.parameters / total.numel()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype)

    def leaf(self, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        return self.random(*shape).mul_(scale).requires_grad_()

    def timed(self, op: Callable[[], Any]) -> tuple[float, Any]:
        begin = self.clock()
        result = op()
        return self.clock() - begin, result

    def seconds(self, op: Callable[[], object]) -> float:
        return _medians(lambda: self.timed(op)[:1], _SECONDS)[0]

    def with_backward(self, op: Callable[[], tuple[Tensor, ...]]) -> tuple[float, float]:
        """Seconds of forward and backward, and of forward alone."""

        def once() -> tuple[float, float]:
            forward, outputs = self.timed(op)
            gradients = [torch.ones_like(output) for output in outputs]
            self.other_memory.add_(1)  # what forward saved has left the caches by the time of backward
            backward, _ = self.timed(lambda: torch.autograd.backward(outputs, gradients))
            return forward, backward

        forward, backward = _medians(once, 2 * _SECONDS)
        return forward + backward, forward


def _medians(once: Callable[[], tuple[float, ...]], seconds: float) -> list[float]:
    """Of what a few calls return, after one that does not count."""
    once()
    found: list[tuple[float, ...]] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or (time.perf_counter() < end and len(found) < 50):
        found.append(once())
    return [statistics.median(each) for each in zip(*found, strict=True)]
