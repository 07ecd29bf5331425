"""Registration of ops: device, version, and imports without effects."""

import subprocess
import sys

import pytest
import torch

from fasttrain_kernels import _recorded, _registration


@pytest.mark.parametrize(("current", "changes"), [(-1, False), (1, True)])  # a CPU tensor's index is -1
def test_trap_15_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch, current, changes):
    entered = []

    class Device:
        def __init__(self, device):
            entered.append(device)

        def __enter__(self): ...

        def __exit__(self, *_): ...

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    gate = torch.randn(2, 8)
    implementation = _recorded.recorded(lambda gate, up: gate * up)
    torch.testing.assert_close(implementation(gate, gate), gate * gate)
    assert entered == ([gate.device] if changes else [])


def test_the_name_of_an_op_changes_with_its_source():
    """torch.compile's caches would otherwise run yesterday's gradient after an upgrade."""
    from fasttrain_kernels.ops.swiglu import _swiglu

    assert _swiglu._overloadname == f"v{_registration._VERSION}"


def test_the_name_of_an_op_depends_on_sources_that_change_results(tmp_path):
    def digest(path, text):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        return _registration._digest(tmp_path)

    first = digest("swiglu.py", "a")
    assert digest("testing/interpreter.py", "b") == digest("py.typed", "b") == first
    assert digest("modules.py", "b") == digest("huggingface.py", "b") == digest("__init__.py", "b") == first
    assert len({first, digest("swiglu.py", "c"), digest("cpp/matmul.cpp", "d"), digest("cpp/simd.h", "e")}) == 4


def test_import_has_no_effects():
    script = """
import sys, torch, warnings
warnings.simplefilter("error")
from fasttrain_kernels import *
from fasttrain_kernels import cpp
assert not torch.cuda.is_initialized()
assert not cpp.library.cache_info().misses
heavy = {"torch.distributed.tensor", "transformers", "flash_attn", "ml_dtypes", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
