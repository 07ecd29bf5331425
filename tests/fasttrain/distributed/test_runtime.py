"""Ranks that torchrun starts again find each other, not what the dead ones have left in its store."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fasttrain.config import ParallelConfig
from fasttrain.distributed import runtime
from fasttrain.distributed.runtime import _store_of_this_start


@pytest.fixture
def torchruns_store(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


@pytest.mark.parametrize("late", [None, 0, 2])
def test_every_start_has_a_store_of_its_own(torchruns_store, late):
    def start(rank: int) -> dist.Store:
        time.sleep(0.2 * (rank == late))
        return _store_of_this_start(rank, 3, timedelta(seconds=20))

    for number in range(3):
        with ThreadPoolExecutor(3) as ranks:
            stores = list(ranks.map(start, range(3)))
        assert not any(store.check(["address"]) for store in stores)  # of the start before
        stores[number].set("address", str(number))
        assert [store.get("address") for store in stores] == [str(number).encode()] * 3


def test_a_rank_does_not_wait_forever_for_the_first(torchruns_store):
    torchruns_store.set("fasttrain/start", "of ranks that are dead")
    with pytest.raises(TimeoutError, match=r"rank 1 heard nothing of rank 0 within 0.3 s \(parallel.timeout\)"):
        _store_of_this_start(1, 2, timedelta(seconds=0.3))


@pytest.mark.parametrize(
    ("asked", "cuda", "mps", "local", "chosen"),
    [
        ("auto", 0, False, 0, "cpu"),
        ("auto", 0, True, 0, "cpu"),  # nobody has tried it: only where it is asked for
        ("auto", 2, False, 1, "cuda:1"),
        ("cuda", 2, True, 0, "cuda:0"),
        ("cpu", 2, True, 0, "cpu"),
        ("mps", 0, True, 0, "mps"),
        ("cuda", 0, True, 0, "parallel.device is cuda, but torch .* sees no GPU; set it to cpu or auto"),
        ("auto", 2, False, 2, "this is process 2 of its machine, which has 2 GPUs; start torchrun with"),
        ("mps", 2, False, 0, "parallel.device is mps, but torch .* sees no such device; set it to auto"),
    ],
)
def test_what_a_process_runs_on(monkeypatch, asked, cuda, mps, local, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    if " " in chosen:
        with pytest.raises(ValueError, match=chosen):
            runtime.choose_device(asked, local)
    else:
        assert str(runtime.choose_device(asked, local)) == chosen


def test_apples_device_is_for_one_process_in_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    mps = runtime.choose_device("mps")
    assert runtime.resolve_precision("auto", mps) == "fp32"
    with pytest.raises(ValueError, match=r"parallel.precision is bf16, and on mps nothing but fp32 is possible"):
        runtime.resolve_precision("bf16", mps)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="parallel.device is mps, which one process uses alone; start it without"):
        runtime.choose_device("mps")


def test_too_few_open_files_are_said_at_once(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (24, 24))
    with (
        pytest.raises(ValueError, match="24 open files are allowed, and a run needs 64; raise the limit: ulimit -n"),
        runtime.start(ParallelConfig()),
    ):
        pass
