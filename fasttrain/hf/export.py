"""A Hugging Face checkpoint of a run: weights, configuration, tokenizer, and a card of what the run says of it.

Weights go from a checkpoint's files to safetensors, without ever holding the model:

    a few tensors of the checkpoint  ->  split and rounded  ->  until a file is full  ->  written, forgotten

In memory are one file of the result, and what is read at once for it. Optimizer state is not read.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors.torch import save_file
from torch import Tensor

from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.checkpoint.resume import check_metadata
from fasttrain.checkpoint.state import TensorReader, check_finite, load, saved_tensors
from fasttrain.config import Config, ModelConfig
from fasttrain.config_toml import from_toml
from fasttrain.data.dataset import read_tokenizer
from fasttrain.data.datasets import TrainingData
from fasttrain.data.formats.dataset import SEPARATORS
from fasttrain.data.segments import segment_at
from fasttrain.distributed.runtime import DTYPES
from fasttrain.events import STARTS
from fasttrain.fs import free_bytes, new_directory
from fasttrain.grouping import grouped
from fasttrain.hf.names import INDEX, SINGLE, huggingface_config, parts
from fasttrain.metrics.jsonl import read_events, read_validations
from fasttrain.rundir import RunDir
from fasttrain.schema import parse
from fasttrain.units import disk_size, plural

NO_TOKENIZER = "none"  # as --tokenizer
SHARD = 5 * 10**9  # bytes of a file, as Transformers has it
SECTIONS = ("model", "batch", "optim")  # of the settings that the card shows; others have paths in them
_PADDED = 128  # rows that a stated vocabulary may have beyond the tokens, for speed
_READ_BYTES = 256 * 2**20  # in one call; a larger tensor is read alone
_OTHER_BYTES = 64 * 2**20  # of all but the weights


class Weights:
    """The tensors to write, by their names in Transformers. Making it reads the checkpoint's metadata only."""

    def __init__(self, checkpoint: Checkpoint, model: ModelConfig, dtype: torch.dtype) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        saved = {
            name.removeprefix("model."): tuple(tensor.size)
            for name, tensor in saved_tensors(checkpoint).items()
            if name.startswith("model.")
        }
        self.packed = parts(model, {name: size[0] for name, size in saved.items()})  # our tensors: their rows
        assert self.packed.keys() == saved.keys(), f"{checkpoint.path} has other tensors than its model"
        self.shapes = {
            theirs: (n, *saved[ours][1:]) for ours, rows in self.packed.items() for theirs, n in rows.items()
        }
        self.parameters = sum(map(math.prod, self.shapes.values()))
        self.bytes = self.parameters * dtype.itemsize

    def files(self, most: int) -> dict[str, list[str]]:
        """Names of files, at most so many bytes each unless one tensor has more, and the tensors in them."""
        groups = list(grouped(self.shapes, lambda name: math.prod(self.shapes[name]) * self.dtype.itemsize, most))
        if len(groups) == 1:
            return {SINGLE: groups[0]}
        return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}

    def write(self, directory: Path, most: int, on_progress: Callable[[int], None]) -> None:
        """Write the files, and the index if they are several; on_progress gets the bytes of each."""
        files = self.files(most)
        tensors = self._read(min(most // 4, _READ_BYTES))
        for file, names in files.items():
            state = dict(next(tensors) for _ in names)
            assert list(state) == names
            save_file(state, directory / file, metadata={"format": "pt"})
            (directory / file).chmod(directory.stat().st_mode & 0o666)  # safetensors keeps it to the user alone
            on_progress((directory / file).stat().st_size)
            del state  # before the next ones are read
        if len(files) > 1:
            places = {name: file for file, names in files.items() for name in names}
            totals = {"total_parameters": self.parameters, "total_size": self.bytes}
            index = {"metadata": totals, "weight_map": places}
            (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _read(self, most: int) -> Iterator[tuple[str, Tensor]]:
        """All tensors in order; of the checkpoint, so many bytes at a time."""
        reader = TensorReader(self.checkpoint)
        saved = reader.tensors
        names = {f"model.{ours}": rows for ours, rows in self.packed.items()}
        sizes = {name: math.prod(saved[name].size) * saved[name].properties.dtype.itemsize for name in names}
        for group in grouped(names, sizes.__getitem__, most):
            state = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in group}
            load(self.checkpoint, state, None, reader)
            check_finite(state, self.checkpoint)
            for name in group:
                rows = names[name]
                for theirs, part in zip(rows, state.pop(name).split(list(rows.values())), strict=True):
                    yield theirs, part.to(self.dtype)


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """A checkpoint, and its run as far as it can be read."""

    checkpoint: Checkpoint
    settings: Config
    vocab: int  # rows of the embedding
    data: TrainingData | None  # None: not here
    tokenizer: Path | None  # tokenizer.json
    separator: int | None
    separator_text: str | None
    validations: list[dict[str, Any]]  # at this step
    hardware: str

    @property
    def run(self) -> Path:
        return self.checkpoint.path.parent.parent


def describe(checkpoint: Checkpoint, tokenizer: str | None = None) -> ExportSource:
    """Read all but the weights. tokenizer: in place of the data's, a tokenizer.json or NO_TOKENIZER."""
    check_metadata(checkpoint)
    run = checkpoint.path.parent.parent
    vocab = saved_tensors(checkpoint)["model.embedding.weight"].size[0]
    data, trouble = _data(run, checkpoint.step)
    if data is None and tokenizer is None:
        raise ValueError(
            f"export: the tokenizer is with the data of the run: {trouble}. Or name it: --tokenizer tokenizer.json, or "
            f"--tokenizer {NO_TOKENIZER} to export without one"
        )
    path = None if tokenizer in (None, NO_TOKENIZER) else Path(tokenizer)
    if data is not None and tokenizer is None:
        data.tokenizer()  # compares it with its checksum
        path = next((dataset.tokenizer_path for dataset in data.datasets.values() if dataset.tokenizer_path), None)
    separator, text = _separator(path, data, vocab)
    starts = [event for event in read_events(run) if event["kind"] in STARTS]
    return ExportSource(
        checkpoint=checkpoint, settings=from_toml(checkpoint.metadata["config"]), vocab=vocab, data=data,
        tokenizer=path, separator=separator, separator_text=text,
        validations=[line for line in read_validations(run) if line["step"] == checkpoint.step],
        hardware=starts[-1]["evidence"].get("hardware", "") if starts else "",
    )  # fmt: skip


def _data(run: Path, step: int) -> tuple[TrainingData | None, str]:
    """The data that the run trained on, or why nobody knows."""
    if not (segments := RunDir(run).segments).exists():
        return None, f"{run} has no {segments.name} to say where that is"
    try:
        return segment_at(run, max(step - 1, 0)).open(), ""
    except (ValueError, OSError) as error:
        return None, str(error)


def _separator(path: Path | None, data: TrainingData | None, vocab: int) -> tuple[int | None, str | None]:
    """The token between documents, and its text: as the data has it, or by a usual name."""
    separator = data.first.separator if data else None
    if path is None:
        return separator, None
    if not path.exists():
        raise FileNotFoundError(f"export: there is no tokenizer {path}; name a tokenizer.json, or {NO_TOKENIZER}")
    tokenizer = read_tokenizer(path, "export")
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab:
        raise ValueError(
            f"export: {path} has tokens up to {largest}, and the embedding {vocab} rows: it is the tokenizer of "
            "another model"
        )
    if data is not None and largest + 1 <= data.first.vocab - _PADDED:
        raise ValueError(
            f"export: {path} has tokens up to {largest}, and the data of the run {data.first.vocab} tokens: it is the "
            "tokenizer of another model"
        )
    if data is None:
        numbers = (tokenizer.token_to_id(name) for name in SEPARATORS)
        separator = next((number for number in numbers if number is not None), None)
    return separator, None if separator is None else tokenizer.id_to_token(separator)


def export(
    source: ExportSource,
    out: Path,  # new, or empty
    *,
    dtype: str = "fp32",  # or bf16
    shard: int = SHARD,  # bytes of a file, at most
    on_progress: Callable[[int], None] = lambda _: None,  # bytes of weights written
) -> None:
    """Write a Hugging Face checkpoint. The caller has verified the source; nothing shows at `out` before the end."""
    model = source.settings.model
    found = Weights(source.checkpoint, model, DTYPES[dtype])
    if (free := free_bytes(out.absolute())) < found.bytes + _OTHER_BYTES:
        raise ValueError(
            f"export: {disk_size(found.bytes)} of weights do not fit in the {disk_size(free)} that are free at {out}; "
            "free some, or choose another --out"
        )
    with new_directory(out) as directory:
        found.write(directory, shard, on_progress)
        if source.tokenizer is not None:
            (directory / "tokenizer.json").write_text(_with_document_start(source), "utf-8")
            special = ("bos_token", "eos_token") if source.separator_text is not None else ()
            about = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
            about |= dict(model_max_length=source.settings.data.sequence)
            _dump(directory / "tokenizer_config.json", about | dict.fromkeys(special, source.separator_text))
        # Documents begin with the separator, which ends the one before.
        ends = ("bos_token_id", "eos_token_id", "pad_token_id") if source.separator is not None else ()
        _dump(directory / "generation_config.json", dict.fromkeys(ends, source.separator))
        (directory / "README.md").write_text(card(source, found, out.resolve().name), "utf-8")
        content = huggingface_config(model, vocab=source.vocab, sequence=source.settings.data.sequence)
        content["rope_theta"] = model.rope_theta  # for programs that do not know rope_parameters yet
        content["dtype"] = str(found.dtype).removeprefix("torch.")
        content |= dict.fromkeys(("bos_token_id", "eos_token_id"), source.separator)  # null: Llama's are others
        _dump(directory / "config.json", content)


def _with_document_start(source: ExportSource) -> str:
    """tokenizer.json that begins every text as a document began in training, as fasttrain generate does."""
    assert source.tokenizer
    content, text = parse(source.tokenizer.read_text("utf-8")), source.separator_text
    if text is None:
        return json.dumps(content, ensure_ascii=False)
    start = {"SpecialToken": {"id": text, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {
        "type": "TemplateProcessing", "single": [start, first], "pair": [start, first, second],
        "special_tokens": {text: {"id": text, "ids": [source.separator], "tokens": [text]}},
    }  # fmt: skip
    before = content.get("post_processor")
    if before and before["type"] == "ByteLevel":  # it adds no tokens, and what others add was not in training
        template = {"type": "Sequence", "processors": [before, template]}
    return json.dumps(content | {"post_processor": template}, ensure_ascii=False)


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def card(source: ExportSource, weights: Weights, name: str) -> str:
    """The model card, as the Hugging Face hub reads it."""
    family = "qwen3" if source.settings.model.qk_norm else "llama"
    rows = [f"| {what} | {value} |" for what, value in _rows(source, weights)]
    stated = {section: vars(getattr(source.settings, section)) for section in SECTIONS}
    settings = tomli_w.dumps(
        {name: {k: v for k, v in items.items() if v is not None} for name, items in stated.items()}
    )
    return "\n".join(
        [
            "---", "library_name: transformers", "pipeline_tag: text-generation",
            "tags:", "- fasttrain", f"- {family}", "---", "", f"# {name}", "",
            f"A {family.capitalize()} model of {weights.parameters:,} parameters, trained with fasttrain.", "",
            *_usage(source, name), "",
            "| | |", "|---|---|", *rows, "",
            "## Settings", "", "```toml", settings.strip(), "```", "",
        ]
    )  # fmt: skip


def _usage(source: ExportSource, name: str) -> list[str]:
    lines = ["```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto")']
    if source.tokenizer is not None:
        lines += [
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            'prompt = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))",
        ]
    lines += ["```"]
    if source.separator is not None:
        added = "the tokenizer begins a text with it" if source.tokenizer else "begin a prompt with it too"
        lines += ["", f"Documents began with token {source.separator} in training: {added}."]
    return lines


def _rows(source: ExportSource, weights: Weights) -> Iterator[tuple[str, Any]]:
    checkpoint, settings = source.checkpoint, source.settings
    yield "parameters", f"{weights.parameters:,}, as {str(weights.dtype).removeprefix('torch.')}"
    yield "step", f"{checkpoint.step:,} of {settings.batch.steps:,}"
    yield "tokens", f"{checkpoint.metadata['progress']['tokens']:,}"
    yield "sequence", f"{settings.data.sequence:,} tokens"
    if settings.from_hf is not None:
        yield "started from", settings.from_hf.name
    for name, digest in checkpoint.metadata["datasets"].items():
        about = ""
        if source.data is not None:  # its whole path is nobody else's business
            dataset = source.data.datasets[name]
            about = f"{dataset.path.name}, {len(dataset.split('train')):,} tokens, "
        yield f"data {name}".rstrip(), f"{about}sha256 {digest}"
    for line in source.validations:
        figures = {"loss": 4, "perplexity": 2, "bits_per_byte": 4, "accuracy": 4}
        known = [f"{key.replace('_', ' ')} {line[key]:.{digits}f}" for key, digits in figures.items() if key in line]
        yield f"validation, {line['set']}", ", ".join(known)
    if not source.validations and checkpoint.loss is not None:
        yield "validation", f"loss {checkpoint.loss:.4f}"
    on = f" on {source.hardware}" if source.hardware else ""
    ranks = plural(checkpoint.metadata["world_size"], "rank")
    yield "trained on", f"{ranks}{on}, precision {settings.parallel.precision}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in checkpoint.metadata["versions"].items())
