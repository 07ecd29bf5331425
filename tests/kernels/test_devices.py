"""Machines that are not a Linux box with a GPU: no triton, and Apple's device."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

import fasttrain_kernels as ft
from fasttrain_kernels.ops.attention import blocked, vendors
from fasttrain_kernels.ops.attention.capabilities import choose

ROOT = Path(__file__).parents[2]
WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_of_the_library_works_on_a_cpu_without_triton():
    """Names, numbers and gradients; compiled too."""
    code = WITHOUT_TRITON + (
        "import torch, fasttrain_kernels as ft\n"
        "for name in ft.__all__: getattr(ft, name)\n"
        "x = torch.randn(2, 8, 32, requires_grad=True)\n"
        "w = torch.randn(64, 16)\n"
        "def model(x):\n"
        "    q = ft.rms_norm(x, None).unflatten(-1, (2, 16))\n"
        "    h = ft.swiglu(ft.attention(q, q, q).flatten(2))\n"
        "    return ft.linear_cross_entropy(h.flatten(0, 1), w, torch.arange(16))\n"
        "grads = []\n"
        "for called in (model, torch.compile(model, backend='aot_eager')):\n"
        "    x.grad = None; called(x).backward(); grads.append(x.grad)\n"
        "torch.testing.assert_close(*grads)\n"
        "print(grads[0].abs().sum() > 0)"
    )
    assert run(code) == "tensor(True)\n"


def test_a_launch_without_triton_says_what_to_install():
    code = WITHOUT_TRITON + (
        "import torch, fasttrain_kernels as ft\n"
        "from fasttrain_kernels._registration import kernels_on_cpu\n"
        "try:\n"
        "    with kernels_on_cpu(): ft.rms_norm(torch.randn(4, 16), None)\n"
        "except ImportError as error: print(error)"
    )
    assert "a kernel cannot be launched without triton (" in run(code)


def test_tests_of_kernels_skip_without_triton():
    code = WITHOUT_TRITON + (
        "import pytest\n"
        "pytest.main(['-rs', '-p', 'no:xdist', '-p', 'no:cacheprovider', 'tests/kernels/test_swiglu.py'])"
    )
    printed = run(code)
    assert "1 skipped" in printed
    assert "needs triton" in printed


# A tensor on "meta" stands for one on Apple's device: neither CPU nor CUDA, and an operand left on the CPU is an error.
# The plain forms take the place of the ops' fakes.
PLAIN = """
import contextlib, torch.fx.experimental._config
import torch
import fasttrain_kernels._registration as registration

register = registration.register
registration.register = lambda schema, *, cpu, fake, **rest: register(schema, cpu=cpu, fake=cpu, **rest)
import fasttrain_kernels as ft

torch.is_autocast_enabled, torch.autocast = lambda kind: False, lambda *_, **__: contextlib.nullcontext()  # no meta
import fasttrain_kernels.ops.linear_cross_entropy.op as loss_op
loss_op._check_targets = lambda *_: None  # reads them
torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
torch.set_default_device("meta")
x, weight, norm = (torch.empty(*shape, requires_grad=True) for shape in ((2, 8, 32), (64, 16), (16,)))
q, k = ft.qk_norm_rope(*2 * [x.unflatten(-1, (2, 16))], norm, norm, torch.empty(8, 8), torch.empty(8, 8))
normed, total = ft.add_rms_norm(ft.rms_norm(x, None), q.flatten(2), None)
hidden = ft.linear(ft.swiglu(normed), torch.empty(16, 16))
loss = ft.linear_cross_entropy(hidden.flatten(0, 1), weight, torch.zeros(16, dtype=torch.int64))
(loss + total.sum() + k.sum()).backward()
print({tensor.device.type for tensor in (loss, x.grad, weight.grad, norm.grad)})
"""


def test_the_plain_forms_stay_on_their_device():
    assert run(PLAIN) == "{'meta'}\n"


def test_attention_stays_on_its_device():
    q = torch.empty(2, 8, 2, 16, device="meta")
    problem = (None, True, None, None, 0.25)
    out, lse = blocked.forward(q, q, q, *problem)
    gradients = blocked.backward(out, q, q, q, out, lse, *problem, True, True, True)
    assert {x.device.type for x in (out, lse, *gradients)} == {"meta"}
    q = torch.randn(1, 8, 2, 16)
    request = vendors.request(q, q, None, None, True, 4, None, True)
    assert choose(replace(request, generation="mps"), "auto") == "blocked"


def test_all_ops_are_registered_for_apples_device():
    for name in ft.__all__:
        getattr(ft, name)
    ops = [op for op in torch._C._dispatch_get_all_op_names() if op.startswith("fasttrain::")]
    assert len(ops) >= 19
    assert all(torch._C._dispatch_has_kernel_for_dispatch_key(op, "MPS") for op in ops)
