"""The decoder, forward and backward on CPU, against its own matrix products, plain PyTorch and Transformers.

Contenders take turns within one process, and only ratios of one turn are compared. Time is CPU time of one thread,
which a busy machine disturbs least. The floor is what the matrix products of a step take when nothing surrounds them:
projections, head, and attention's six, forward and backward. Plain PyTorch is the model as it is usually written, one
projection for each matrix, and compiled as a whole. Memory is the greatest sum of what torch had allocated at a time.
"""

import statistics
import sys
import time
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.config import Model
from fasttrain.convert import huggingface_config, to_huggingface
from fasttrain.model import Decoder
from fasttrain_kernels import rotary_table

MODEL, BATCH, SEQUENCE = Model(), 8, 256
ROUNDS = {8_192: 7, 50_304: 4}
OPS = ("fasttrain_kernels.rms_norm", "fasttrain_kernels.swiglu", "fasttrain_kernels.qk_norm_rope.op")


class PlainAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        C, width = MODEL.hidden, MODEL.heads * MODEL.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(C, width, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = (nn.RMSNorm(MODEL.head_dim, eps=MODEL.norm_eps) for _ in range(2))
        self.o_proj = nn.Linear(width, C, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (MODEL.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = (x * cos + torch.cat((-x[..., MODEL.head_dim // 2 :], x[..., : MODEL.head_dim // 2]), -1) * sin
                for x in (q, k))  # fmt: skip
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(MODEL.hidden, MODEL.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(MODEL.ffn, MODEL.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(MODEL.hidden, eps=MODEL.norm_eps)
        self.self_attn = PlainAttention()
        self.post_attention_layernorm = nn.RMSNorm(MODEL.hidden, eps=MODEL.norm_eps)
        self.mlp = PlainMLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Plain(nn.Module):
    """The same model, with Transformers' names."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocab, MODEL.hidden)
        self.model.layers = nn.ModuleList(PlainLayer() for _ in range(MODEL.layers))
        self.model.norm = nn.RMSNorm(MODEL.hidden, eps=MODEL.norm_eps)
        cos, sin = rotary_table(SEQUENCE, MODEL.head_dim, theta=MODEL.rope_theta)
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((sin, sin), -1), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def transformers_model(vocab: int, weights: dict[str, Tensor]) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**huggingface_config(MODEL, vocab=vocab, sequence=SEQUENCE), use_cache=False))
    model.load_state_dict(weights, strict=False)  # the tied head has no key
    return model


def floor(vocab: int):
    """The matrix products of a step, and of its attention, into memory that torch gives them as it does in a model."""
    C, width, N = MODEL.hidden, MODEL.heads * MODEL.head_dim, BATCH * SEQUENCE
    shapes = [(C, 3 * width), (width, C), (C, 2 * MODEL.ffn), (MODEL.ffn, C)] * MODEL.layers + [(C, vocab)]
    linear = [(torch.randn(N, i), torch.randn(o, i), torch.randn(N, o)) for i, o in shapes]
    q = torch.randn(BATCH * MODEL.heads, SEQUENCE, MODEL.head_dim)
    p = torch.randn(BATCH * MODEL.heads, SEQUENCE, SEQUENCE)

    def products() -> None:
        for x, weight, dout in linear:
            x @ weight.t(), dout @ weight, dout.t() @ x
        for _ in range(MODEL.layers):
            for _ in range(2):  # scores and values; their gradients
                q @ q.transpose(1, 2), p @ q, p.transpose(1, 2) @ q

    return products


def steps(vocab: int):
    """Forward and backward of each contender, from the same weights, as a function that returns the mean loss."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (BATCH, SEQUENCE + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    ours = Decoder(MODEL, vocab=vocab, sequence=SEQUENCE)
    ours.init_weights(0)
    for block in ours.blocks:
        block.compile(fullgraph=True)
    weights = to_huggingface(ours.state_dict(), MODEL)
    plain, qwen3 = Plain(vocab), transformers_model(vocab, weights)
    plain.load_state_dict(weights)
    compiled = torch.compile(plain)

    def step(model, loss):
        def run() -> Tensor:
            model.zero_grad(set_to_none=True)
            value = loss()
            value.backward()
            return value.detach()

        return run

    fasttrain = step(ours, lambda: ours(inputs, targets).loss_sum / targets.numel())
    return {
        "fasttrain": fasttrain,
        "fasttrain, opaque ops": with_opaque_ops(fasttrain),
        "plain, compiled": step(plain, lambda: compiled(inputs, targets)),
        "Transformers": step(
            qwen3, lambda: F.cross_entropy(qwen3(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        ),
    }


def with_opaque_ops(run):
    """The blocks as they would be if streaming ops stayed ops under torch.compile on a CPU."""

    def opaque(tensor: Tensor) -> bool:
        return False

    def patched() -> Tensor:
        with (
            patch.object(sys.modules[OPS[0]], "fused_by_compiler", opaque),
            patch.object(sys.modules[OPS[1]], "fused_by_compiler", opaque),
            patch.object(sys.modules[OPS[2]], "fused_by_compiler", opaque),
        ):
            return run()

    return patched


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", ROUNDS)
def test_forward_and_backward_beside_the_matrix_products_alone(report, one_thread, vocab):
    torch._dynamo.reset()
    contenders = steps(vocab)
    losses = {name: run() for name, run in contenders.items()}  # compiles
    for loss in losses.values():  # no speed without the right answer
        torch.testing.assert_close(loss, losses["fasttrain"], rtol=1e-5, atol=0)
    memory = {name: peak(run) for name, run in contenders.items()}
    contenders["floor"] = floor(vocab)
    seconds = {name: [] for name in contenders}
    for _ in range(ROUNDS[vocab]):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)

    def share(name, of):  # how often `of` fits into the time of `name`, turn by turn
        ratios = sorted(a / b for a, b in zip(seconds[of], seconds[name], strict=True))
        return {f"{of} / this": statistics.median(ratios), "min": ratios[0], "max": ratios[-1]}

    report(
        f"model_time_{vocab}: {BATCH} x {SEQUENCE} tokens, hidden {MODEL.hidden}, vocabulary {vocab}, float32, CPU",
        {n: {"CPU s": statistics.median(s)} | share(n, "floor") for n, s in seconds.items()},
    )
    report(
        f"model_memory_{vocab}: the same, beyond weights and gradients",
        {n: {"MB": b / 1e6, "of plain": b / memory["plain, compiled"]} for n, b in memory.items()},
    )


def peak(run) -> int:
    """Bytes beyond what stays after a step, weights and gradients. A step frees the gradients of the one before."""
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()  # its gradients are freed by the next: the profiler misses what is freed but was not allocated before it
        begin = time.time_ns()
        run()
    events = [(e.start_ns(), e.nbytes()) for e in profile.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for _, size in sorted(e for e in events if e[0] >= begin):
        held += size
        highest = max(highest, held)
    return highest
