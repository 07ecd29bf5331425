"""The null GPU, where it was built (make nullgpu): what a training loop asks of a device is counted."""

import json
import subprocess
import sys

import pytest

from bench.nullgpu.__main__ import ENVIRONMENT

pytestmark = pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="there is no null GPU (make nullgpu)")

LOOP = """
import torch
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(8, 64).pin_memory()
for step in range(8):
    loss = model(data.to("cuda", non_blocking=True)).square().mean()
    loss.backward()
    optimizer.step()
    if WAIT: loss.item()
"""


@pytest.mark.parametrize("wait", [False, True])
def test_launches_copies_and_waits_of_any_loop(tmp_path, wait):
    program, figures = tmp_path / "loop.py", tmp_path / "figures.json"
    program.write_text(f"WAIT = {wait}\n{LOOP}")
    command = [sys.executable, "-m", "bench.nullgpu", "--waits", "--json", str(figures), str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counted = json.loads(figures.read_text())
    last = counted["counts"][-1]
    assert len(counted["seconds"]) == 7
    assert last["launches"] > 4
    assert last["copies h2d"] == 1
    assert "copies h2d pageable" not in last
    waits = sum(n for name, n in last.items() if name.startswith("sync:"))
    assert waits == int(wait)
    assert ("loop.py" in done.stderr.partition("waits:")[2]) == wait


# Every op by Triton's own launches, by ours, and repeated from recordings: the device has to be asked for the same, at
# the same addresses, for the allocator has given the same memory back in between.
LAUNCHES = """
import torch, triton
import fasttrain_kernels as ft
from fasttrain_kernels import _launch, _recorded
from triton.backends.nvidia.driver import CudaLauncher

seen, call = [], CudaLauncher.__call__
def record(self, x, y, z, stream, function, metadata, extra, enter, exit, *args):
    values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
    seen.append((x, y, z, stream, function, metadata, values))
    return call(self, x, y, z, stream, function, metadata, extra, enter, exit, *args)
CudaLauncher.__call__ = record

repeated, repeat = [], _recorded._Recording.repeat
def count(self, addresses, device):
    repeated.append(len(self.launches))
    return repeat(self, addresses, device)
_recorded._Recording.repeat = count

def tensor(*shape, dtype=torch.bfloat16): return torch.zeros(*shape, device="cuda", dtype=dtype, requires_grad=True)
def differentiate(out): out.backward(out.detach(), retain_graph=True)
def ops(tokens, odd):
    x, w = tensor(2, tokens, 256), tensor(256)
    for out in (ft.rms_norm(x, w), *ft.add_rms_norm(x, x, w), ft.swiglu(x)): differentiate(out)
    packed = tensor(2, tokens, 8 * 32 + odd)[..., odd:]
    q, k, v = packed.unflatten(-1, (8, 32)).split((4, 2, 2), dim=-2)
    cos, sin = (table.cuda() for table in ft.rotary_table(tokens, 32))
    q, k = ft.qk_norm_rope(q, k, tensor(32), tensor(32), cos, sin)
    cu = torch.tensor([0, tokens // 2, 2 * tokens], dtype=torch.int32, device="cuda")
    for bounds in ({}, dict(cu_seqlens=cu)): differentiate(ft.attention(q, k, v, **bounds, backend="triton"))
    ft.linear_cross_entropy(x, tensor(1000, 256), torch.zeros(2, tokens, dtype=torch.int64, device="cuda")).backward()

def launches(simulated):
    _launch._registration.is_simulated = lambda: simulated  # then launches are Triton's own
    seen.clear(); repeated.clear()
    for tokens, odd in ((128, 0), (48, 0), (128, 1), (1, 0), (128, 0)): ops(tokens, odd)
    return list(seen)

for _ in range(2): launches(True)  # compiled; the allocator has all that it needs
theirs = launches(True)
for _ in range(2): launches(False)  # remembered, recorded
ours = launches(False)
print(len(theirs), theirs == ours, len(_launch._compiled), sum(repeated))
"""


def test_remembered_launches_ask_for_what_triton_asks_for(tmp_path):
    program = tmp_path / "launches.py"
    program.write_text(LAUNCHES)
    done = subprocess.run([sys.executable, "-m", "bench.nullgpu", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, equal, kept, repeated = done.stdout.split()
    assert int(count) > 60
    assert equal == "True"
    assert 12 < int(kept) < int(count)
    assert int(repeated) > int(count) * 0.8  # all but those of the loss, which multiplies in between


def test_a_device_address_kills_the_host_and_memory_ends(tmp_path):
    program = tmp_path / "full.py"
    program.write_text(
        "import torch\n"
        "try: torch.empty(2**40, device='cuda', dtype=torch.uint8)\n"
        "except torch.OutOfMemoryError: print('full')\n"
        "import ctypes; ctypes.string_at(torch.ones(1, device='cuda').data_ptr(), 1)\n"
    )
    done = subprocess.run([sys.executable, "-m", "bench.nullgpu", str(program)], capture_output=True, text=True)
    assert done.stdout == "full\n"
    assert done.returncode == -11


COMPILED = """
import torch
import fasttrain_kernels as ft
from bench.nullgpu.program import Device

device = Device()
def tensor(*shape): return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
x, w, head = tensor(2, 64, 256), tensor(256), tensor(32)
cos, sin = (table.cuda() for table in ft.rotary_table(64, 32))
def formula():
    normed, residual = ft.add_rms_norm(ft.rms_norm(x, w), x, w)
    q, k = ft.qk_norm_rope(*normed.unflatten(-1, (8, 32)).split((4, 4), dim=-2), head, head, cos, sin)
    return ft.swiglu(torch.cat([q, k], dim=-2).flatten(-2)).sum() + residual.sum()

def kernels(function):
    for _ in range(3): function().backward()
    before = device.counters()
    function().backward()
    after = device.counters()
    return {name: after[name] - before.get(name, 0) for name in after if name.startswith("kernel:triton _")}

def calls(function):
    with torch.profiler.profile() as profile: function().backward()
    return sum(e.count for e in profile.key_averages() if e.key.startswith("fasttrain::"))

eager, compiled = formula, torch.compile(formula, fullgraph=True)
assert kernels(eager) == kernels(compiled) != {}, (kernels(eager), kernels(compiled))
print(calls(eager), calls(compiled))
"""


def test_a_compiled_graph_launches_the_kernels_of_ops_itself(tmp_path):
    """The same kernels as often as in eager mode, and no call of an op."""
    program = tmp_path / "compiled.py"
    program.write_text(COMPILED)
    command = [sys.executable, "-m", "bench.nullgpu", "--kernels", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["8", "0"]


CACHED = """
import gc, torch
from torch._functorch import config as functorch_config
import fasttrain_kernels as ft

functorch_config.autograd_cache_allow_custom_autograd_functions = True

@torch.compiler.nested_compile_region
def block(x, w, down): return ft.swiglu_linear(torch.cat([ft.rms_norm(x, w)] * 2, dim=-1), down)

def model(x, w, down): return block(block(x, w, down), w, down).sum()

def held():
    torch._dynamo.reset()
    sizes = (512, 256), (256,), (256, 256)
    given = [torch.zeros(*size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    before = torch.cuda.memory_allocated()
    torch.compile(model, fullgraph=True)(*given).backward()
    for tensor in given: tensor.grad = None
    gc.collect()
    return torch.cuda.memory_allocated() - before

made, found = held(), held()
assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1
print(made, found)
"""


def test_a_graph_from_torchs_cache_holds_no_memory(tmp_path, monkeypatch):
    program = tmp_path / "cached.py"
    program.write_text(CACHED)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-m", "bench.nullgpu", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made, found = map(int, done.stdout.split())
    assert found <= made
