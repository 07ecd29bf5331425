"""Small models with weights that make every token depend on those before it, and the same in Transformers."""

from __future__ import annotations

from dataclasses import replace

import torch

from fasttrain.config import ModelConfig
from fasttrain.hf.names import huggingface_config
from fasttrain.model import Decoder
from tests.fasttrain.hf.names import to_huggingface

VOCAB, SEQUENCE = 96, 48
TINY = ModelConfig(layers=2, hidden=48, heads=4, kv_heads=2, head_dim=16, ffn=80, init_std=0.3)
VARIANTS = {
    "qwen3": TINY,
    "qwen3 untied, a head for each query": replace(TINY, kv_heads=4, tied_head=False),
    "llama, one kv head": replace(TINY, qk_norm=False, kv_heads=1, tied_head=False),
}


def decoder(model: ModelConfig = TINY, *, vocab: int = VOCAB) -> Decoder:
    made = Decoder(model, vocab=vocab, sequence=SEQUENCE)
    made.init_weights(1)
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    return made.eval().requires_grad_(False)


def in_transformers(made: Decoder):
    """Transformers' own model, with these weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kind, settings = (Qwen3ForCausalLM, Qwen3Config) if made.config.qk_norm else (LlamaForCausalLM, LlamaConfig)
    vocab = made.embedding.num_embeddings
    theirs = kind(settings(**huggingface_config(made.config, vocab=vocab, sequence=made.sequence)))
    state = to_huggingface(made.state_dict(), made.config)
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    theirs.tie_weights()
    return theirs.eval()


def prompts(*lengths: int, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]
