"""The model that config.json of a Hugging Face checkpoint describes, as our settings. What the decoder does not
implement is refused by its name.

Dropout and initializer_range are settings of a training run, not of the model: those of our run count.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from fasttrain.config import ModelConfig
from fasttrain.flops import num_parameters
from fasttrain.hf.names import SETTINGS
from fasttrain.schema import build, parse
from fasttrain.units import disk_size

FAMILIES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
NAME = "config.json"
TAKEN = (*SETTINGS, "qk_norm", "rope_theta")


class StatedConfig(TypedDict, total=False):
    """What is read of config.json beside SETTINGS, and is there."""

    model_type: str
    architectures: list[str]
    layer_types: list[str]
    rope_theta: float
    partial_rotary_factor: float
    rope_scaling: dict[str, Any]
    rope_parameters: dict[str, Any]


def architecture(directory: Path) -> dict[str, int | float | bool]:
    """The settings of the section `model` that are TAKEN from it."""
    content = _read(directory)
    if refused := list(_refusals(content)):
        raise ValueError(f"from_hf: {directory / NAME} has {'; '.join(refused)}: the decoder does not implement this")
    try:
        heads, hidden = content["num_attention_heads"], content["hidden_size"]
        is_qwen3 = content["model_type"] == "qwen3"
        defaults = dict(num_key_value_heads=heads, rms_norm_eps=1e-6, tie_word_embeddings=False)  # of Transformers
        stated = defaults | dict(head_dim=128 if is_qwen3 else hidden // heads) | content
        found = {ours: stated[theirs] for ours, theirs in SETTINGS.items()} | {
            "qk_norm": is_qwen3,
            "rope_theta": build(float, _rope(content).get("rope_theta", 10_000.0), "rope_theta"),
        }
        _check_size(directory, ModelConfig(**found))
        return found
    except KeyError as error:
        raise ValueError(f"from_hf: {directory / NAME} does not say {error.args[0]}") from None
    except ValueError as error:
        raise ValueError(f"from_hf: {directory / NAME}: {error}") from None


def _check_size(directory: Path, model: ModelConfig) -> None:
    """Before memory is taken for a model that its files do not hold."""
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    parameters = num_parameters(model, model.vocab or 0).total
    if size and size < 2 * parameters:  # bytes of a half
        raise ValueError(
            f"it describes {parameters:,} parameters, and all safetensors beside it have {disk_size(size)}; copy the "
            "files again, or name the directory that they belong to"
        )


def _read(directory: Path) -> dict[str, Any]:
    path = directory / NAME
    if not directory.is_dir():
        raise FileNotFoundError(
            f"from_hf: {directory} is no directory here; download the checkpoint first: hf download {directory} "
            "--local-dir DIR"
        )
    try:
        content = build(dict, parse(path.read_text("utf-8")))
        hints = get_type_hints(ModelConfig, include_extras=True)
        kinds = {theirs: hints[ours] for ours, theirs in SETTINGS.items()} | get_type_hints(StatedConfig)
        content = {name: value for name, value in content.items() if value is not None}
        return content | {name: build(kind, content[name], name) for name, kind in kinds.items() if name in content}
    except FileNotFoundError:
        raise FileNotFoundError(
            f"from_hf: {directory} has no {NAME}, so it is no Hugging Face checkpoint; a run of fasttrain is started "
            "from with --resume"
        ) from None
    except ValueError as error:
        raise ValueError(f"from_hf: {path} is corrupt ({error})") from None


def _refusals(content: dict[str, Any]) -> Iterator[str]:
    """Settings that are not implemented, as they stand there."""
    family = content.get("model_type")
    if family not in FAMILIES:
        yield f"model_type {family!r}, not {' or '.join(FAMILIES)}"
        return
    for name in content.get("architectures") or []:
        if name != FAMILIES[family]:
            yield f"architectures {name!r}, not {FAMILIES[family]}"
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config", "auto_map"):
        if content.get(key):
            yield f"{key} {content[key]!r}"
    if others := set(content.get("layer_types") or []) - {"full_attention"}:
        yield f"layer_types {', '.join(map(repr, sorted(others)))}"
    if (activation := content.get("hidden_act", "silu")) != "silu":
        yield f"hidden_act {activation!r}, not silu"
    rope = _rope(content)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        yield f"rope_type {kind!r} (scaling), not default"
    if (share := rope.get("partial_rotary_factor") or 1) != 1:
        yield f"partial_rotary_factor {share!r}, not 1"


def _rope(content: dict[str, Any]) -> dict[str, Any]:
    """The settings of RoPE, as Transformers 5 writes them, or spread over the file as earlier ones did."""
    old = {key: content[key] for key in ("rope_theta", "partial_rotary_factor") if content.get(key) is not None}
    return old | (content.get("rope_scaling") or {}) | (content.get("rope_parameters") or {})
