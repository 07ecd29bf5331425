"""The README's examples run as they stand."""

import re
from pathlib import Path

import torch
from torch import nn

README = (Path(__file__).parent.parent / "README.md").read_text()


def python_block(containing: str) -> str:
    return next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if containing in block)


def test_the_kernels_in_your_own_trainer():
    T, width, head_dim, Hq, Hk = 24, 32, 16, 4, 2
    names = dict(
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
    )
    exec(python_block("def block"), names)
    x, residual = names["block"](torch.randn(2, T, width), torch.zeros(2, T, width))
    assert x.shape == residual.shape == (2, T, width)
    names["loss"].backward()
    assert names["head_weight"].grad.isfinite().all()


def test_one_call_for_transformers():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    class AutoModelForCausalLM:
        @staticmethod
        def from_pretrained(name):
            sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=16)
            heads = dict(num_attention_heads=2, num_key_value_heads=1)
            return Qwen3ForCausalLM(Qwen3Config(vocab_size=11, **sizes, **heads))

    names = dict(AutoModelForCausalLM=AutoModelForCausalLM)
    exec(python_block("use_kernels"), names)
    assert names["model"].config._attn_implementation == "fasttrain"


def test_every_page_that_is_linked_exists():
    root = Path(__file__).parent.parent
    pages = re.findall(r"\]\(([\w/.-]+\.md)\)", README)
    assert len(pages) > 8
    assert [page for page in pages if not (root / page).exists()] == []
