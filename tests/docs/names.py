"""What the Python examples of each page take for granted: `model`, `x`, a kernel of the reader's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import nn

from fasttrain.config import Config
from fasttrain_kernels import rms_norm, swiglu
from fasttrain_kernels.testing import interpret

Names = dict[str, Any]

# In an example: what a test has instead. Sizes of a test's data, no GPU, no network
IN_A_TEST = {
    'device="cuda"': 'device="cpu"',
    "metadata={...}": "metadata={}",
    '.source("train", 1234)': '.source("train", 12)',
    "document=4711": "document=47",
}


def readme() -> Names:
    T, width, head_dim, Hq, Hk = 24, 32, 16, 4, 2
    return dict(
        T=T,
        head_dim=head_dim,
        Hq=Hq,
        Hk=Hk,
        qkv_proj=nn.Linear(width, (Hq + 2 * Hk) * head_dim),
        out_proj=nn.Linear(Hq * head_dim, width),
        gate_up_proj=nn.Linear(width, 96),
        down_proj=nn.Linear(48, width),
        norm1_weight=torch.ones(width),
        norm2_weight=torch.ones(width),
        q_norm_weight=torch.ones(head_dim),
        k_norm_weight=torch.ones(head_dim),
        documents=torch.tensor([0, 7, 24, 48], dtype=torch.int32),
        hidden=torch.randn(2, T, width, requires_grad=True),
        head_weight=torch.randn(97, width, requires_grad=True),
        targets=torch.randint(97, (2, T)),
        AutoModelForCausalLM=SmallQwen3,
    )


class SmallQwen3:
    """In place of AutoModelForCausalLM: nothing is downloaded."""

    @staticmethod
    def from_pretrained(name: str) -> nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=16)
        return Qwen3ForCausalLM(Qwen3Config(vocab_size=11, **sizes, num_attention_heads=2, num_key_value_heads=1))


def checkpoints() -> Names:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return dict(
        run=Path("runs/new"), config=Config(), group=dist.group.WORLD, model=model, optimizer=optimizer, scaler=scaler
    )  # fmt: skip


def prepare() -> Names:
    """The dataset that the example makes is not there yet."""
    shutil.rmtree("data/mine")
    return {}


def add_rms_norm() -> Names:
    norm = nn.RMSNorm(16)
    x = torch.randn(2, 4, 16)
    return dict(attention_out=x, residual=x, norm=norm, next_norm=norm, mlp=nn.Linear(16, 16))


def attention() -> Names:
    H, Hkv, D = 4, 2, 16
    q, k = torch.randn(2, 8, H, D), torch.randn(2, 8, Hkv, D)
    documents = torch.tensor([0, 3, 16], dtype=torch.int32)
    projection, x = nn.Linear(8, (H + 2 * Hkv) * D), torch.randn(2, 2048, 8)
    return dict(q=q, k=k, v=k, cu_seqlens=documents, H=H, Hkv=Hkv, D=D, projection=projection, x=x)


def compiled() -> Names:
    return dict(my_op=rms_norm)


def linear_names() -> Names:
    return dict(x=torch.randn(4, 384), weight=torch.randn(8, 384))


def linear_cross_entropy() -> Names:
    hidden = torch.randn(6, 16, requires_grad=True)
    return dict(hidden=hidden, head=nn.Linear(16, 97, bias=False), target=torch.randint(97, (6,)))


def qk_norm_rope() -> Names:
    norm = nn.RMSNorm(128)
    return dict(x=torch.randn(2, 8, 16), qkv_proj=nn.Linear(16, 32 * 128), q_norm=norm, k_norm=norm)


def rms_norm_names() -> Names:
    return dict(x=torch.randn(4, 16), weight=torch.ones(16))


def swiglu_names() -> Names:
    gate, up, weight = torch.randn(4, 16), torch.randn(4, 16), torch.randn(8, 16)
    return dict(gate=gate, up=up, gate_up_proj=nn.Linear(8, 32), x=torch.randn(4, 8), weight=weight)


@triton.jit
def scale_kernel(x, y, N, factor, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    place = tl.program_id(0) * N + columns
    values = tl.load(x + place, mask=columns < N)
    tl.store(y + place, (values * factor).to(y.dtype.element_ty), mask=columns < N)


def testing() -> Names:
    x = torch.randn(4, 64)
    with interpret():
        result = swiglu(x, x)
    return dict(scale_kernel=scale_kernel, my_rms_norm=rms_norm, op=lambda _: swiglu(x, x), result=result)


def report() -> Names:
    return dict(run=Path("runs/a"))


def kernels() -> Names:
    return readme()


NAMES: dict[str, Callable[[], Names]] = {
    "README.md": readme,
    "docs/checkpoints.md": checkpoints,
    "docs/prepare.md": prepare,
    "docs/report.md": report,
    "docs/kernels/add_rms_norm.md": add_rms_norm,
    "docs/kernels/attention.md": attention,
    "docs/kernels/compiled.md": compiled,
    "docs/kernels/linear.md": linear_names,
    "docs/kernels/linear_cross_entropy.md": linear_cross_entropy,
    "docs/kernels/qk_norm_rope.md": qk_norm_rope,
    "docs/kernels/rms_norm.md": rms_norm_names,
    "docs/kernels/swiglu.md": swiglu_names,
    "docs/kernels/testing.md": testing,
}
