"""Low-precision copies of weights on one device: what fully_shard computes, to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fasttrain.config import ModelConfig, ParallelConfig
from fasttrain.distributed.parallelize import parallelize
from fasttrain.distributed.runtime import start
from fasttrain.model import Decoder
from fasttrain.optim.optimizer import local

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


def accumulated(model: Decoder) -> tuple[list[Tensor], list[Tensor]]:
    losses = []
    for tokens in TOKENS:
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
