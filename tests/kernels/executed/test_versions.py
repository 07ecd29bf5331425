"""The numbers of our ops with the pinned Triton and with the newest, whose environment `make test-latest` builds."""

from __future__ import annotations

import subprocess

import pytest
import torch

from tests.docs.pages import ROOT
from tests.kernels.executed.numbers_of_ops import numbers

PYTHON = ROOT / ".venv-latest" / "bin" / "python"
# Of the largest value. Interpreted, both Tritons give the same bits; the compilers contract other products in float32.
LARGEST_DIFFERENCE = 4 * 2.0**-24


@pytest.mark.executed
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-latest (make test-latest)")
def test_two_tritons_compute_the_same(tmp_path):
    path = tmp_path / "numbers.pt"
    command = [PYTHON, "-m", "tests.kernels.executed.numbers_of_ops", path]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "kernels", "HOME": str(tmp_path)}, check=True)
    newest, here = torch.load(path), numbers()
    assert newest.keys() == here.keys()
    for name, value in here.items():
        if name.startswith("interpreted"):
            assert torch.equal(value, newest[name]), name
        else:
            difference = (value.double() - newest[name].double()).abs().max()
            assert difference <= LARGEST_DIFFERENCE * value.double().abs().max(), name
