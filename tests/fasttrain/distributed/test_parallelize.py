"""What ranks say to each other in a step."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain import config
from fasttrain.config import ModelConfig, ParallelConfig
from fasttrain.distributed.parallelize import _compile_stack, _wrap, before_backward, parallelize, should_compile
from fasttrain.distributed.runtime import start
from fasttrain.model import Decoder
from tests.ranks import run_ranks

LAYERS, MICRO_BATCHES = 3, 4


def collectives(parallel: ParallelConfig, length: int) -> Counter[str]:
    """Of a step with several micro-batches, in units of so many blocks."""
    model_section = ModelConfig(layers=LAYERS, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16)
    with start(parallel) as runtime, patch.object(config, "unit_blocks", lambda *_: length):
        with torch.device("meta"):
            model = Decoder(model_section, vocab=64, sequence=8)
        parallelize(model, parallel, runtime, compiled=False)
        model.to_empty(device="cpu")
        model.init_weights(0)
        sharded = parallel.dp_replicate != runtime.world_size
        assert all(isinstance(p, DTensor) == sharded for p in model.parameters())
        assert any(isinstance(module, FSDPModule) for module in model.modules()) == sharded
        tokens = torch.randint(64, (1, 8))
        with Ops("c10d") as said:
            for number in range(MICRO_BATCHES):
                before_backward(model, parallel, last=number == MICRO_BATCHES - 1)
                model(tokens, tokens).backward()
        return said.counts


class Ops(TorchDispatchMode):
    """Counts operations, of one namespace or all. (torch's CommDebugMode fails at the second forward of a module.)"""

    def __init__(self, namespace: str = "") -> None:
        super().__init__()
        self.namespace = namespace
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.namespace in ("", op.namespace):
            self.counts[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


def check(parallel: ParallelConfig, expected: dict[str, int], length: int) -> None:
    assert collectives(parallel, length) == expected


GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


def in_units(units: int) -> list[tuple[int, dict[str, Any], dict[str, int]]]:
    groups = units + 1  # of weights: each unit, and the embedding with the head
    both = MICRO_BATCHES * (groups + units)  # forward gathers every group, backward gathers the blocks again
    return [
        (2, {}, {GATHER: both, SCATTER: groups}),  # gradients are reduced once
        (2, {"grad_reduce": "every"}, {GATHER: both, SCATTER: MICRO_BATCHES * groups}),
        # Weights are gathered once for all micro-batches.
        (2, {"reshard_after_forward": False}, {GATHER: groups, SCATTER: groups}),
        # Replicas add their shards of gradients once, however often a group reduces.
        (4, {"dp_replicate": 2}, {GATHER: both, SCATTER: groups, REDUCE: groups}),
        (
            4,
            {"dp_replicate": 2, "grad_reduce": "every"},
            {GATHER: both, SCATTER: MICRO_BATCHES * groups, REDUCE: groups},
        ),
        # Ranks that share no weights add gradients once.
        (2, {"dp_replicate": 2}, {REDUCE: groups}),
        (2, {"dp_replicate": 2, "precision": "bf16"}, {REDUCE: groups}),
    ]


@pytest.mark.parametrize(("world", "settings", "expected"), in_units(LAYERS))
def test_accumulation_says_nothing_twice(world: int, settings: dict[str, Any], expected: dict[str, int]) -> None:
    run_ranks(check, world, ParallelConfig(**settings), expected, 1)


@pytest.mark.parametrize(("world", "settings", "expected"), in_units(2)[::3])
def test_units_of_several_blocks_are_gathered_and_reduced_together(
    world: int, settings: dict[str, Any], expected: dict[str, int]
) -> None:
    run_ranks(check, world, ParallelConfig(**settings), expected, 2)


@pytest.mark.parametrize(
    ("layers", "parameters", "length"),
    [(12, 7_079_424, 4), (28, 15_728_640, 2), (32, 202_383_360, 1), (10, 7_079_424, 4), (1, 64, 1), (6, 64, 6)],
)
def test_a_unit_is_as_many_blocks_as_are_worth_a_collective(layers: int, parameters: int, length: int) -> None:
    assert config.unit_blocks(layers, 2 * parameters, "cuda") == length
    assert config.unit_blocks(layers, 2 * parameters, "cpu") == 1


@pytest.mark.parametrize(
    ("settings", "ranks", "parameters", "device", "sharded"),
    [
        ({}, 8, 124e6, "cuda", False),
        ({}, 8, 8e9, "cuda", True),
        ({}, 2, 124e6, "cpu", True),
        ({}, 1, 124e6, "cuda", False),
        ({}, 1, 8e9, "cuda", True),  # casts block by block
        ({"reshard_after_forward": False}, 1, 8e9, "cuda", False),
        ({"reshard_after_forward": False}, 8, 8e9, "cuda", True),
        ({"dp_replicate": 1}, 8, 124e6, "cuda", True),
        ({"dp_replicate": 4}, 8, 124e6, "cuda", True),
        ({"dp_replicate": 8}, 8, 124e6, "cuda", False),
        ({"dp_replicate": 2}, 2, 124e6, "cpu", False),
        ({"dp_replicate": 8}, 8, 8e9, "cuda", True),
        ({"dp_replicate": 8, "reshard_after_forward": False}, 8, 8e9, "cuda", False),
    ],
)
def test_small_models_are_not_sharded(
    settings: dict[str, Any], ranks: int, parameters: float, device: str, sharded: bool
) -> None:
    parallel = ParallelConfig(**settings)
    assert parallel.shards(ranks, int(parameters), device, precision="bf16") == sharded
    shared = sharded and parallel.replicate_groups(ranks, int(parameters), device) < ranks
    assert parallel.shards(ranks, int(parameters), device, precision="fp32") == shared


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_what_is_costly_is_computed_again_only_if_everything_is(recompute, again, ours, monkeypatch):
    """Products, ours and torch's, and attention."""
    importlib.import_module("fasttrain_kernels.ops.linear_cross_entropy.chunked")  # keeps the matmul it finds
    module = sys.modules["fasttrain_kernels.ops.linear"]
    monkeypatch.setattr(module, "_is_ours", lambda *_: ours)
    monkeypatch.setattr(module, "matmul_out", lambda a, b, out: torch.mm(a, b, out=out))
    model = Decoder(
        ModelConfig(layers=LAYERS, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16), vocab=64, sequence=8
    )
    model.init_weights(0)
    alone = SimpleNamespace(world_size=1, dtype=torch.float32, precision="fp32", device=torch.device("cpu"))
    parallelize(model, ParallelConfig(recompute=recompute), alone, compiled=False)  # type: ignore[arg-type]
    tokens = torch.randint(64, (1, 8))
    with Ops() as called:
        model(tokens, tokens).backward()
    products = called.counts["matmul"] if ours else called.counts["mm"]
    assert products == LAYERS * 4 * (3 + again)
    attention = {name: count for name, count in called.counts.items() if name.startswith("attention_cpp")}
    assert attention == {"attention_cpp": LAYERS * (1 + again), "attention_cpp_backward": LAYERS}


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_one_graph_of_all_blocks_computes_what_the_blocks_do(dropout):
    """Also in evaluation: with dropout, the graph asks whether it trains."""
    section = ModelConfig(
        layers=LAYERS, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16, dropout=dropout, attention_dropout=dropout
    )
    plain, compiled = (Decoder(section, vocab=64, sequence=8) for _ in range(2))
    for model in (plain, compiled):
        model.init_weights(0)
    torch._dynamo.reset()
    _wrap(list(compiled.blocks), "none", regions=True)
    _compile_stack(compiled)
    tokens = torch.randint(64, (2, 8))
    for train in (True, False, True):
        for model in (plain, compiled):
            model.train(train)
        losses = [model(tokens, tokens) for model in (plain, compiled)]
        if train and dropout:
            assert compiled(tokens, tokens) != losses[1]  # other noise
            continue
        torch.testing.assert_close(*losses)
        expected, found = (torch.autograd.grad(loss, list(model.parameters())) for loss, model in zip(
            losses, (plain, compiled), strict=True))  # fmt: skip
        torch.testing.assert_close(found, expected)


def test_torch_2_15_does_not_compile_blocks_that_are_recomputed(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.15.0"))
    cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    compiled, why = should_compile(ParallelConfig(recompute="selective"), cpu, 1e30)
    assert (compiled, why) == (False, "torch 2.15.0 cannot compile blocks that are recomputed")
    with pytest.raises(ValueError, match=r"parallel.compile is on, but torch 2.15.0 cannot .* to auto or off"):
        should_compile(ParallelConfig(recompute="full", compile="on"), cpu, 1e30)
    assert should_compile(ParallelConfig(), cpu, 1e30)[0]
