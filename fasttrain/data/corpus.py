"""The default dataset: the sources of Python's standard library, which every machine has, and a BPE trained on them.

Built once, in seconds, in the user's cache: ~/.cache/fasttrain, or $XDG_CACHE_HOME/fasttrain. Its name holds all that
decides about its content: the version of Python, the size of the vocabulary, and the recipe below.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track

from fasttrain.data.manifest import PARTIAL
from fasttrain.data.writer import DatasetWriter, holds_out

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RECIPE = 1  # of everything below: a change that changes the tokens takes the next number
VOCAB = 4096
VALIDATION = 0.03  # share of the documents
SEPARATOR = "<|endoftext|>"
# encodings: tables of characters
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
TRAINED_ON = 4  # the tokenizer sees every fourth document: all of them take 6x the time for 1.4% fewer tokens
TOGETHER = 64  # documents encoded at a time: enough for every core; an encoding is many times the size of its text


def standard_library(cache: Path | None = None, *, sources: Path | None = None) -> Path:
    """The directory of the default dataset in `cache`, built if need be from the .py files below `sources`."""
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttrain"
    path = cache / f"stdlib-{platform.python_version()}-bpe{VOCAB}-v{RECIPE}"
    if not path.exists():
        with _alone(path):  # the other processes of a run wait here, then find it
            if not path.exists():
                with suppress(FileExistsError):  # without locks, others may be faster: what they made is the same
                    _build(path, sources or Path(sysconfig.get_path("stdlib")))
    return path


def _build(path: Path, sources: Path) -> None:
    texts = _texts(sources)
    if not texts:
        raise FileNotFoundError(
            f"dataset: no Python sources in {sources}, of which the default dataset is made; set data.path"
        )
    console = Console(stderr=True)
    console.print(f"preparing the default dataset, once: {path}", highlight=False, soft_wrap=True)
    tokenizer = _trained(texts[::TRAINED_ON])
    writer = DatasetWriter(
        path,
        tokenizer=tokenizer.to_str(),
        vocab=tokenizer.get_vocab_size(),
        separator=tokenizer.get_vocab()[SEPARATOR],
        source=f"the standard library of Python {platform.python_version()}, {sources}",
    )
    pieces = [texts[first : first + TOGETHER] for first in range(0, len(texts), TOGETHER)]
    with writer:
        for piece in track(pieces, "encoding", console=console, transient=True, disable=not console.is_terminal):
            for text, encoding in zip(piece, tokenizer.encode_batch_fast(piece), strict=True):
                data = text.encode()
                split = "validation" if holds_out(data, VALIDATION) else "train"
                writer.add(split, np.array(encoding.ids), num_bytes=len(data))


def _texts(sources: Path) -> list[str]:
    """What is not empty and UTF-8, in the order of the paths."""
    relative = (p.relative_to(sources) for p in sources.rglob("*.py"))
    texts = []
    for path in sorted((p for p in relative if not LEFT_OUT & set(p.parts)), key=Path.as_posix):
        try:
            text = (sources / path).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append(text)
    return texts


def _trained(texts: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so that nothing is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True  # a source that spells the separator does not end its document
    return tokenizer


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time, where the file system has locks; the system frees that of a process that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for partial in path.parent.glob(f".{path.name}{PARTIAL}*"):  # of processes that died: this one is alone
                shutil.rmtree(partial, ignore_errors=True)
        yield
