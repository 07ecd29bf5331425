import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.data import order
from fasttrain.data.order import cipher, network, place_of, walked

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
FROZEN = [581, 852, 161, 624, 352, 363, 956, 889]


def permuted(places: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    return walked(network, places, cipher(size, seed, epoch))


def samples_at(numbers: np.ndarray, *, size: int, seed: int) -> np.ndarray:
    return order.samples_at(np.zeros_like(numbers), numbers, sizes=[size], seeds=[seed])


def epoch_of(size: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permuted(np.arange(size), size=size, seed=seed, epoch=epoch)


def deviations(observed: np.ndarray, expected: float, freedom: int) -> float:
    """By how many standard deviations a chi-squared statistic is too large."""
    return (((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@EXAMPLES
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**32))
def test_an_epoch_has_every_sample_once(size, seed, epoch):
    assert np.array_equal(np.sort(epoch_of(size, seed, epoch)), np.arange(size))


def test_an_epoch_of_every_small_size_has_every_sample_once():
    for size in range(1, 300):
        assert np.array_equal(np.sort(epoch_of(size)), np.arange(size))


@EXAMPLES
@given(size=st.integers(2**40, 2**62), first=st.integers(0, 2**40))
def test_huge_epochs_stay_within_and_do_not_repeat(size, first):
    samples = permuted(np.arange(first, first + 1000), size=size, seed=0, epoch=0)
    assert samples.min() >= 0
    assert samples.max() < size
    assert len(np.unique(samples)) == 1000


@EXAMPLES
@given(size=st.integers(1, 2**62), seed=st.integers(0, 2**64), epoch=st.integers(0, 2**32))
def test_the_place_of_a_sample_is_found_again(size, seed, epoch):
    options = dict(size=size, seed=seed, epoch=epoch)
    places = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
    assert [place_of(sample, **options) for sample in permuted(places, **options).tolist()] == places.tolist()


def test_the_order_is_frozen():
    """A resumed run must see the order that it began with, so that no later version may change it."""
    assert samples_at(np.arange(8), size=1000, seed=0).tolist() == FROZEN


@EXAMPLES
@given(first=st.integers(0, 500), count=st.integers(1, 500), size=st.integers(1, 200))
def test_a_segment_of_a_run_does_not_depend_on_where_it_is_split(first, count, size):
    whole = samples_at(np.arange(first + count), size=size, seed=3)
    assert np.array_equal(samples_at(np.arange(first, first + count), size=size, seed=3), whole[first:])


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2000)), min_size=1, max_size=200))
def test_samples_of_several_datasets_are_those_of_each(rows):
    datasets, numbers = np.array(rows).T
    sizes, seeds = [7, 1000, 123], [5, 2**63, 0]
    found = order.samples_at(datasets, numbers, sizes=sizes, seeds=seeds)
    for dataset, number, sample in zip(datasets, numbers, found, strict=True):
        assert sample == samples_at(np.array([number]), size=sizes[dataset], seed=seeds[dataset])[0]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [epoch_of(1000, seed, epoch) for seed, epoch in itertools.product(range(5), range(5))]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 12  # 1 expected by chance


@pytest.mark.parametrize("size", [7, 10, 16, 25, 64])
def test_in_short_epochs_every_sample_is_as_likely_in_every_place(size):
    epochs = 3000
    orders = np.stack([epoch_of(size, seed=1, epoch=epoch) for epoch in range(epochs)])
    table = np.stack([(orders == sample).sum(0) for sample in range(size)])
    assert abs(deviations(table, epochs / size, (size - 1) ** 2)) < 4
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % size).ravel(), minlength=size)[1:]
    assert abs(deviations(steps, epochs, size - 2)) < 4  # which sample follows which


@pytest.mark.parametrize("size", [1000, 12_769, 100_003])  # 12,769 is a square: nothing is walked over
def test_in_long_epochs_nothing_predicts_the_next_sample(size):
    found = []
    for epoch in range(12):
        order = epoch_of(size, seed=7, epoch=epoch)
        side = math.isqrt(size - 1) + 1
        lags = [np.corrcoef(order[:-lag], order[lag:])[0, 1] * math.sqrt(size) for lag in (1, 2, 16, side - 1, side)]
        steps = np.bincount((order[1:] - order[:-1]) % size, minlength=size)[1:]
        tenth = np.histogram(order[: size // 10], bins=32, range=(0, size))[0]  # is a part of the run an even sample?
        found.append([*lags, deviations(steps, 1, size), deviations(tenth, size / 320, 31) * 0.9])
    mean, spread = np.mean(found, 0), np.std(found, 0)
    assert np.all(abs(mean) < 4 / math.sqrt(12))
    assert np.all(spread < 2)


def test_a_run_visits_every_sample_equally_often():
    seen = np.concatenate([samples_at(np.arange(step * 24, step * 24 + 24), size=107, seed=0) for step in range(107)])
    assert np.all(np.bincount(seen, minlength=107) == 24)
