"""Which tokens are drawn, and how often: against distributions written by hand."""

import math

import pytest
import torch

from fasttrain.tools.generate import Sampling

SHARES = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2], dtype=torch.float64)  # likeliest first: 1, 3, 4, 2, 0
GRID = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000  # every place between 0 and 1 as often


def shares_drawn(sampling: Sampling, shares: torch.Tensor = SHARES) -> list[float]:
    """How much of all numbers between 0 and 1 leads to each token, to 1 / 20,000."""
    drawn = sampling.draw(shares.log().expand(len(GRID), -1), GRID)
    return (drawn.bincount(minlength=len(shares)) / len(GRID)).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    {
        "all": (dict(), [0.05, 0.4, 0.1, 0.25, 0.2]),
        "two": (dict(top_k=2), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        "more than there are": (dict(top_k=99), [0.05, 0.4, 0.1, 0.25, 0.2]),
        "a nucleus, reached within a token": (dict(top_p=0.5), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),
        "a nucleus, a little above two tokens": (dict(top_p=0.66), [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]),
        "the likeliest alone": (dict(top_p=1e-9), [0, 1, 0, 0, 0]),
        "of three the nucleus": (dict(top_k=3, top_p=0.7), [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]),  # .47, .29, .24
        "hot": (dict(temperature=2.0), [math.sqrt(p) / sum(map(math.sqrt, SHARES)) for p in SHARES]),
        "cold": (dict(temperature=0.5), [p**2 / sum(q**2 for q in SHARES.tolist()) for p in SHARES.tolist()]),
        "greedy": (dict(temperature=0.0), [0, 1, 0, 0, 0]),
    }.values(),
)
def test_every_token_has_its_share(options, expected):
    sampling = Sampling(**dict(temperature=1.0, top_k=0) | options)
    assert shares_drawn(sampling) == pytest.approx([float(p) for p in expected], abs=2e-4)


def test_a_nucleus_ends_exactly_where_it_is_reached():
    quarters = torch.tensor([0.125, 0.5, 0.25, 0.125], dtype=torch.float64)
    assert shares_drawn(Sampling(temperature=1.0, top_k=0, top_p=0.75), quarters) == pytest.approx(
        [0, 2 / 3, 1 / 3, 0], abs=2e-4
    )


def test_the_same_as_transformers_keeps():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * 3
    theirs = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(50)(None, TemperatureLogitsWarper(0.7)(None, logits)))
    sampling = Sampling(temperature=0.7, top_k=50, top_p=0.8)
    places = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    for row, kept in zip(logits, theirs, strict=True):
        drawn = sampling.draw(row.expand(len(places), -1), places).bincount(minlength=300) / len(places)
        torch.testing.assert_close(drawn, kept.softmax(-1), rtol=0, atol=6e-4)


def test_random_numbers_are_uniform_and_a_seeds_own():
    """Chi-square over 20 bins of 200 samples' numbers: below the 99.9th percentile of 19 degrees of freedom."""
    numbers = Sampling(seed=5).numbers(range(200), 50)
    counts = numbers.flatten().histc(20, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8
    torch.testing.assert_close(Sampling(seed=5).numbers([7, 3], 50), numbers[[7, 3]], rtol=0, atol=0)
    assert not torch.equal(Sampling(seed=6).numbers([7], 50), numbers[[7]])
    assert len(numbers.unique()) == numbers.numel()


def test_tokens_as_often_as_they_are_likely():
    """Chi-square of 5,000 draws with numbers of a seed, 4 degrees of freedom, 99.9th percentile."""
    numbers = Sampling(seed=1).numbers(range(5000), 1)[:, 0]
    drawn = Sampling(temperature=1.0, top_k=0).draw(SHARES.log().expand(5000, -1), numbers)
    expected = SHARES * 5000
    assert float(((drawn.bincount(minlength=5) - expected) ** 2 / expected).sum()) < 18.5


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_line(number):
    drawn = Sampling(temperature=1.0, top_k=3).draw(SHARES.log()[None], torch.tensor([number], dtype=torch.float64))
    assert drawn.item() == (1 if number == 0 else 4)
