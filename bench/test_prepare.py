"""The cost of data prepare: from files to a dataset, in one process, against tokenizers alone on the same text.

Rates are of CPU time, which a busy machine disturbs least, with one thread in both.
"""

import itertools
import json
import resource
import statistics
import sysconfig
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from bench.figures import rate, ratio
from fasttrain.data.dataset import Dataset
from fasttrain.data.prepare import prepare
from fasttrain.data.prepare.tokenizer import trained_on

RATIO = 1.3  # of the time that tokenizers needs
MARGIN = 0.3  # from run to run: each is measured once
WORKERS = 0.5  # of a lone worker's rate, each of two: with less, the second adds nothing
VOCAB = 8192
SIZE = 24e6  # bytes of text: what is done once weighs little
LIBRARY_SIZE = 8e6
ROUNDS = 3


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Sources and documentation of what Python has installed."""
    places = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    paths = itertools.chain.from_iterable(sorted(place.rglob("*.py")) for place in places)
    found: dict[str, None] = {}
    size = 0.0
    for path in paths:
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if len(text.strip()) >= 16 and "\0" not in text and text not in found:
            found[text] = None
            size += len(data)
        if size > SIZE:
            break
    return list(found)


@pytest.fixture(scope="module")
def tokenizer(texts, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(trained_on(texts[::8], VOCAB).json)
    return path


@pytest.fixture(scope="module")
def library_rate(texts, tokenizer) -> float:
    return rate_of_library(tokenizer, some_of(texts))


def some_of(texts: list[str]) -> list[str]:
    return texts[:: max(1, round(sum(map(len, texts)) / LIBRARY_SIZE))]


def rate_of_library(tokenizer: Path, texts: list[str]) -> float:
    """MB/s of tokenizers by itself, the text in memory and the tokens not even looked at."""
    loaded = Tokenizer.from_file(str(tokenizer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        begin = time.process_time()
        for first in range(0, len(texts), 64):
            loaded.encode_batch_fast(texts[first : first + 64], add_special_tokens=False)
        seconds = time.process_time() - begin
    return sum(len(text.encode()) for text in texts) / seconds / 1e6


@pytest.mark.parametrize("kind", ["jsonl", "texts"])
def test_preparing_is_faster_than_encoding_with_the_library(texts, tokenizer, library_rate, tmp_path, report, kind):
    inputs = tmp_path / "in"
    inputs.mkdir()
    if kind == "jsonl":
        (inputs / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        for number, text in enumerate(texts):
            (inputs / f"{number}.txt").write_bytes(text.encode())
    begin = time.process_time()
    prepare([inputs], tmp_path / "out", tokenizer=tokenizer, workers=1)
    seconds = time.process_time() - begin
    dataset = Dataset(tmp_path / "out")
    text = sum(split.bytes for split in dataset.manifest.splits.values()) / 1e6
    assert sum(split.documents for split in dataset.manifest.splits.values()) == len(texts)
    report(
        f"data_prepare_{kind}: {text:.0f} MB of Python to tokens of {VOCAB}, one thread",
        {
            "fasttrain data prepare": {
                "text": rate(text / seconds, "MB/s"),
                "of tokenizers' time": ratio(library_rate / (text / seconds), at_most=RATIO, margin=MARGIN),
            },
            "tokenizers alone": {"text": rate(library_rate, "MB/s")},
        },
    )


def test_a_tokenizer_that_only_the_library_knows(texts, tokenizer, tmp_path, report, monkeypatch):
    """Each run is measured between two of the library's: nothing is gained but what is around it."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    other = Tokenizer.from_file(str(tokenizer))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    other.save(str(tmp_path / "tokenizer.json"))
    ours, alone = [], []
    for round in range(ROUNDS):
        part = some_of(texts)[round::ROUNDS]
        inputs = tmp_path / f"{round}.jsonl"
        inputs.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        before = rate_of_library(tmp_path / "tokenizer.json", part)
        begin = time.process_time()
        prepare([inputs], tmp_path / str(round), tokenizer=tmp_path, workers=1)
        ours.append(sum(len(text.encode()) for text in part) / (time.process_time() - begin) / 1e6)
        alone.append(statistics.harmonic_mean((before, rate_of_library(tmp_path / "tokenizer.json", part))))
    taken = statistics.median(b / a for a, b in zip(ours, alone, strict=True))
    report(
        "data_prepare_library: another tokenizer, one thread",
        {
            "data prepare": {
                "text": rate(statistics.median(ours), "MB/s"),
                "of tokenizers' time": ratio(taken, at_most=RATIO, margin=MARGIN),
            },
            "tokenizers alone": {"text": rate(statistics.median(alone), "MB/s")},
        },
    )


def test_workers_share_the_work(texts, tokenizer, tmp_path, report):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    size = sum(len(text.encode()) for text in texts) / 1e6
    table = {}
    for workers in (1, 2):
        clocks, cpus = [], []
        for round in range(2):  # the better of two: a busy machine only slows
            begin = time.perf_counter(), _cpu()
            prepare([path], tmp_path / f"{workers}-{round}", tokenizer=tokenizer, workers=workers)
            clocks.append(time.perf_counter() - begin[0])
            cpus.append(_cpu() - begin[1])
        table[f"{workers} workers"] = {
            "text": rate(size / min(clocks), "MB/s"),
            "of a core": rate(size / min(cpus), "MB/s"),
        }
    of_one = table["2 workers"]["of a core"].value / table["1 workers"]["of a core"].value
    table["2 workers"]["of one worker's rate"] = ratio(of_one, at_least=WORKERS, margin=MARGIN)
    report(f"data_prepare_workers: {size:.0f} MB of JSONL, by the clock", table)


def _cpu() -> float:
    """Seconds of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
