"""config.json in our words, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from fasttrain.config import ModelConfig
from fasttrain.hf.config import TAKEN, architecture

SIZES = dict(
    vocab_size=320, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
OURS: dict[str, Any] = dict(
    layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=320, qk_norm=False, rope_theta=1e4,
    norm_eps=1e-6, tied_head=False,
)  # fmt: skip


def written(directory: Path, content: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def test_what_transformers_writes(tmp_path: Path) -> None:
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    assert architecture(tmp_path) == OURS
    assert sorted(OURS) == sorted(TAKEN)
    found: dict[str, Any] = architecture(tmp_path)
    ModelConfig(**found)  # all of them are settings
    rope = dict(rope_type="default", rope_theta=5e5)
    Qwen3Config(
        **SIZES, head_dim=32, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=True
    ).save_pretrained(tmp_path)
    expected = OURS | dict(head_dim=32, rope_theta=5e5, norm_eps=1e-5, tied_head=True, qk_norm=True)
    assert architecture(tmp_path) == expected


def test_what_earlier_ones_wrote(tmp_path: Path) -> None:
    """rope_theta beside the rest, and what is a default omitted: as in the checkpoints of Llama 2 and Qwen3."""
    sizes = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
    old = sizes | dict(model_type="llama", rope_scaling=None, hidden_act="silu", pretraining_tp=1)
    assert architecture(written(tmp_path, old)) == OURS | dict(kv_heads=4)
    old = SIZES | dict(
        model_type="qwen3", rope_theta=1_000_000, rope_scaling=None, head_dim=128, sliding_window=None,
        use_sliding_window=False, max_window_layers=28, attention_bias=False, torch_dtype="bfloat16",
    )  # fmt: skip
    assert architecture(written(tmp_path, old)) == OURS | dict(rope_theta=1e6, head_dim=128, qk_norm=True)
    with_type = old | dict(rope_scaling=dict(type="default"))
    assert architecture(written(tmp_path, with_type))["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(model_type="mistral"), "model_type 'mistral', not qwen3 or llama"),
        (dict(model_type=None), "model_type None"),
        (dict(architectures=["LlamaForSequenceClassification"]), "architectures 'LlamaForSequenceClassification'"),
        (dict(attention_bias=True), "attention_bias True"),
        (dict(mlp_bias=True), "mlp_bias True"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu', not silu"),
        (dict(use_sliding_window=True), "use_sliding_window True"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types 'sliding_attention'"),
        (dict(quantization_config=dict(quant_method="fp8")), "quantization_config {'quant_method': 'fp8'}"),
        (dict(auto_map=dict(AutoModel="x.Y")), "auto_map"),
        (dict(rope_scaling=dict(type="linear", factor=2.0)), "rope_type 'linear' (scaling), not default"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "rope_type 'llama3' (scaling), not default"),
        (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "rope_type 'yarn' (scaling), not default"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5, not 1"),
        (dict(hidden_act="relu", mlp_bias=True), "mlp_bias True; hidden_act 'relu'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        architecture(written(tmp_path, SIZES | dict(model_type="llama") | changed))
    assert message in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


def test_what_is_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Qwen/Qwen3-0.6B is no directory here; download the checkpoint first"):
        architecture(Path("Qwen/Qwen3-0.6B"))
    with pytest.raises(FileNotFoundError, match="has no config.json, so it is no Hugging Face checkpoint"):
        architecture(tmp_path)
    for content, message in (
        ("{", "is corrupt"),
        ("[]", r"is corrupt \(it is \[\]\)"),
        ('{"model_type": "llama"}', "not say num_"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            architecture(tmp_path)
