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
