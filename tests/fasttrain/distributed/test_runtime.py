"""Ranks that torchrun starts again find each other, not what the dead ones have left in its store."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

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
