"""Results come in order, mistakes reach the caller, and nobody is left behind."""

import multiprocessing
import os
import signal
import time

import pytest

from fasttrain.data.prepare.workers import in_another_process, in_order


@pytest.mark.parametrize("workers", [1, 3])
def test_results_are_in_the_order_of_the_items(workers):
    def slow_at_first(item):
        time.sleep(0.002 * (10 - item))
        return item * item

    assert list(in_order(lambda: slow_at_first, range(10), workers)) == [(item, item * item) for item in range(10)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_the_work_is_raised(workers):
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda: lambda item: 1 // item, [1, 0, 1], workers))
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_an_error_with_a_remedy():
    with pytest.raises(
        OSError, match="a worker was killed, perhaps because memory ran out; repeat the command to resume"
    ):
        list(in_order(lambda: lambda item: os.kill(os.getpid(), signal.SIGKILL), [1], 2))


def test_who_stops_early_does_not_wait_for_the_workers():
    begin = time.monotonic()
    results = in_order(lambda: lambda item: time.sleep(item) or item, [0, 60, 60], 2)
    assert next(results) == (0, 0)
    results.close()
    assert time.monotonic() - begin < 30
    assert not multiprocessing.active_children()


def test_few_items_are_read_ahead():
    read = []
    results = in_order(lambda: lambda item: item, (read.append(item) or item for item in range(100)), 2)
    next(results)
    assert len(read) == 4
    results.close()


def test_in_another_process():
    assert in_another_process(os.getpid) != os.getpid()
