import threading
import time

import pytest

from fasttrain.data import Batches, Prefetcher


class Reader:
    """Counts what is read, and can be slow, or fail at a step."""

    def __init__(self, seconds: float = 0.0, broken: int | None = None) -> None:
        self.seconds, self.broken, self.steps = seconds, broken, []

    def __call__(self, step: int) -> int:
        time.sleep(self.seconds)
        self.steps.append(step)
        if step == self.broken:
            raise OSError(f"step {step} cannot be read")
        return step * 10

    def has_read(self, *steps: int) -> bool:
        deadline = time.monotonic() + 10
        while not set(steps) <= set(self.steps) and time.monotonic() < deadline:
            time.sleep(0.001)
        return set(steps) <= set(self.steps)


def test_steps_come_in_order_and_are_read_once():
    reader = Reader()
    with Prefetcher(reader, ahead=3) as prefetcher:
        assert [prefetcher.at(step) for step in range(20)] == [step * 10 for step in range(20)]
    assert reader.steps[:20] == list(range(20))
    assert len(reader.steps) <= 23


def test_the_next_steps_are_read_meanwhile_and_no_more():
    reader = Reader()
    with Prefetcher(reader, ahead=2) as prefetcher:
        prefetcher.at(5)
        assert reader.has_read(5, 6, 7)
        time.sleep(0.02)
        assert reader.steps == [5, 6, 7]


def test_nothing_is_read_ahead_of_the_end():
    reader = Reader()
    with Prefetcher(reader, ahead=4, stop=7) as prefetcher:
        assert [prefetcher.at(step) for step in (5, 6)] == [50, 60]
        assert prefetcher.at(9) == 90  # asked for, so read
    assert reader.steps == [5, 6, 9]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_any_step_may_follow_any_other(ahead):
    steps = [3, 4, 100, 101, 5, 5, 0, 102]
    with Prefetcher(Reader(), ahead=ahead) as prefetcher:
        assert [prefetcher.at(step) for step in steps] == [step * 10 for step in steps]


def test_an_error_is_raised_by_its_own_step_each_time():
    with Prefetcher(Reader(broken=3), ahead=4) as prefetcher:
        assert [prefetcher.at(step) for step in range(3)] == [0, 10, 20]
        for _ in range(2):
            with pytest.raises(OSError, match="step 3 cannot be read"):
                prefetcher.at(3)
        assert prefetcher.at(4) == 40


def test_waiting_is_measured():
    reader = Reader(seconds=0.2)
    with Prefetcher(reader, ahead=2) as prefetcher:
        prefetcher.at(0)
        assert prefetcher.waited >= 0.2
        assert reader.has_read(1, 2)
        prefetcher.at(1)
        assert prefetcher.waited < 0.15  # it was there


def test_closing_ends_the_thread_early():
    reader = Reader(seconds=0.05)
    before = threading.active_count()
    with Prefetcher(reader, ahead=100) as prefetcher:
        prefetcher.at(0)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert len(reader.steps) < 50


def test_it_stands_in_for_batches(make_dataset):
    batches = Batches(make_dataset([50] * 20).split("train"), sequence=16, sequences=4, seed=0, document_mask=True)
    with Prefetcher(lambda step: batches.at(step).split(2), ahead=3) as prefetcher:
        for step in (0, 1, 2, 40):
            pieces = prefetcher.at(step)
            assert [piece.tokens.tolist() for piece in pieces] == [
                piece.tokens.tolist() for piece in batches.at(step).split(2)
            ]
