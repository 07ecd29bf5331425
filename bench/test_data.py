"""The cost of data: building the default dataset, opening it, and the batches of a step from page cache on one core.

Rates are of CPU time, which a busy machine disturbs least; the build is measured in wall time, as a user would.
"""

import statistics
import time

import pytest

from bench.figures import Figure, rate, ratio, seconds
from fasttrain.data.batches import Batches, MixtureComponent, Prefetcher
from fasttrain.data.corpus import standard_library
from fasttrain.data.dataset import Dataset
from fasttrain.distributed.runtime import keep_freed_memory

BUILD_SECONDS = 15  # by the clock, on 2 cores
FIRST_BATCH_SECONDS = 0.1
TOKENS_PER_SECOND = 50e6
STEP = 0.02  # seconds: a very short training step
SHAPES = [(512, 256), (32, 1024), (64, 2048), (8, 4096)]  # sequences of a rank, their tokens


@pytest.fixture(scope="module", autouse=True)
def memory():
    keep_freed_memory()  # as a run does


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    clock, cpu = time.perf_counter(), time.process_time()
    path = standard_library(cache)
    return path, time.perf_counter() - clock, time.process_time() - cpu


def test_the_default_dataset_is_built_in_seconds_and_opened_at_once(built, report):
    path, clock, cpu = built
    begin = time.perf_counter()
    stream = Dataset(standard_library(path.parent)).split("train")
    opened = time.perf_counter() - begin
    begin = time.perf_counter()
    Batches(stream, sequence=256, sequences=16, seed=0, document_mask=True).at(0)
    first = time.perf_counter() - begin
    report(
        f"data_build: {len(stream) / 1e6:.1f}M tokens of Python's standard library",
        {
            "build": {"clock": seconds(clock, at_most=BUILD_SECONDS), "CPU": seconds(cpu)},
            "open": {"clock": seconds(opened)},
            "and a first batch": {"clock": seconds(opened + first, at_most=FIRST_BATCH_SECONDS)},
        },
    )


def test_batches_are_made_far_faster_than_anyone_trains(built, report):
    stream = Dataset(built[0]).split("train")
    table: dict[str, dict[str, Figure]] = {}
    for sequences, sequence in SHAPES:
        row = table[f"{sequences} x {sequence}"] = {}
        for document_mask in (False, True):
            batches = Batches(stream, sequence=sequence, sequences=sequences, seed=0, document_mask=document_mask)
            tokens = sequences * sequence / seconds_of(batches.at)
            row["masked" if document_mask else "plain"] = rate(tokens / 1e6, "M/s", at_least=TOKENS_PER_SECOND / 1e6)
    report("data_rate: tokens of batches from page cache, one core", table)


def test_a_mixture_is_as_fast(built, report):
    stream = Dataset(built[0]).split("train")
    mixture = [
        MixtureComponent("half", stream, 0.5),
        MixtureComponent("third", stream, 0.3, 100),
        MixtureComponent("rest", stream, 0.2),
    ]
    table: dict[str, dict[str, Figure]] = {}
    for sequences, sequence in SHAPES:
        row = table[f"{sequences} x {sequence}"] = {}
        for name, data in (("one dataset", stream), ("three", mixture)):
            batches = Batches(data, sequence=sequence, sequences=sequences, seed=0, document_mask=True)
            least = TOKENS_PER_SECOND / 1e6 if (sequences, sequence, name) == (64, 2048, "three") else None
            row[name] = rate(sequences * sequence / seconds_of(batches.at) / 1e6, "M/s", at_least=least)
    report("data_mixture: tokens of batches from page cache, one core, with document mask", table)


def seconds_of(read, steps: int = 30) -> float:
    read(0)
    times = []
    for step in range(steps):
        begin = time.process_time()
        read(step)
        times.append(time.process_time() - begin)
    return statistics.median(times)


def test_a_step_does_not_wait_for_data(built, report):
    stream = Dataset(built[0]).split("train")
    batches = Batches(stream, sequence=2048, sequences=64, seed=0, document_mask=True)
    with Prefetcher(lambda step: batches.at(step).split(8), ahead=4) as prefetcher:
        waits = []
        for step in range(20):
            prefetcher.at(step)
            waits.append(prefetcher.waited)
            time.sleep(STEP)
    wait = statistics.median(waits)
    figures = {"median": seconds(wait), "of a step": ratio(wait / STEP, at_most=0.02, margin=None)}
    report("data_wait: 64 x 2048 tokens every 20 ms", {"prefetched": figures})
