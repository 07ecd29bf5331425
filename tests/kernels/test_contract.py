"""Properties of all ops: torch.compile, checkpointing, autocast; no sync, no patching, no import effects."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from triton.runtime.jit import JITFunction, KernelInterface

import fasttrain_kernels as ft
from fasttrain_kernels.testing import interpret
from fasttrain_kernels.testing.specs import SPECS

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN = 97, 32, 4, 2, 16, 48


class Block(nn.Module):
    """A transformer block that uses every op but the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(WIDTH))
        self.ffn_norm_weight = nn.Parameter(torch.ones(WIDTH))
        self.q_weight, self.k_weight = nn.Parameter(torch.ones(HEAD_DIM)), nn.Parameter(torch.ones(HEAD_DIM))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:  # (B, T, C)
        heads = self.qkv(ft.rms_norm(x, self.norm_weight)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
        q, k = ft.qk_norm_rope(q, k, self.q_weight, self.k_weight, cos, sin)
        attended = self.out(ft.attention(q, k, v, cu_seqlens=cu_seqlens).flatten(-2))
        normed, x = ft.add_rms_norm(attended, x, self.ffn_norm_weight)
        return x + self.down(ft.swiglu(self.gate_up(normed)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.block = Block()
        self.checkpointed = False

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        cos, sin = ft.rotary_table(tokens.shape[1], HEAD_DIM)
        x, inputs = self.embedding(tokens), (cos, sin, cu_seqlens)
        x = checkpoint(self.block, x, *inputs, use_reentrant=False) if self.checkpointed else self.block(x, *inputs)
        return ft.linear_cross_entropy(x, self.embedding.weight, tokens.roll(-1, 1), z_loss=1e-4)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(VOCAB, (2, length), generator=generator)
    return tokens, torch.tensor([0, 3, length, 2 * length], dtype=torch.int32)


def loss_and_gradients(model: Any, length: int = 12) -> list[Tensor]:
    model.zero_grad()
    loss = model(*batch(length))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_a_model_of_all_ops_compiles_to_one_graph_and_does_not_recompile(model):
    expected = [loss_and_gradients(model, length) for length in (12, 20, 33)]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length, tensors in zip((12, 20, 33), expected, strict=True):
            torch.testing.assert_close(loss_and_gradients(compiled, length), tensors)


def test_the_ops_themselves_compile_to_one_graph_and_do_not_recompile(model):
    """On a CPU the compiler sees the references of streaming ops, to fuse them; here it sees the ops, as on a GPU."""
    torch._dynamo.reset()
    with interpret() as launches, torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        for length in (12, 20):
            got = loss_and_gradients(compiled, length)
            compiled_launches = [launch.kernel for launch in launches]
            launches.clear()
            torch.testing.assert_close(got, loss_and_gradients(model, length), rtol=1e-5, atol=1e-6)
            assert sorted(compiled_launches) == sorted(launch.kernel for launch in launches)
            launches.clear()


def test_a_model_of_all_ops_is_the_same_in_triton_and_on_the_cpu(model):
    expected = loss_and_gradients(model)
    with interpret():
        torch.testing.assert_close(loss_and_gradients(model), expected, rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_changes_nothing(model):
    expected = loss_and_gradients(model)
    model.checkpointed = True
    torch.testing.assert_close(loss_and_gradients(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_autocast_gives_low_precision_activations_and_full_precision_gradients(model, implementation):
    expected = loss_and_gradients(model)
    with torch.autocast("cpu", torch.bfloat16), interpret() if implementation == "triton" else torch.enable_grad():
        got = loss_and_gradients(model)
    assert all(g.dtype == torch.float32 for g in got)
    assert not torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0], rtol=0.02, atol=0)
    for g, e in zip(got[1:], expected[1:], strict=True):
        assert (g - e).norm() < 0.05 * e.norm()


def test_trap_7_no_launcher_waits_for_the_device(model):
    with interpret(), torch.autograd.profiler.profile() as profile:
        loss_and_gradients(model)
    called = {event.name for event in profile.function_events}
    assert any("fasttrain::" in name for name in called)
    # On a GPU, each of these makes the host wait.
    assert not called & {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}


def test_trap_10_nothing_is_autotuned():
    """Launch parameters are tables: a tuner may be keyed wrongly, or measure with a warm cache."""
    names = [module.name for module in pkgutil.walk_packages(ft.__path__, "fasttrain_kernels.")]
    kernels = {
        name: value
        for module in names
        if ".testing" not in module
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, KernelInterface)
    }
    assert len(kernels) > 8
    assert [name for name, kernel in kernels.items() if not isinstance(kernel, JITFunction)] == []


def all_kernels() -> dict[str, JITFunction]:
    names = [module.name for module in pkgutil.walk_packages(ft.__path__, "fasttrain_kernels.")]
    modules = [importlib.import_module(name) for name in names if ".testing" not in name]
    return {name: value for m in modules for name, value in vars(m).items() if isinstance(value, JITFunction)}


@pytest.mark.parametrize("kernel", all_kernels().values(), ids=all_kernels())
def test_kernels_have_few_arguments_or_say_why(kernel):
    """A reason stands above: `# 31 arguments: ...`."""
    count = len(kernel.params)
    source = Path(kernel.fn.__code__.co_filename).read_text("utf-8")
    above = re.search(rf"# (\d+) arguments: .*\n(?:#.*\n)*@triton\.jit.*\ndef {kernel.fn.__name__}\(", source)
    assert (int(above[1]) if above else 0) == (count if count > 24 else 0), f"{kernel.fn.__name__} has {count}"


@pytest.mark.parametrize("kernel", all_kernels().values(), ids=all_kernels())
def test_capitals_are_for_constants(kernel):
    assert [p.name for p in kernel.params if p.is_constexpr != p.name.isupper()] == []


OPS = Path(ft.__path__[0]) / "ops"


@pytest.mark.parametrize("file", [*OPS.glob("*.py"), *OPS.glob("*/op.py")], ids=lambda f: str(f.relative_to(OPS)))
def test_every_op_has_the_same_slots(file):
    """What is registered stands in the same order, under the same names; folders have a file for each slot."""
    tree = ast.parse(file.read_text("utf-8"))
    slots = {"setup_context": "_setup_context", "backward": "gradient", "cpu": "", "triton": "", "fake": ""}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register":
            for keyword in node.keywords:
                if isinstance(keyword.value, ast.Name) and keyword.arg in slots:
                    assert keyword.value.id.endswith(slots[keyword.arg]), keyword.value.id
    if file.name == "op.py":
        assert (file.parent / "reference.py").exists()
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    order = [f"{file.stem}_reference", "_forward", "_backward", "_forward_cpu", "_backward_cpu", "_setup_context"]
    if order[0] in names:  # a small op: one file, top to bottom
        places = [names.index(name) for name in [*order, "_gradient", file.stem]]
        assert places == sorted(places)


def test_testing_is_an_attribute_of_the_package():
    script = """
import torch, fasttrain_kernels
with fasttrain_kernels.testing.interpret() as launches:
    fasttrain_kernels.swiglu(torch.randn(2, 16))
assert [launch.kernel for launch in launches] == ["_swiglu_fwd_kernel"]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


SMALL = [spec for spec in SPECS if spec.small]


@pytest.mark.parametrize("spec", SMALL, ids=[spec.title for spec in SMALL])
def test_every_op_compiles_whole_to_the_same_numbers(spec):
    """The op itself, in the interpreter, as a GPU's graph has it; outputs have the layout that its fake promises."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    inputs = spec.inputs(spec.small, lambda *shape: torch.randn(shape, generator=generator).requires_grad_())
    wanted = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
    results = []
    with interpret():
        for function in (spec.function, torch.compile(spec.function, fullgraph=True, backend="aot_eager")):
            outputs = function(**inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            assert all(x.is_contiguous() for x in outputs)
            results.append([*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), wanted)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("spec", SMALL, ids=[spec.title for spec in SMALL])
def test_streaming_ops_are_their_reference_to_a_cpus_compiler(spec):
    torch.compiler.reset()
    names: list[str] = []

    def record(module, inputs):
        names.extend(str(node.target) for node in module.graph.nodes)
        return module

    inputs = spec.inputs(spec.small, torch.randn)
    torch.compile(spec.function, fullgraph=True, backend=record)(**inputs)
    assert any("fasttrain" in name for name in names) != spec.streaming or spec.name == "swiglu_linear"


def test_every_public_name_exists():
    assert all(hasattr(ft, name) for name in ft.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'softmax'"):
        ft.softmax  # noqa: B018
