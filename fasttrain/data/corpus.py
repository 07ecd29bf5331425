"""The default dataset: the sources of Python's standard library, which every machine has, and a BPE trained on them.

Built once, in seconds, in the user's cache: ~/.cache/fasttrain, or $XDG_CACHE_HOME/fasttrain. Its name holds all that
decides about its content: the version of Python, the size of the vocabulary, and the recipe below.
"""

import os
import platform
import shutil
import sysconfig
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console

from fasttrain.data.dataset import PARTIAL, SourceFile
from fasttrain.data.prepare.tokenizer import encoder_of, trained_on
from fasttrain.data.writer import DatasetWriter, holds_out
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
    writer = DatasetWriter(
        path,
        tokenizer=tokenizer.json,
        vocab=tokenizer.size,
        separator=tokenizer.separator,
        source=f"the standard library of Python {platform.python_version()}, {sources}",
        files=[SourceFile.at(file) for file, _ in texts],
    )
    dtype = np.dtype(np.int64)
    tokens = encoder_of(tokenizer, dtype)([text for _, text in texts])
    with writer:
        for number, ((_, text), ids) in enumerate(zip(texts, tokens, strict=True)):
            data = text.encode()
            split = "validation" if holds_out(data, VALIDATION) else "train"
            writer.add(split, np.frombuffer(ids, dtype), num_bytes=len(data), source=(0, 1, number, len(data)))


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
