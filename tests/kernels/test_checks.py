"""Checks that all ops share: DTensors are rejected."""

import pytest
import torch
from torch import Tensor

import fasttrain_kernels as ft


def test_trap_8_every_op_rejects_dtensors_by_name():
    class DTensor(Tensor):
        pass

    x = torch.randn(2, 4, 2, 16)
    sharded = x.as_subclass(DTensor)
    cos, sin = ft.rotary_table(4, 16)
    calls = {
        "rms_norm": lambda: ft.rms_norm(sharded, x.new_ones(16)),
        "add_rms_norm": lambda: ft.add_rms_norm(x, sharded, x.new_ones(16)),
        "qk_norm_rope": lambda: ft.qk_norm_rope(x, sharded, None, None, cos, sin),
        "attention": lambda: ft.attention(x, x, sharded),
        "linear_cross_entropy": lambda: ft.linear_cross_entropy(
            x[0, 0], x[0, 1].as_subclass(DTensor), torch.zeros(2, dtype=torch.long)
        ),
        "swiglu": lambda: ft.swiglu(x, sharded),
    }
    for op, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{op}: \w+ is a DTensor; .* pass \w+\.to_local\(\)"):
            call()


def test_trap_8_the_real_dtensor_has_that_name():
    from torch.distributed.tensor import DTensor

    assert DTensor.__name__ == "DTensor"
