"""Stream capture on the null GPU: what a capture cannot hold is CUDA's error, and a launched graph counts its nodes."""

import json
import subprocess
import sys

import pytest

from bench.nullgpu.__main__ import ENVIRONMENT

pytestmark = pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="there is no null GPU (make nullgpu)")

# Each case captures, makes a call, and gives its error and the one of the end of the capture.
CALLS = """
import ctypes, json, threading
from ctypes import byref, c_int, c_size_t, c_void_p
cuda, driver = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libcuda.so.1")
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
LEGACY = c_void_p(0)

def made(function, *args):
    out = c_void_p()
    assert function(byref(out), *args) == 0
    return out

def stream(blocking=False): return made(cuda.cudaStreamCreateWithFlags, 0 if blocking else 1)
def event(): return made(cuda.cudaEventCreate)
def pinned(): return made(cuda.cudaHostAlloc, c_size_t(64), 0)
device, page = made(cuda.cudaMalloc, c_size_t(1 << 20)), pinned()
pageable = ctypes.create_string_buffer(64)

def end(s):
    graph = c_void_p(1)
    status = cuda.cudaStreamEndCapture(s, byref(graph))
    assert bool(graph) == (status == 0)
    return status

def captured(call, mode=GLOBAL, blocking=False):
    s = stream(blocking)
    assert cuda.cudaStreamBeginCapture(s, mode) == 0
    status = call(s)
    return status, end(s)

def elsewhere(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start(); thread.join()
    return answers[0]

def copy(s, to, source, n=64): return cuda.cudaMemcpyAsync(to, source, c_size_t(n), 4, s)
def fill(s): return cuda.cudaMemsetAsync(device, 0, c_size_t(64), s)
def malloc(): return cuda.cudaMalloc(byref(c_void_p()), c_size_t(64))
def record(s, e): return cuda.cudaEventRecord(e, s)
def wait(s, e, flags=0): return cuda.cudaStreamWaitEvent(s, e, flags)
def relaxed(call):
    mode = c_int(RELAXED)
    cuda.cudaThreadExchangeStreamCaptureMode(byref(mode))
    status = call()
    cuda.cudaThreadExchangeStreamCaptureMode(byref(mode))
    assert mode.value == RELAXED
    return status
def recorded(s=None):
    e = event()
    assert record(s or stream(), e) == 0
    return e
def of_capture(s, call):
    e = event()
    assert record(s, e) == 0
    return call(e)
def forked(s, join):
    other, before, after = stream(), event(), event()
    status = record(s, before) or wait(other, before) or fill(other)
    return status or join and (record(other, after) or wait(s, after))
def from_fork(s):
    other, e = stream(), event()
    assert record(s, e) == wait(other, e) == 0
    return end(other)
def merged(s):
    other, e = stream(), event()
    assert cuda.cudaStreamBeginCapture(other, GLOBAL) == record(other, e) == 0
    status = wait(s, e)
    assert end(other) == 901
    return status
def after_an_error(s):
    cuda.cudaStreamSynchronize(s)
    return fill(s)
def event_of_the_past():
    s, e = stream(), event()
    cuda.cudaStreamBeginCapture(s, GLOBAL); record(s, e); end(s)
    return e
def status_of(s):
    status = c_int()
    error = cuda.cudaStreamIsCapturing(s, byref(status))
    return error or status.value
past = event_of_the_past()

print(json.dumps({
    "fill": captured(fill),
    "pinned copy": captured(lambda s: copy(s, device, page)),
    "pageable copy to the device": captured(lambda s: copy(s, device, pageable)),
    "pageable copy from the device": captured(lambda s: copy(s, pageable, device)),
    "synchronous copy": captured(lambda s: cuda.cudaMemcpy(device, page, c_size_t(64), 4)),
    "synchronous copy, relaxed": captured(lambda s: cuda.cudaMemcpy(device, page, c_size_t(64), 4), RELAXED),
    "synchronous copy, relaxed, blocking":
        captured(lambda s: cuda.cudaMemcpy(device, page, c_size_t(64), 4), RELAXED, blocking=True),
    "malloc": captured(lambda s: malloc()),
    "malloc, thread-local": captured(lambda s: malloc(), THREAD_LOCAL),
    "malloc, relaxed": captured(lambda s: malloc(), RELAXED),
    "malloc, relaxed thread": captured(lambda s: relaxed(malloc)),
    "malloc elsewhere": captured(lambda s: elsewhere(malloc)),
    "malloc elsewhere, relaxed thread": captured(lambda s: elsewhere(lambda: relaxed(malloc))),
    "malloc elsewhere, thread-local": captured(lambda s: elsewhere(malloc), THREAD_LOCAL),
    "free": captured(lambda s: cuda.cudaFree(device)),
    "pinned malloc": captured(lambda s: cuda.cudaHostAlloc(byref(c_void_p()), c_size_t(64), 0)),
    "module": captured(lambda s: driver.cuModuleLoadData(byref(c_void_p()), None)),
    "stream synchronize": captured(lambda s: cuda.cudaStreamSynchronize(s)),
    "stream synchronize, relaxed": captured(lambda s: cuda.cudaStreamSynchronize(s), RELAXED),
    "stream query": captured(lambda s: cuda.cudaStreamQuery(s)),
    "device synchronize": captured(lambda s: cuda.cudaDeviceSynchronize()),
    "device synchronize elsewhere, relaxed":
        captured(lambda s: elsewhere(cuda.cudaDeviceSynchronize), RELAXED),
    "callback": captured(lambda s: cuda.cudaStreamAddCallback(s, None, None, 0)),
    "event query": captured(lambda s: of_capture(s, cuda.cudaEventQuery)),
    "event query, relaxed": captured(lambda s: of_capture(s, cuda.cudaEventQuery), RELAXED),
    "event synchronize": captured(lambda s: of_capture(s, cuda.cudaEventSynchronize)),
    "event of before": captured(lambda s, e=recorded(): cuda.cudaEventQuery(e)),
    "event of before elsewhere": captured(lambda s, e=recorded(): elsewhere(lambda: cuda.cudaEventQuery(e))),
    "event of before, relaxed": captured(lambda s, e=recorded(): relaxed(lambda: cuda.cudaEventQuery(e))),
    "event of a past capture": (cuda.cudaEventQuery(past), wait(stream(), past)),
    "wait for uncaptured work": captured(lambda s, e=recorded(): wait(s, e)),
    "external wait for uncaptured work": captured(lambda s, e=recorded(): wait(s, e, 1)),
    "legacy stream": captured(lambda s: fill(LEGACY)),
    "legacy stream, blocking": captured(lambda s: fill(LEGACY), blocking=True),
    "legacy stream asks, blocking": captured(lambda s: status_of(LEGACY), blocking=True),
    "legacy stream waits": captured(lambda s: of_capture(s, lambda e: wait(LEGACY, e))),
    "joined fork": captured(lambda s: forked(s, True)),
    "unjoined fork": captured(lambda s: forked(s, False)),
    "end of a fork": captured(from_fork),
    "two captures": captured(merged),
    "end elsewhere": captured(lambda s: elsewhere(lambda: end(s))),
    "end elsewhere, relaxed": captured(lambda s: elsewhere(lambda: end(s)), RELAXED),
    "begin twice": captured(lambda s: cuda.cudaStreamBeginCapture(s, GLOBAL)),
    "begin on the legacy stream": (cuda.cudaStreamBeginCapture(LEGACY, GLOBAL), 0),
    "end without a begin": (end(stream()), 0),
    "after an error": captured(after_an_error),
    "status": (captured(status_of)[0], captured(lambda s: [malloc(), status_of(s)][1])[0]),
}))
"""

ANSWERS = {
    "fill": (0, 0),
    "pinned copy": (0, 0),
    "pageable copy to the device": (900, 901),
    "pageable copy from the device": (900, 901),
    "synchronous copy": (900, 901),
    "synchronous copy, relaxed": (0, 0),
    "synchronous copy, relaxed, blocking": (906, 901),
    "malloc": (900, 901),
    "malloc, thread-local": (900, 901),
    "malloc, relaxed": (0, 0),
    "malloc, relaxed thread": (0, 0),
    "malloc elsewhere": (900, 901),
    "malloc elsewhere, relaxed thread": (0, 0),
    "malloc elsewhere, thread-local": (0, 0),
    "free": (900, 901),
    "pinned malloc": (900, 901),
    "module": (900, 901),
    "stream synchronize": (900, 901),
    "stream synchronize, relaxed": (900, 901),
    "stream query": (900, 901),
    "device synchronize": (900, 901),
    "device synchronize elsewhere, relaxed": (900, 901),
    "callback": (900, 901),
    "event query": (907, 901),
    "event query, relaxed": (907, 901),
    "event synchronize": (907, 901),
    "event of before": (900, 901),
    "event of before elsewhere": (900, 901),
    "event of before, relaxed": (0, 0),
    "event of a past capture": (907, 907),
    "wait for uncaptured work": (905, 901),
    "external wait for uncaptured work": (0, 0),
    "legacy stream": (0, 0),
    "legacy stream, blocking": (906, 901),
    "legacy stream asks, blocking": (906, 0),
    "legacy stream waits": (906, 901),
    "joined fork": (0, 0),
    "unjoined fork": (0, 904),
    "end of a fork": (903, 901),
    "two captures": (902, 901),
    "end elsewhere": (908, 0),
    "end elsewhere, relaxed": (0, 401),
    "begin twice": (401, 0),
    "begin on the legacy stream": (900, 0),
    "end without a begin": (401, 0),
    "after an error": (901, 901),
    "status": (1, 2),
}


def run(tmp_path, program, *options, **environment):
    file = tmp_path / "program.py"
    file.write_text(program)
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    command += [sys.executable, "-m", "bench.nullgpu", *options, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run(tmp_path_factory.mktemp("calls"), CALLS)


@pytest.mark.parametrize("case", ANSWERS)
def test_a_call_in_a_capture_is_answered_as_cuda_does(answers, case):
    """The answer of the call, and that of the end of the capture."""
    assert tuple(answers[case]) == ANSWERS[case]


def test_all_calls_are_expected(answers):
    assert answers.keys() == ANSWERS.keys()


TRAINING = """
import json, torch
from bench.nullgpu.program import Device
device = Device()
counters = lambda: {name: n for name, n in device.counters().items() if not name.startswith("stub:")}
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), capturable=True, fused=True)
batch, host = torch.zeros(8, 64, device="cuda"), torch.zeros(8, 64).pin_memory()
answer = torch.zeros((), pin_memory=True)

def step():
    batch.copy_(host, non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    answer.copy_(loss.detach(), non_blocking=True)

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3): step()
    before = counters(); step(); eager = counters()
    eager = {name: n - before.get(name, 0) for name, n in eager.items()}
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
before = counters()
with torch.cuda.graph(graph): step()
after = counters()
captured = {name: n - before.get(name, 0) for name, n in after.items()}
for _ in range(5): graph.replay()
lazy = answer.view(torch.int32).item()
torch.cuda.synchronize()
replayed = {name: n - after.get(name, 0) for name, n in counters().items()}
print(json.dumps({"eager": eager, "captured": captured, "replayed": replayed,
                  "answers": [lazy & 0xFFFFFFFF, answer.item()]}))
"""


@pytest.mark.parametrize("lazy", [0, 1])
def test_a_captured_training_step_is_counted_when_it_is_replayed(tmp_path, lazy):
    counted = run(tmp_path, TRAINING, "--kernels", NULLGPU_LAZY=lazy)
    eager, captured, replayed = counted["eager"], counted["captured"], counted["replayed"]
    work = [name for name in eager if name.startswith(("launches", "copies", "fills")) and eager[name]]
    assert eager["launches"] > 10
    assert {"launches of cuBLAS", "launches of torch's kernels", "copies h2d", "copies d2h"} <= set(work)
    for name in work:
        assert not captured.get(name), name
        assert not replayed.get(name), name
        assert replayed[f"{name} in graphs"] == 5 * eager[name], name
    assert replayed["graph launches"] == 5
    kernels = {name.removeprefix("kernel:"): n for name, n in eager.items() if name.startswith("kernel:") and n}
    assert {name: replayed[f"kernel in graphs:{name}"] for name in kernels} == {k: 5 * n for k, n in kernels.items()}
    assert counted["answers"] == [0xAAAAAAAA if lazy else 0, 0.0]  # nobody had waited for the copy; then somebody had


CALLABLES = """
import json, torch
from bench.nullgpu.program import Device
device = Device()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
graphed = torch.cuda.make_graphed_callables(model, (torch.zeros(8, 64, device="cuda"),))
for _ in range(4):
    optimizer.zero_grad()
    graphed(torch.zeros(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
print(json.dumps(device.counters()))
"""

COMPILED = """
import json, torch
from bench.nullgpu.program import Device
device = Device()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, mode="reduce-overhead")
for _ in range(6):
    optimizer.zero_grad()
    compiled(torch.zeros(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
print(json.dumps(device.counters()))
"""


@pytest.mark.parametrize(
    ("program", "graphs"),
    [(CALLABLES, 2), (COMPILED, 3)],  # compiled: and an empty one, which keeps the memory
    ids=["make_graphed_callables", "reduce-overhead"],
)
def test_torch_captures_forward_and_backward(tmp_path, program, graphs):
    counted = run(tmp_path, program)
    assert counted["graphs instantiated"] == graphs
    assert counted["graph launches"] >= 8
    assert counted["launches in graphs"] >= 4 * counted["graph launches"] / 2
    assert "launches of cuBLAS in graphs" in counted


DOT = """
import json, pathlib, sys, torch
graph = torch.cuda.CUDAGraph(keep_graph=True)
graph.enable_debug_mode()
x = torch.zeros(64, device="cuda")
with torch.cuda.graph(graph): y = x + 1 + x * 2
path = pathlib.Path(sys.argv[0]).with_name("graph.dot")
graph.debug_dump(str(path))
print(json.dumps(path.read_text()))
"""


def test_a_graph_is_written_as_dot(tmp_path):
    dot = run(tmp_path, DOT)
    assert dot.startswith("digraph")
    assert dot.count("label=") == 3
    assert dot.count("->") == 2
