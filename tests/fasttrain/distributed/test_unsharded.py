"""Whole weights with low-precision copies, on one rank and on several: what fully_shard computes, to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fasttrain import config
from fasttrain.config import ModelConfig, ParallelConfig
from fasttrain.distributed.parallelize import before_backward, parallelize
from fasttrain.distributed.runtime import start
from fasttrain.model import Decoder
from fasttrain.optim.optimizer import local
from tests.ranks import run_ranks

SECTION = ModelConfig(layers=2, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=16)
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
TOKENS = torch.arange(48).reshape(3, 2, 8) * 7 % 61  # three micro-batches


def decoder() -> Decoder:
    model = Decoder(SECTION, vocab=64, sequence=8)
    model.init_weights(0)
    return model


def cast(dtype: torch.dtype = torch.bfloat16, recompute: Any = "none") -> Decoder:
    model = decoder()
    alone: Any = SimpleNamespace(world_size=1, dtype=dtype, precision=PRECISIONS[dtype], device=torch.device("cpu"))
    parallelize(model, ParallelConfig(recompute=recompute), alone, compiled=False)
    return model


def accumulated(model: Decoder, batches: Tensor = TOKENS) -> tuple[list[Tensor], list[Tensor]]:
    losses = []
    for number, tokens in enumerate(batches, 1):
        before_backward(model, ParallelConfig(), last=number == len(batches))
        loss = model(tokens, tokens.roll(1, -1))
        loss.backward()
        losses.append(loss.detach())
    return losses, [local(p.grad) for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_losses_and_summed_gradients_are_those_of_fully_shard(dtype: torch.dtype, recompute: str) -> None:
    with start(ParallelConfig()) as runtime:
        sharded, policy = (
            decoder(),
            MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        )
        for block in sharded.blocks:
            fully_shard(block, mesh=runtime.mesh, mp_policy=policy)
        fully_shard(sharded, mesh=runtime.mesh, mp_policy=policy)
        expected = accumulated(sharded)
    losses, gradients = accumulated(cast(dtype, recompute))
    assert len(gradients) == len(list(decoder().parameters()))
    assert all(gradient.dtype == torch.float32 and gradient.any() for gradient in gradients)
    torch.testing.assert_close((losses, gradients), expected, rtol=0, atol=0)


def as_block_by_block(precision: Any, recompute: Any, replicas: int, length: int, compiled: bool) -> None:
    """On a rank: micro-batches of its own, against FSDP block by block, whose sums of two numbers have no order."""
    gradients = []
    for groups, blocks in ((1, 1), (replicas, length)):
        parallel = ParallelConfig(dp_replicate=groups, precision=precision, recompute=recompute)
        with start(parallel) as runtime, patch.object(config, "unit_blocks", return_value=blocks):
            with torch.device("meta"):
                model = Decoder(SECTION, vocab=64, sequence=8)
            parallelize(model, parallel, runtime, compiled=compiled)
            model.to_empty(device="cpu")
            model.init_weights(0)
            losses, found = accumulated(model, TOKENS[runtime.rank : runtime.rank + 2])
            whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
            gradients.append((losses, whole))
            assert all(x.shape == y.shape for x, y in zip(found, whole, strict=True)) == (groups == 2)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("precision", "recompute", "replicas", "length"),
    [("fp32", "none", 2, 1), ("fp32", "full", 2, 2), ("bf16", "none", 2, 2), ("fp32", "none", 1, 2)],
)
def test_units_and_replicas_have_the_gradients_of_sharded_blocks(
    precision: str, recompute: str, replicas: int, length: int
) -> None:
    run_ranks(as_block_by_block, 2, precision, recompute, replicas, length, False)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_compiled_units_have_the_gradients_of_compiled_blocks(replicas: int) -> None:
    run_ranks(as_block_by_block, 2, "fp32", "none", replicas, 2, True, seconds=600)


def test_the_model_has_its_own_weights_except_between_forward_and_backward() -> None:
    model, tokens = cast(), TOKENS[0]
    weights = dict(model.named_parameters())

    def has_its_own() -> bool:
        return all(parameter is weights[name] for name, parameter in model.named_parameters())

    loss = model(tokens, tokens)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    loss.backward()
    assert has_its_own()
    assert all(p.dtype == torch.float32 and p.grad is not None for p in model.parameters())
    model.stats(tokens, tokens)
    assert model.logits(tokens).dtype == torch.bfloat16
    with torch.no_grad():
        model(tokens, tokens)
    assert has_its_own()
    with pytest.raises(IndexError):
        model(tokens + 1000, tokens)
    assert has_its_own()


def test_changed_weights_are_cast_again() -> None:
    model, tokens = cast(), TOKENS[0]
    before = model.logits(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after, expected = model.logits(tokens), cast()
    expected.load_state_dict(model.state_dict())
    assert not torch.equal(before, after)
    assert torch.equal(after, expected.logits(tokens))
