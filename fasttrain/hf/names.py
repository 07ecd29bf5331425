"""Weights and configuration between the decoder and Transformers' Qwen3 (or Llama, without qk_norm).

The decoder packs projections that read the same input, and gives each norm to the block before it (fasttrain.model).
"""

from collections.abc import Mapping
from typing import Any

from fasttrain import config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # the files of weights
SETTINGS = {  # of the model, and what config.json calls them
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size", "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps", "tied_head": "tie_word_embeddings",
}  # fmt: skip


def huggingface_config(model: config.ModelConfig, *, vocab: int, sequence: int) -> dict[str, Any]:
    """The architecture as config.json has it: the keyword arguments of Qwen3Config or LlamaConfig."""
    family = "Qwen3" if model.qk_norm else "Llama"
    return {theirs: getattr(model, ours) for ours, theirs in SETTINGS.items()} | {
        "model_type": family.lower(),
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": vocab,
        "max_position_embeddings": sequence,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
    }


def parts(model: config.ModelConfig, rows: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The tensors of Transformers, with their rows, that each of ours consists of. rows: those of ours."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    names: dict[str, str | dict[str, int]] = {  # str: one, with all rows
        "embedding.weight": "model.embed_tokens.weight",
        "first_norm": "model.layers.0.input_layernorm.weight",
    }
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        names |= {
            f"{ours}.qkv.weight": {
                f"{attention}.q_proj.weight": q,
                f"{attention}.k_proj.weight": kv,
                f"{attention}.v_proj.weight": kv,
            },
            f"{ours}.attention_out.weight": f"{attention}.o_proj.weight",
            f"{ours}.ffn_norm": f"{theirs}.post_attention_layernorm.weight",
            f"{ours}.gate_up.weight": {f"{mlp}.gate_proj.weight": model.ffn, f"{mlp}.up_proj.weight": model.ffn},
            f"{ours}.down.weight": f"{mlp}.down_proj.weight",
            f"{ours}.next_norm": f"model.layers.{i + 1}.input_layernorm.weight",
        }
        if model.qk_norm:
            names |= {f"{ours}.{x}_norm": f"{attention}.{x}_norm.weight" for x in "qk"}
    names[f"blocks.{model.layers - 1}.next_norm"] = "model.norm.weight"
    if not model.tied_head:
        names["head.weight"] = "lm_head.weight"
    return {ours: {theirs: rows[ours]} if isinstance(theirs, str) else theirs for ours, theirs in names.items()}
