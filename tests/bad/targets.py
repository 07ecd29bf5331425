"""The files that strangers write and fasttrain reads: how a good one is made, changed, and read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from fasttrain.checkpoint.committed import _digest, find
from fasttrain.checkpoint.resume import changed_content, changed_settings, check_metadata, cursor_after
from fasttrain.cli import main
from fasttrain.cli.parse import load
from fasttrain.config import Config, ModelConfig
from fasttrain.config_toml import from_toml
from fasttrain.data.datasets import AnyDataset, open_dataset
from fasttrain.data.formats.dataset import Described
from fasttrain.data.prepare.tokenizer import encoder_of, loaded
from fasttrain.data.segments import segment_at
from fasttrain.hf.config import architecture
from fasttrain.hf.export import Weights, card, describe
from fasttrain.hf.load import load_pretrained
from fasttrain.metrics.jsonl import last_step
from fasttrain.model import Decoder
from fasttrain.monitor import Monitor
from fasttrain.recipes import RECIPES
from fasttrain.tools.report.columns import columns_of
from fasttrain.tools.report.page import write_page
from fasttrain.tools.report.record import read_records
from fasttrain.train.state import Progress
from tests.bad.mutations import changed_bytes, changed_json, changed_lines, changed_value

Change = Callable[[st.DataObject, bytes], bytes]


class Target(NamedTuple):
    file: str  # in the directory
    change: Change
    read: Callable[[Path], Any]  # the directory, as commands do


def read_dataset(path: Path) -> None:
    use_dataset(open_dataset(path))


def use_dataset(dataset: AnyDataset) -> None:
    for name in dataset.splits:
        stream = dataset.split(name)
        length = min(len(stream), 33)
        starts = np.array([0, (len(stream) - length) // 2, len(stream) - length])
        stream.boundaries(starts, stream.windows(starts, length))
        dataset.bytes_per_token(name)
        dataset.source(name, 0)
    assert dataset.digest


def read_tokenizer(directory: Path) -> None:
    spec = loaded(directory / "tokenizer.json")
    encoder_of(spec, np.dtype(np.uint32))(["some text of two", "<|endoftext|>é"])
    use_dataset(open_dataset(directory / "train.bin", Described(tokenizer=directory / "tokenizer.json")))


def read_settings(directory: Path) -> None:
    text = (directory / "run.toml").read_bytes().decode(errors="replace")
    try:
        from_toml(text)
    except ValueError:
        load(["--config", str(directory / "run.toml"), "--optim.warmup", "1"], RECIPES)


def read_run(run: Path) -> None:
    columns_of.cache_clear()  # a file that has grown is otherwise not read again
    write_page(read_records([run]), run / "report.html")
    last_step(run)
    main(["checkpoint", "list", str(run)])


def locate(run: Path) -> None:
    main(["data", "locate", str(run), "--step", "1-2"])
    main(["data", "locate", str(run), "--document", "3"])


def draw(run: Path) -> None:
    from fasttrain.tools.report.picture import draw

    columns_of.cache_clear()
    draw(read_records([run]), run / "curves.svg")


def start_from(directory: Path) -> None:
    found = architecture(directory)
    model = ModelConfig(**found)  # type: ignore[arg-type]
    assert model.vocab
    load_pretrained(Decoder(model, vocab=model.vocab, sequence=8), directory)


def changed_header(data: st.DataObject, content: bytes) -> bytes:
    """Of safetensors: the JSON changed, and its length right."""
    length = struct.unpack("<Q", content[:8])[0]
    header = changed_json(data, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def changed_metadata(data: st.DataObject, content: bytes) -> bytes:
    """Of checkpoint.json: the metadata changed, and signed again."""
    found = json.loads(content)
    del found["sha256"]
    found["metadata"] = changed_value(data, found["metadata"])
    return json.dumps(found | {"sha256": _digest(found)}).encode()


def changed_toml_of_metadata(data: st.DataObject, content: bytes) -> bytes:
    found = json.loads(content)
    del found["sha256"]
    config = changed_bytes(data, found["metadata"]["config"].encode())
    found["metadata"]["config"] = config.decode(errors="replace")
    return json.dumps(found | {"sha256": _digest(found)}).encode()


def resume(run: Path) -> None:
    """What train --resume does with metadata, up to the first batches."""
    checkpoint = find(run)
    check_metadata(checkpoint)
    saved, settings = checkpoint.metadata, Config()
    try:
        changes = changed_settings(saved["config"], settings)
    except ValueError:
        settings = from_toml(saved["config"])
        changes = changed_settings(saved["config"], settings)
    segment = segment_at(run, 0)
    data = segment.open()
    changed_content(saved["datasets"], data.digests)
    progress = Progress.of(saved["progress"])
    cursor_after(progress.step, progress.cursor, saved, changes, settings, data.digests)
    batches = type(segment)(**vars(segment) | dict(cursor=progress.cursor)).batches(data)
    batches.at(progress.step)
    monitor = Monitor(settings, vocab=64)
    monitor.restore(saved["monitor"])
    for series in monitor._spikes._series.values():
        series.observe(3.0, 3.0)


def describe_for_export(run: Path) -> None:
    source = describe(find(run))
    import torch

    card(source, Weights(source.checkpoint, source.settings.model, torch.float32), "name")


CHECKPOINT = "checkpoints/step-00000006/checkpoint.json"
TARGETS: dict[str, dict[str, Target]] = {  # by the directory that is changed
    "dataset": {
        "dataset.json, values": Target("dataset.json", changed_json, read_dataset),
        "dataset.json, bytes": Target("dataset.json", changed_bytes, read_dataset),
        "sources.jsonl": Target("sources.jsonl", changed_lines, read_dataset),
    },
    "tokens": {
        "tokenizer.json, values": Target("tokenizer.json", changed_json, read_tokenizer),
        "tokenizer.json, bytes": Target("tokenizer.json", changed_bytes, read_tokenizer),
        "llm.c .bin": Target("train.bin", changed_bytes, lambda path: read_dataset(path / "train.bin")),
    },
    "megatron": {
        "Megatron .idx": Target("train.idx", changed_bytes, read_dataset),
        "Megatron .bin": Target("train.bin", changed_bytes, read_dataset),
    },
    "settings": {"config.toml": Target("run.toml", changed_bytes, read_settings)},
    "run": {
        "config.toml of a run": Target("config.toml", changed_bytes, read_run),
        "metrics.jsonl, values": Target("metrics.jsonl", changed_lines, read_run),
        "metrics.jsonl, bytes": Target("metrics.jsonl", changed_bytes, read_run),
        "metrics.jsonl, picture": Target("metrics.jsonl", changed_lines, draw),
        "metrics.jsonl, locate": Target("metrics.jsonl", changed_lines, locate),
        "validation.jsonl": Target("validation.jsonl", changed_lines, read_run),
        "events.jsonl": Target("events.jsonl", changed_lines, read_run),
        "batches.jsonl": Target("batches.jsonl", changed_lines, locate),
        "metadata, resume": Target(CHECKPOINT, changed_metadata, resume),
        "metadata, config": Target(CHECKPOINT, changed_toml_of_metadata, resume),
        "metadata, export": Target(CHECKPOINT, changed_metadata, describe_for_export),
        "metadata, list": Target(CHECKPOINT, changed_metadata, read_run),
    },
    "model": {
        "config.json": Target("config.json", changed_json, start_from),
        "index.json": Target("model.safetensors.index.json", changed_json, start_from),
        "safetensors, header": Target("model-00001-of-00002.safetensors", changed_header, start_from),
        "safetensors, bytes": Target("model-00001-of-00002.safetensors", changed_bytes, start_from),
    },
}
