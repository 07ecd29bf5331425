"""Datasets with defects: DatasetWriter refuses to write them, so that the files are written here, token by token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fasttrain.data.dataset import Dataset
from fasttrain.data.lint import LintFinding, LintReport
from tests.datasets import DatasetWriter

SEPARATOR, PAD = 256, 257
VOCAB = 258
TEXT = "the cat sat on a mat while dogs barked at night and rain fell over hills beyond towns where people slept"


def byte_tokenizer() -> str:
    """An id for each byte, a separator and padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|separator|>", "<|pad|>"])
    return tokenizer.to_str()


TOKENIZER = byte_tokenizer()


_TOKENIZER = Tokenizer.from_str(TOKENIZER)


def encoded(text: str) -> list[int]:
    return _TOKENIZER.encode(text, add_special_tokens=False).ids


def texts(count: int, *, seed: int = 0, words: int = 30) -> list[str]:
    """Different from each other, without loops."""
    rng, vocabulary = np.random.default_rng(seed), TEXT.split()
    return [" ".join(rng.choice(vocabulary, words)) + f" {seed} {i}" for i in range(count)]


def documents(count: int, *, seed: int = 0, words: int = 30) -> list[list[int]]:
    """As a dataset has them: a separator each, then the text."""
    return [[SEPARATOR, *encoded(text)] for text in texts(count, seed=seed, words=words)]


def write(
    path: Path, train: Sequence[Sequence[int]], validation: Sequence[Sequence[int]] = (), *, shard: int | None = None
) -> Dataset:
    """A dataset of these documents, whatever they hold. shard: tokens of each file."""
    splits = {"train": train} | ({"validation": validation} if len(validation) else {})
    with DatasetWriter(path, tokenizer=TOKENIZER, vocab=VOCAB, separator=SEPARATOR, source="a test") as writer:
        for split in splits:
            writer.add(split, np.array([1]), num_bytes=1)
    manifest = json.loads((path / "dataset.json").read_text())
    for split, content in splits.items():
        metadata = manifest["splits"][split]
        tokens = np.array([token for document in content for token in document], "<u2")
        ends = np.cumsum([len(document) for document in content]).astype("<i8")
        metadata |= dict(tokens=len(tokens), documents=len(ends), bytes=len(tokens))
        metadata["shards"] = []
        for number, first in enumerate(range(0, len(tokens), shard or len(tokens))):
            chunk = tokens[first : first + (shard or len(tokens))]
            chunk.tofile(path / f"{split}-{number:05}.tokens")
            digest = hashlib.sha256(chunk.tobytes()).hexdigest()
            metadata["shards"].append(dict(name=f"{split}-{number:05}.tokens", size=chunk.nbytes, sha256=digest))
        ends.tofile(path / f"{split}.documents")
        metadata["index"] |= dict(size=ends.nbytes, sha256=hashlib.sha256(ends.tobytes()).hexdigest())
    (path / "dataset.json").write_text(json.dumps(manifest))
    return Dataset(path)


def found(report: LintReport, check: str, split: str = "train") -> LintFinding:
    (finding,) = [f for f in report.findings if f.check == check and f.split == split]
    return finding


def faults(report: LintReport) -> dict[str, str]:
    return {finding.check: finding.severity for finding in report.findings if finding.severity != "ok"}
