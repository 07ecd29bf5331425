"""Put the kernels into a Transformers model.

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
    use_kernels(model)

Only this model changes: forwards are replaced on its module instances, parameters and state dict stay as they are.
Attention is registered with Transformers as the implementation "fasttrain", through its own extension point.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain_kernels.ops.attention.op import attention
from fasttrain_kernels.ops.linear_cross_entropy.op import linear_cross_entropy
from fasttrain_kernels.ops.qk_norm_rope.op import qk_norm_rope
from fasttrain_kernels.ops.rms_norm import add_rms_norm, rms_norm
from fasttrain_kernels.ops.swiglu import swiglu

_FAMILIES = {"qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "gemma": "Gemma"}


def use_kernels(
    model: Any,  # a transformers.PreTrainedModel
    *,
    fuse_loss: bool = True,  # model(ids, labels=...) then returns the loss and no logits
) -> Any:
    """Make a Transformers model of _FAMILIES run on fasttrain's kernels, in place; returns the model."""
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in _FAMILIES:
        raise ValueError(
            f"use_kernels: {type(model).__name__} is of type '{family}'; supported are {', '.join(_FAMILIES)}"
        )
    _check_config(model.config)
    prefix = _FAMILIES[family]
    forwards: dict[str, Callable[..., Any]] = {
        f"{prefix}RMSNorm": _norm_forward,
        f"{prefix}Attention": _attention_forward,
        f"{prefix}DecoderLayer": _layer_forward,
        f"{prefix}MLP": _mlp_forward,
    }
    if family == "gemma":  # weights around 0, rounded once; and a feed-forward layer that is not swiglu
        forwards = {f"{prefix}RMSNorm": _offset_norm_forward, f"{prefix}Attention": _attention_forward}
    if fuse_loss:
        forwards[f"{prefix}ForCausalLM"] = _causal_lm_forward
    for module in list(model.modules()):
        replacement = forwards.get(type(module).__name__)
        if replacement is not None:
            module.forward = MethodType(replacement, module)
    _register_attention()
    model.set_attn_implementation("fasttrain")
    return model


def _check_config(config: Any) -> None:
    if config.model_type != "gemma" and config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"use_kernels: hidden_act is '{config.hidden_act}'; the swiglu kernel is for 'silu'")
    if config.attention_dropout:
        raise ValueError(
            f"use_kernels: attention_dropout is {config.attention_dropout}; the kernels have none: set it to 0"
        )


def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


def _offset_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, eps=self.eps, offset=1.0)


def _mlp_forward(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def _layer_forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    residual = hidden_states
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    norm = self.post_attention_layernorm
    normed, residual = add_rms_norm(attended, residual, norm.weight, eps=norm.variance_epsilon)
    return residual + self.mlp(normed)


def _attention_forward(
    self: Any,
    hidden_states: Tensor,  # (B, T, C)
    position_embeddings: tuple[Tensor, Tensor],  # cos and sin, each (B or 1, T, D): both halves of D are equal
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
    cos, sin = (table[..., : self.head_dim // 2] for table in position_embeddings)
    positions = None
    if cos.shape[0] > 1:  # a row of the table per token, in place of a table of positions
        positions = torch.arange(cos.shape[0] * cos.shape[1], device=cos.device).view(cos.shape[:2])
    q_norm, k_norm = getattr(self, "q_norm", None), getattr(self, "k_norm", None)
    q, k = qk_norm_rope(
        q,
        k,
        q_norm.weight if q_norm is not None else None,
        k_norm.weight if k_norm is not None else None,
        cos.flatten(0, 1),
        sin.flatten(0, 1),
        positions=positions,
        eps=q_norm.variance_epsilon if q_norm is not None else 1e-6,
    )
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # Transformers' layout: (B, H, T, D)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    out, _ = _attend(
        self,
        q,
        k,
        v,
        attention_mask,
        scaling=self.scaling,
        sliding_window=getattr(self, "sliding_window", getattr(self.config, "sliding_window", None)),
        **kwargs,
    )
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def _attend(
    module: Any,
    query: Tensor,  # (B, Hq, T, D)
    key: Tensor,  # (B, Hk, S, D)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function as Transformers calls it; returns (B, T, Hq, D)."""
    if attention_mask is not None:  # padding or a mask of the user's own: more than intervals of keys
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return attention(q, k, v, scale=scaling, window=sliding_window, cu_seqlens=cu_seq_lens_q), None


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("fasttrain", _attend)
    AttentionMaskInterface.register("fasttrain", sdpa_mask)  # no mask where causal is enough


def _causal_lm_forward(
    self: Any,
    input_ids: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    if labels is None and shift_labels is None:
        return type(self).forward(self, input_ids, **kwargs)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    outputs = self.model(input_ids=input_ids, **kwargs)
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    # Transformers' Trainer divides by the tokens of all micro-batches of a step.
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = linear_cross_entropy(outputs.last_hidden_state, self.lm_head.weight, shift_labels, reduction=reduction)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    return CausalLMOutputWithPast(
        loss=loss,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )
