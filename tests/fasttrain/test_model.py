"""The decoder: Transformers' numbers, initial weights that no sharding changes, one graph for all steps."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fasttrain_kernels as kernels
from fasttrain.config import ModelConfig
from fasttrain.data.batches import IGNORED, longest_document
from fasttrain.distributed.parallelize import _wrap
from fasttrain.flops import flops_per_token, num_parameters
from fasttrain.hf.names import huggingface_config, parts
from fasttrain.model import Decoder
from fasttrain_kernels import cpp
from fasttrain_kernels._registration import kernels_on_cpu
from fasttrain_kernels.ops.attention import capabilities
from fasttrain_kernels.testing import interpret
from tests.fasttrain.hf.names import to_huggingface

VOCAB, SEQUENCE = 97, 24
TINY = ModelConfig(layers=2, hidden=48, heads=4, kv_heads=2, head_dim=16, ffn=80, init_std=0.1)
VARIANTS = {
    "qwen3": TINY,
    "qwen3 untied, a head for each query": replace(TINY, kv_heads=4, tied_head=False),
    "llama": replace(TINY, qk_norm=False, norm_eps=1e-5, rope_theta=500_000.0),
    "llama untied, one kv head": replace(TINY, qk_norm=False, kv_heads=1, tied_head=False),
}


def decoder(model: ModelConfig = TINY, *, seed: int = 0, norms: bool = True, **options: float) -> Decoder:
    made = Decoder(model, vocab=VOCAB, sequence=SEQUENCE, **options)
    made.init_weights(seed)
    if norms:  # weights of norms that no test can mistake for one another
        for parameter in made.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made


def batch(B: int = 3) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (B, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = IGNORED
    return tokens[:, :-1], targets


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_flash_attn_gets_the_longest_document(monkeypatch):
    """Its grid is (blocks of 128 queries in max_seqlen) x documents x heads: B * T tokens are B times too many."""
    from tests.kernels.attention.test_vendors import Package  # not where torchrun starts this file

    B, T, ends = 4, 1024, [0, 700, 1024, 2048, 2049, 3072, 4096]
    stub = Package(returns_lse=False)
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    monkeypatch.setattr(capabilities, "choose", lambda request, backend: "fa2")
    model = Decoder(TINY, vocab=VOCAB, sequence=T)
    model.init_weights(0)
    cu_seqlens, tokens = torch.tensor(ends, dtype=torch.int32), torch.zeros(B, T, dtype=torch.int64)
    model(tokens, tokens, cu_seqlens, None, longest_document(cu_seqlens, T))
    programs = -(-stub.seen["max_seqlen_q"] // 128) * (len(ends) - 1) * TINY.heads
    assert programs == 8 * 6 * 4
    model(tokens, tokens, cu_seqlens)
    assert -(-stub.seen["max_seqlen_q"] // 128) * (len(ends) - 1) * TINY.heads == B * programs


@pytest.mark.parametrize(("backend", "deterministic"), [("blocked", True), ("sdpa", False)])
def test_the_settings_of_attention_reach_it(backend, deterministic, monkeypatch):
    seen = []
    choose = capabilities.choose
    monkeypatch.setattr(
        capabilities, "choose", lambda request, asked: seen.append((asked, request)) or choose(request, asked)
    )
    model = decoder(replace(TINY, attention_backend=backend, deterministic=deterministic))
    model(*batch())
    assert [(asked, request.repeats) for asked, request in seen] == [(backend, deterministic)] * TINY.layers


def test_attention_backend_names_every_backend():
    assert get_args(get_type_hints(ModelConfig)["attention_backend"]) == ("auto", *capabilities.TABLE)


def assert_same_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """But for float32's rounding, which is relative to a whole gradient: its elements are sums that may cancel."""
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (got[name] - gradient).norm() / gradient.norm()
        assert error < 4e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_gradients_are_those_of_transformers(name):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    model = VARIANTS[name]
    ours = decoder(model)
    kind, make = (Qwen3Config, Qwen3ForCausalLM) if model.qk_norm else (LlamaConfig, LlamaForCausalLM)
    theirs = make(kind(**huggingface_config(model, vocab=VOCAB, sequence=SEQUENCE)))
    missing, unexpected = theirs.load_state_dict(to_huggingface(ours.state_dict(), model), strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if model.tied_head else [])

    tokens, targets = batch()
    logits = theirs(input_ids=tokens).logits
    torch.testing.assert_close(ours.logits(tokens), logits, rtol=1e-5, atol=1e-5)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    expected.backward()
    loss = ours(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same_gradients(to_huggingface(gradients(ours), model), gradients(theirs))


@pytest.mark.parametrize("name", VARIANTS)
def test_conversion_there_and_back_changes_nothing(name):
    state = decoder(VARIANTS[name]).state_dict()
    theirs = to_huggingface(state, VARIANTS[name])
    packed = parts(VARIANTS[name], {ours: len(tensor) for ours, tensor in state.items()})
    back = {ours: torch.cat([theirs[part] for part in rows]) for ours, rows in packed.items()}
    assert len(theirs) == sum(map(len, packed.values()))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_packed_documents_are_documents_one_by_one():
    model, (tokens, targets) = decoder(), batch(B=2)
    ends = [0, 5, 6, SEQUENCE, SEQUENCE + 13, 2 * SEQUENCE]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)]).view_as(tokens)
    flat, flat_targets = tokens.flatten(), targets.flatten()
    packed = model(tokens, targets, cu_seqlens, positions)
    packed.backward()
    got = gradients(model)
    model.zero_grad()
    single = [model(flat[None, a:b], flat_targets[None, a:b]) for a, b in pairwise(ends)]
    total = torch.stack(single).sum()
    total.backward()
    torch.testing.assert_close(packed, total)
    assert_same_gradients(got, gradients(model))


def test_stats_and_z_loss():
    model, (tokens, targets) = decoder(z_loss=1e-2), batch()
    stats = model.stats(tokens, targets)
    logits = model.logits(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(stats.loss.flatten(), expected)
    torch.testing.assert_close(model(tokens, targets), (stats.loss + 1e-2 * stats.lse**2).sum())


@pytest.mark.parametrize("name", VARIANTS)
def test_closed_forms_count_what_is_there(name, monkeypatch):
    model = VARIANTS[name]
    made = decoder(model)
    count = num_parameters(model, VOCAB)
    assert count.total == sum(p.numel() for p in made.parameters())
    assert count.embedding == made.embedding.weight.numel()
    assert count.blocks == sum(p.numel() for p in made.blocks.parameters())
    assert count.non_embedding == count.blocks + model.hidden
    monkeypatch.setattr(cpp, "missing", lambda: "torch counts its own ops only")
    monkeypatch.setattr(cpp, "faster_matmuls", lambda: None)
    tokens, _ = batch(B=1)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        made.logits(tokens).sum().backward()
    assert counted.get_total_flops() == SEQUENCE * flops_per_token(model, VOCAB, SEQUENCE)


def test_rows_of_packed_matrices_are_known_to_muon():
    for block in decoder().blocks:
        for name, rows in block.muon_splits.items():  # type: ignore[operator, union-attr]
            assert sum(rows) == block.get_parameter(name).shape[0]


def test_initial_weights():
    wide = ModelConfig(layers=8, hidden=256, heads=4, kv_heads=2, head_dim=32, ffn=320, tied_head=False)
    with torch.device("meta"):
        model = Decoder(wide, vocab=1000, sequence=16)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    model.init_weights(3)
    for name, parameter in model.state_dict().items():
        if parameter.dim() == 1:
            assert (parameter == 1).all()
            continue
        std = wide.init_std / 4 if name.endswith(("attention_out.weight", "down.weight")) else wide.init_std
        assert parameter.abs().max() <= 3 * std
        assert parameter.std() == pytest.approx(0.987 * std, rel=0.03)  # 0.987: cut at three
        assert abs(parameter.mean()) < 0.02 * std
        assert parameter.unique(dim=0).shape == parameter.shape  # no rows drawn from one seed
    torch.testing.assert_close(model.cos, Decoder(wide, vocab=1000, sequence=16).cos)


def test_initial_weights_depend_on_the_seed_and_on_nothing_else():
    first = decoder(norms=False).state_dict()
    torch.manual_seed(7)
    torch.testing.assert_close(decoder(norms=False).state_dict(), first, rtol=0, atol=0)
    assert not torch.equal(decoder(seed=1).embedding.weight, first["embedding.weight"])
    assert not torch.equal(first["blocks.0.qkv.weight"], first["blocks.1.qkv.weight"])


def test_two_fsdp_ranks_start_and_step_as_a_single_process():
    """Each rank materialises its shard only; rows do not divide evenly. FSDP gathers for loss and logits alike."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "tests.fasttrain.test_model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]


def fsdp_rank() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo")
    for model in (TINY, replace(TINY, tied_head=False)):
        alone = decoder(model, norms=False)
        with torch.device("meta"):
            sharded = Decoder(model, vocab=VOCAB, sequence=SEQUENCE)
        for block in sharded.blocks:
            fully_shard(block)
        if not model.tied_head:
            fully_shard(sharded.head)
            register_fsdp_forward_method(sharded.head, "logits")
        fully_shard(sharded)
        for module in sharded.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        register_fsdp_forward_method(sharded, "logits")
        sharded.to_empty(device="cpu")
        sharded.init_weights(0)
        for (name, whole), part in zip(alone.named_parameters(), sharded.parameters(), strict=True):
            assert isinstance(part, DTensor), name
            assert part.to_local().shape[0] < whole.shape[0], name
            torch.testing.assert_close(part.full_tensor(), whole.detach(), rtol=0, atol=0)

        tokens, targets = batch(B=2)
        loss = alone(tokens, targets)
        loss.backward()
        mine = slice(dist.get_rank(), dist.get_rank() + 1)
        part_loss = sharded(tokens[mine], targets[mine])
        part_loss.backward()
        total = part_loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, loss.detach())
        for whole, part in zip(alone.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(part.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
        with torch.no_grad():
            torch.testing.assert_close(sharded.logits(tokens), alone.logits(tokens))
    dist.destroy_process_group()


@pytest.mark.parametrize("documents", [False, True])
def test_blocks_compile_to_one_graph_for_all_steps(documents):
    eager, compiled = decoder(), decoder()
    compiled.load_state_dict(eager.state_dict())
    torch._dynamo.reset()
    for block in compiled.blocks:
        block.compile(fullgraph=True)
    tokens, targets = batch(B=2)
    ends = [[0, 5, SEQUENCE, 2 * SEQUENCE], [0, SEQUENCE, 2 * SEQUENCE], [0, 1, 2, SEQUENCE, 30, 2 * SEQUENCE]]
    positions = torch.arange(SEQUENCE).expand(2, -1) if documents else None
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(3):
            cu_seqlens = torch.tensor(ends[step], dtype=torch.int32) if documents else None
            losses = [model(tokens, targets, cu_seqlens, positions) for model in (eager, compiled)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(losses[1], losses[0])
    assert_same_gradients(gradients(compiled), gradients(eager))


@pytest.mark.parametrize("kernels", [False, True])
def test_a_compiler_sees_torch_operations_on_cpus_but_for_the_costly_ones_and_our_ops_on_gpus(kernels, monkeypatch):
    monkeypatch.setattr(cpp, "faster_matmuls", lambda: (96, 1 << 25))
    monkeypatch.setattr(sys.modules["fasttrain_kernels.ops.linear"], "_is_ours", lambda *_: True)  # at any size
    ops: set[str] = set()

    class Seen(Exception):
        pass

    def backend(graph, _):
        graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        targets = [str(node.target) for inner in graphs for node in inner.nodes]
        ops.update(target.split(".")[1] for target in targets if target.startswith("fasttrain."))
        raise Seen

    torch._dynamo.reset()
    model, x = decoder(), torch.randn(1, SEQUENCE, TINY.hidden)
    block = torch.compile(model.blocks[0], backend=backend, fullgraph=True)
    with kernels_on_cpu() if kernels else torch.enable_grad(), pytest.raises(Exception, match="Seen"):
        block(x, x, model.cos, model.sin)
    on_gpus = {"qk_norm_rope", "attention", "add_rms_norm", "swiglu_packed", "swiglu_packed_backward_again"}
    assert ops == (on_gpus if kernels else {"attention_cpp", "matmul"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_kernels_that_do_not_save_swiglu_s_output_change_no_bit(recompute, compiled, dtype, monkeypatch):
    block, x = decoder().blocks[0].to(dtype), torch.randn(1, 8, TINY.hidden).to(dtype)
    table = kernels.rotary_table(8, TINY.head_dim, theta=1e4)

    def run():
        torch._dynamo.reset()
        _wrap([block], recompute, regions=False)
        forward = block.forward
        forward = torch.compile(forward, backend="aot_eager", fullgraph=True) if compiled else forward
        leaf = x.clone().requires_grad_()
        with interpret():
            outputs = forward(leaf, x, *table)
            return [*outputs, *torch.autograd.grad(outputs, [leaf, *block.parameters()], [torch.ones_like(x), x])]

    ours = run()
    monkeypatch.setattr(kernels, "swiglu_linear", lambda packed, weight: kernels.linear(kernels.swiglu(packed), weight))
    torch.testing.assert_close(ours, run(), rtol=0, atol=0)


@pytest.mark.parametrize("option", ["dropout", "attention_dropout"])
def test_dropout_acts_in_training_only(option):
    changed: dict[str, Any] = {option: 0.5}
    plain, model = decoder(), decoder(replace(TINY, **changed))
    model.load_state_dict(plain.state_dict())
    tokens, targets = batch()
    loss = model(tokens, targets)
    loss.backward()
    assert not torch.allclose(loss, plain(tokens, targets))
    torch.testing.assert_close(model.eval()(tokens, targets), plain(tokens, targets))


def test_attention_dropout_within_documents_is_an_error():
    model, (tokens, targets) = decoder(replace(TINY, attention_dropout=0.1)), batch(B=1)
    cu_seqlens = torch.tensor([0, 5, SEQUENCE], dtype=torch.int32)
    with pytest.raises(ValueError, match="attention_dropout 0.1 cannot be combined .* set data.document_mask to false"):
        model(tokens, targets, cu_seqlens)
    model.eval()(tokens, targets, cu_seqlens)


def test_a_rotary_table_that_fsdp_has_rounded_is_an_error():
    model, x = decoder(), torch.randn(1, SEQUENCE, TINY.hidden)
    with pytest.raises(TypeError, match=r"came as torch.bfloat16 .*cast_forward_inputs=False"):
        model.blocks[0](x, x, model.cos.bfloat16(), model.sin.bfloat16())


if __name__ == "__main__":
    fsdp_rank()
    os._exit(0)  # at torch's exit, one process in eight is aborted: a thread of its own outlives main
