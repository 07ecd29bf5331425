"""Writing the files of an export. config.json, without which nothing loads, is the last one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttrain.convert import huggingface_config
from fasttrain.disk import free_bytes
from fasttrain.export.card import card
from fasttrain.export.directory import whole
from fasttrain.export.source import Source
from fasttrain.export.weights import DTYPES, Weights, weights

SHARD = 5 * 10**9  # bytes of a file, as Transformers has it
_OTHERS = 64 * 2**20  # bytes for all but the weights


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    path: Path
    parameters: int
    files: dict[str, int]  # name and bytes


def export(
    source: Source,
    out: Path,  # new, or empty
    *,
    dtype: str = "fp32",  # a key of DTYPES
    shard: int = SHARD,  # bytes of a file, at most
    report: Callable[[int], None] = lambda _: None,  # told of bytes of weights written
) -> Exported:
    """Write a Hugging Face checkpoint. The caller has verified the source; nothing shows at `out` before the end."""
    found = weights(source.checkpoint, source.settings.model, DTYPES[dtype])
    if (free := free_bytes(out.absolute())) < found.bytes + _OTHERS:
        raise ValueError(
            f"export: {found.bytes / 1e9:,.2f} GB of weights do not fit in the {free / 1e9:,.2f} GB that are free at "
            f"{out}; free some, or choose another --out"
        )
    with whole(out) as directory:
        found.write(directory, shard, report)
        if source.tokenizer is not None:
            shutil.copyfile(source.tokenizer, directory / "tokenizer.json")
            _dump(directory / "tokenizer_config.json", _tokenizer_config(source))
        _dump(directory / "generation_config.json", _generation_config(source))
        (directory / "README.md").write_text(card(source, found, out.resolve().name), "utf-8")
        _dump(directory / "config.json", _config(source, found))
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    return Exported(path=out, parameters=found.parameters, files=files)


def _config(source: Source, found: Weights) -> dict[str, Any]:
    ends = {"bos_token_id": source.separator, "eos_token_id": source.separator}  # null: Llama's defaults are others
    model, sequence = source.settings.model, source.settings.data.sequence
    return {
        **huggingface_config(model, vocab=source.vocab, sequence=sequence),
        "rope_theta": model.rope_theta,  # for programs that do not know rope_parameters yet
        "dtype": str(found.dtype).removeprefix("torch."),
        **ends,
    }


def _generation_config(source: Source) -> dict[str, Any]:
    """Documents begin with the separator, which ends the one before."""
    if source.separator is None:
        return {}
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), source.separator)


def _tokenizer_config(source: Source) -> dict[str, Any]:
    special = {} if source.separator_text is None else dict.fromkeys(("bos_token", "eos_token"), source.separator_text)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.settings.data.sequence,
        **special,
    }


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
