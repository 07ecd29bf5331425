"""The default dataset: the sources of Python's standard library, which every machine has, and a BPE trained on them.

Built once, in seconds, in the user's cache: ~/.cache/fasttrain, or $XDG_CACHE_HOME/fasttrain. Its name holds all that
decides about its content: the version of Python, the size of the vocabulary, and the recipe below.
"""

import os
import platform
import shutil
import sysconfig
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console

from fasttrain.data.dataset import PARTIAL, RECORD, SourceFile
from fasttrain.data.prepare.tokenizer import encoder_of, trained_on
from fasttrain.data.writer import DatasetFiles, holds_out
from fasttrain.fs import exclusive_lock

RECIPE = 2  # of everything below: a change that changes a file takes the next number
VOCAB = 4096
VALIDATION = 0.03  # share of the documents
# encodings: tables of characters
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
TOKENIZER_EVERY = 4  # the tokenizer sees every fourth document: all of them take 6x the time for 1.4% fewer tokens


def standard_library(cache: Path | None = None, *, sources: Path | None = None) -> Path:
    """The directory of the default dataset in `cache`, built if need be from the .py files below `sources`."""
    path = standard_library_path(cache)
    if not path.exists():
        lock = path.with_name(path.name + ".lock")
        with exclusive_lock(lock, None) as locked:  # the other processes of a run wait here, then find it
            for partial in path.parent.glob(f".{path.name}{PARTIAL}*") if locked else ():  # of processes that died
                shutil.rmtree(partial, ignore_errors=True)
            if not path.exists():
                with suppress(FileExistsError):  # without locks, others may be faster: what they made is the same
                    _build(path, sources or Path(sysconfig.get_path("stdlib")))
    return path


def standard_library_path(cache: Path | None = None) -> Path:
    """Where the default dataset is, or will be."""
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fasttrain"
    return cache / f"stdlib-{platform.python_version()}-bpe{VOCAB}-v{RECIPE}"


def _build(path: Path, sources: Path) -> None:
    texts = _texts(sources)
    if not texts:
        raise FileNotFoundError(
            f"dataset: no Python sources in {sources}, of which the default dataset is made; set data.path"
        )
    console = Console(stderr=True)
    console.print(f"preparing the default dataset, once: {path}", highlight=False, soft_wrap=True)
    tokenizer = trained_on([text for _, text in texts[::TOKENIZER_EVERY]], VOCAB)
    partial = path.with_name(f".{path.name}{PARTIAL}{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        files = DatasetFiles(partial, vocab=tokenizer.size, separator=tokenizer.separator)
        separator = np.array([tokenizer.separator], files.dtype)
        encoded = encoder_of(tokenizer, files.dtype)([text for _, text in texts])
        for number, ((_, text), ids) in enumerate(zip(texts, encoded, strict=True)):
            data, tokens = text.encode(), np.concatenate([separator, np.frombuffer(ids, files.dtype)])
            split = "validation" if holds_out(data, VALIDATION) else "train"
            record, lengths = np.array([(0, 1, number, len(data))], RECORD), np.array([len(tokens)])
            files.add(split, tokens, lengths=lengths, num_bytes=len(data), sources=record)
        name = f"the standard library of Python {platform.python_version()}, {sources}"
        listed = [SourceFile.at(file).dump() for file, _ in texts]
        files.complete(path, tokenizer=tokenizer.json, source=name, sources=listed)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already once complete


def _texts(sources: Path) -> list[tuple[Path, str]]:
    """All files that are not empty and UTF-8, in the order of the paths."""
    relative = (p.relative_to(sources) for p in sources.rglob("*.py"))
    texts = []
    for path in sorted((p for p in relative if not EXCLUDED & set(p.parts)), key=Path.as_posix):
        try:
            text = (sources / path).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts.append((sources / path, text))
    return texts
