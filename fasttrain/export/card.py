"""README.md of an export: a model card with the facts of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import tomli_w

from fasttrain.export.source import Source
from fasttrain.export.weights import Weights

SECTIONS = ("model", "batch", "optim")  # of the settings; others have paths in them


def card(source: Source, weights: Weights, name: str) -> str:
    """In the form that the Hugging Face hub reads."""
    family = "qwen3" if source.settings.model.qk_norm else "llama"
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    header += ["tags:", "- fasttrain", f"- {family}", "---"]
    rows = [f"| {what} | {fact} |" for what, fact in _facts(source, weights)]
    settings = tomli_w.dumps({section: _stated(getattr(source.settings, section)) for section in SECTIONS})
    return "\n".join(
        [
            *header, "", f"# {name}", "",
            f"A {family.capitalize()} model of {weights.parameters:,} parameters, trained with fasttrain.", "",
            *_usage(source, name), "",
            "| | |", "|---|---|", *rows, "",
            "## Settings", "", "```toml", settings.strip(), "```", "",
        ]
    )  # fmt: skip


def _usage(source: Source, name: str) -> list[str]:
    lines = ["```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")']
    if source.tokenizer is not None:
        bos = "tokenizer.bos_token + " if source.separator_text is not None else ""
        lines += [
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            f'prompt = tokenizer({bos}"Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))",
        ]
    lines += ["```"]
    if source.separator is not None:
        lines += ["", f"Documents began with token {source.separator} in training: begin a prompt with it too."]
    return lines


def _facts(source: Source, weights: Weights) -> Iterator[tuple[str, Any]]:
    checkpoint, settings = source.checkpoint, source.settings
    yield "parameters", f"{weights.parameters:,}, as {str(weights.dtype).removeprefix('torch.')}"
    yield "step", f"{checkpoint.step:,} of {settings.batch.steps:,}"
    yield "tokens", f"{checkpoint.facts['progress']['tokens']:,}"
    yield "sequence", f"{settings.data.sequence:,} tokens"
    if settings.from_hf is not None:
        yield "started from", settings.from_hf.name
    for name, digest in checkpoint.facts["datasets"].items():
        yield f"data{f' {name}' if name else ''}", f"{_about(source, name)}sha256 {digest}"
    for line in source.validations:
        figures = {"loss": 4, "perplexity": 2, "bits_per_byte": 4, "accuracy": 4}
        known = [f"{key.replace('_', ' ')} {line[key]:.{digits}f}" for key, digits in figures.items() if key in line]
        yield f"validation, {line['set']}", ", ".join(known)
    if not source.validations and checkpoint.loss is not None:
        yield "validation", f"loss {checkpoint.loss:.4f}"
    ranks = checkpoint.facts["world"]
    on = f" on {source.hardware}" if source.hardware else ""
    yield "trained on", f"{ranks} rank{'s' * (ranks != 1)}{on}, precision {settings.parallel.precision}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in checkpoint.facts["versions"].items())


def _about(source: Source, name: str) -> str:
    """A dataset for people; its path is nobody else's business."""
    if source.data is None:
        return ""
    dataset = source.data.datasets[name]
    return f"{dataset.path.name}, {len(dataset.split('train')):,} tokens, "


def _stated(section: Any) -> dict[str, Any]:
    """TOML has no null."""
    return {key: value for key, value in asdict(section).items() if value is not None}
