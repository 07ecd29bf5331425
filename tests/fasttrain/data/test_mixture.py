"""Which dataset a sample comes from: exact shares, no repetition within an epoch, limits, and an irregular order."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import config
from fasttrain.data.batches import Batches, MixtureComponent
from fasttrain.data.cursor import DataCursor
from fasttrain.data.datasets import training_data
from fasttrain.data.order import BLOCK, Mixture, MixturePart
from fasttrain.data.stream import TokenStream

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
FROZEN = [1, 0, 1, 1, 0, 1, 0, 2, 0, 2, 1, 1, 0, 1, 1, 1]

weights = st.lists(
    st.one_of(st.integers(1, 9), st.floats(1e-4, 1.0)).map(lambda weight: Fraction(str(weight))),
    min_size=1,
    max_size=6,
)


@st.composite
def mixtures(draw, *, limited: bool = False) -> tuple[Mixture, list[MixturePart]]:
    found = draw(weights)
    limits = st.integers(0, 3000) if limited else st.none()
    parts = [MixturePart(weight, draw(limits), draw(st.integers(0, 50))) for weight in found]
    return Mixture(parts, seed=draw(st.integers(0, 2**64))), parts


def run_of(mixture: Mixture, stop: int) -> np.ndarray:
    return mixture.at(0, stop).parts


# --- shares


@EXAMPLES
@given(mixtures(), st.integers(0, 2**50))
def test_over_blocks_the_shares_are_exact_however_long_the_run(made, block):
    """Within a sample for each part; between blocks within a block."""
    mixture, parts = made
    total = sum(part.weight for part in parts)
    for sample in (block * BLOCK, block * BLOCK + 100):
        used = mixture.used_at(sample)
        assert sum(used) - sum(part.used for part in parts) == sample
        allowed = len(parts) / 2 + (BLOCK if sample % BLOCK else 0)
        for part, count in zip(parts, used, strict=True):
            assert abs(count - part.used - part.weight / total * sample) <= allowed


def test_shares_that_divide_a_block_are_met_in_each():
    mixture = Mixture(
        [MixturePart(Fraction("0.25")), MixturePart(Fraction("0.125")), MixturePart(Fraction("0.625"))], seed=0
    )
    blocks = run_of(mixture, 40 * BLOCK).reshape(40, BLOCK)
    assert all(np.bincount(block).tolist() == [BLOCK // 4, BLOCK // 8, BLOCK // 8 * 5] for block in blocks)


def test_a_rare_part_comes_as_often_as_it_should():
    mixture = Mixture([MixturePart(Fraction("0.999")), MixturePart(Fraction("0.001"))], seed=3)
    rare = np.flatnonzero(run_of(mixture, 100_000) == 1)
    assert len(rare) == 100
    assert np.diff(rare).max() < 1000 + 2 * BLOCK


# --- a pure function


@EXAMPLES
@given(mixtures(limited=True), st.integers(0, 4000), st.integers(1, 700))
def test_a_segment_does_not_depend_on_where_it_is_split(made, first, count):
    mixture, parts = made
    if mixture.length is not None:
        first, count = min(first, mixture.length // 2), min(count, mixture.length - mixture.length // 2)
    if not count:
        return
    whole, again = mixture.at(0, first + count), Mixture(parts, seed=0)
    segment = mixture.at(first, count)
    assert np.array_equal(segment.parts, whole.parts[first:])
    assert np.array_equal(segment.numbers, whole.numbers[first:])
    assert mixture.used_at(first) == [part.used + int((whole.parts[:first] == i).sum()) for i, part in enumerate(parts)]
    assert again.length == mixture.length  # the seed orders, and changes no share


@EXAMPLES
@given(mixtures(limited=True))
def test_each_part_counts_its_samples_one_by_one(made):
    """So that it sees each of its samples once per epoch, one epoch after the other."""
    mixture, parts = made
    stop = 2000 if mixture.length is None else min(2000, mixture.length)
    if not stop:
        return
    places = mixture.at(0, stop)
    for number, part in enumerate(parts):
        mine = places.numbers[places.parts == number]
        assert np.array_equal(mine, part.used + np.arange(len(mine)))


def test_the_order_is_frozen():
    """A resumed run must see the order that it began with, so that no later version may change it."""
    mixture = Mixture([MixturePart(Fraction(4)), MixturePart(Fraction(5)), MixturePart(Fraction(1))], seed=0)
    assert run_of(mixture, 16).tolist() == FROZEN


# --- limits


@EXAMPLES
@given(mixtures(limited=True))
def test_a_part_stops_exactly_at_its_limit_and_the_others_continue_in_their_proportions(made):
    mixture, parts = made
    assert mixture.length == sum(max(0, part.limit - part.used) for part in parts)
    if not mixture.length:
        return
    of_part = run_of(mixture, mixture.length)
    for number, part in enumerate(parts):
        mine = np.flatnonzero(of_part == number)
        assert len(mine) == max(0, part.limit - part.used)
        assert mixture.stops[number] >= (mine[-1] + 1 if len(mine) else 0)
    edges = sorted({0, *mixture.stops})
    for begin, end in itertools.pairwise(edges):
        active = [i for i in range(len(parts)) if mixture.stops[i] > begin]
        total = sum(parts[i].weight for i in active)
        for i in active:
            found = int((of_part[begin:end] == i).sum())
            assert abs(found - parts[i].weight / total * (end - begin)) <= len(parts) / 2


def test_a_mixture_without_limit_on_one_part_is_endless():
    mixture = Mixture([MixturePart(Fraction(1), 100), MixturePart(Fraction(1))], seed=0)
    assert mixture.length is None
    assert mixture.stops == [200, None]
    assert set(run_of(mixture, 10_000)[200:].tolist()) == {1}


def test_a_mixture_whose_parts_are_all_at_their_limits_is_over():
    mixture = Mixture([MixturePart(Fraction(1), 10, 10), MixturePart(Fraction(2), 20, 30)], seed=0)
    assert (mixture.length, mixture.stops, mixture.used_at(0)) == (0, [0, 0], [10, 30])


def test_beyond_its_length_there_is_nothing():
    mixture = Mixture([MixturePart(Fraction(1), 10), MixturePart(Fraction(1), 20)], seed=0)
    mixture.at(29, 1)
    with pytest.raises(ValueError, match="every part of the mixture has reached its limit after 30 samples"):
        mixture.at(29, 2)


# --- irregular


@pytest.mark.parametrize("share", ["0.5", "0.25", "0.1"])
def test_nothing_predicts_the_part_of_the_next_sample(share):
    """Runs of one part are as long as by chance, and neither place in a step nor lag correlates."""
    share = Fraction(share)
    hits = (run_of(Mixture([MixturePart(1 - share), MixturePart(share)], seed=1), 1600 * BLOCK) == 1).astype(float)
    p, n = float(share), len(hits)
    centred = hits - p
    for lag in (1, 2, 3, 8, 16, BLOCK, 100):
        correlation = (centred[:-lag] * centred[lag:]).mean() / (p * (1 - p))
        # a block is drawn without replacement: its members avoid each other a little
        assert abs(correlation + max(0, BLOCK - lag) / BLOCK / (BLOCK - 1)) < 4.5 / math.sqrt(n)
    for period in (8, 16, 64, 256):
        by_place = hits.reshape(-1, period).mean(0)
        assert np.abs(by_place - p).max() < 4.5 * math.sqrt(p * (1 - p) / (n / period))
    changes = (np.diff(hits) != 0).mean()
    assert changes == pytest.approx(2 * p * (1 - p) * (1 + 1 / BLOCK), abs=4.5 * math.sqrt(0.25 / n))


def test_blocks_and_seeds_have_orders_of_their_own():
    orders = [
        run_of(Mixture([MixturePart(Fraction(1)), MixturePart(Fraction(1))], seed=seed), 8 * BLOCK) for seed in range(4)
    ]
    blocks = np.concatenate([order.reshape(8, BLOCK) for order in orders])
    agreement = (blocks[:, None] == blocks[None]).mean(-1)[~np.eye(len(blocks), dtype=bool)]
    assert agreement.max() < 0.5 + 5 * math.sqrt(0.25 / BLOCK)


# --- batches


def stream_of(path: Path, tokens: int, first: int = 1) -> TokenStream:
    """Tokens count up from `first`; documents of 7."""
    path.mkdir()
    (path / "tokens").write_bytes(np.arange(first, first + tokens).astype("<u2").tobytes())
    ends = np.append(np.arange(7, tokens, 7), tokens)
    (path / "ends").write_bytes(ends.astype("<i8").tobytes())
    return TokenStream([path / "tokens"], [tokens], path / "ends", dtype=np.dtype("uint16"), separator=None)


@pytest.fixture
def components(tmp_path) -> list[MixtureComponent]:
    return [
        MixtureComponent("code", stream_of(tmp_path / "code", 801), 0.3),
        MixtureComponent("text", stream_of(tmp_path / "text", 4001, 1001), 0.5, 2),
        MixtureComponent("maths", stream_of(tmp_path / "maths", 401, 6001), 0.2, 1.5),
    ]


def batches_of(components, **options) -> Batches:
    return Batches(components, **dict(sequence=8, sequences=24, seed=0, document_mask=True) | options)


def test_rows_are_the_tokens_of_their_component(components):
    batches = batches_of(components)
    for step in (5, 0, 11):
        batch = batches.at(step)
        for row, (component, sample) in enumerate(zip(batch.components, batch.samples, strict=True)):
            first = (1, 1001, 6001)[component] + sample * 8
            assert batch.tokens[row].tolist() == list(range(first, first + 8))
        rows = batches.rows_at(step)
        assert np.array_equal(rows.components, batch.components)
        assert np.array_equal(rows.samples, batch.samples)
        assert len(np.unique(batch.components)) == 3


def test_documents_of_all_components_are_marked(components):
    for component, stream in ((i, c.stream) for i, c in enumerate(components)):
        batch = batches_of(components).at(2)
        alone = Batches(stream, sequence=8, sequences=1, seed=0, document_mask=True)
        for row in np.flatnonzero(batch.components == component)[:3]:
            (part,) = [batch.split(1)[row]]
            match = next(alone.at(s) for s in range(alone.sizes[0]) if alone.rows_at(s).samples[0] == part.samples[0])
            for name in ("tokens", "targets", "positions", "cu_seqlens"):
                assert torch.equal(getattr(part, name), getattr(match, name)), name


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_together_see_the_same_step_whatever_their_number(components, world):
    for step in (0, 7):
        whole = batches_of(components).at(step)
        parts = [batches_of(components, dp_rank=rank, dp_size=world).at(step) for rank in range(world)]
        for name in ("samples", "components"):
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)


def test_an_epoch_of_a_component_has_each_of_its_samples_once(components):
    batches = batches_of(components)
    rows = [batches.rows_at(step) for step in range(batches.sizes[1] // 24)]
    components_, samples = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
    for number, size in enumerate(batches.sizes):
        mine = samples[components_ == number]
        for epoch in range(len(mine) // size):
            assert np.array_equal(np.sort(mine[epoch * size : (epoch + 1) * size]), np.arange(size))
    assert len(mine) == 75  # one and a half epochs of 50, and no more
    limited = {line.partition(":")[0] for line in batches.summary(1000) if "all by step" in line}
    assert limited == {"text", "maths"}
    assert batches.epochs_at(20)["maths"] == 1.5


def test_the_end_of_the_data_is_known_in_advance(components):
    limited = [component._replace(epochs=0.5) for component in components]
    batches = batches_of(limited)
    assert batches.end == (50 + 250 + 25) // 24
    batches.at(batches.end - 1)
    with pytest.raises(ValueError, match="has reached its limit"):
        batches.at(batches.end)
    assert batches_of(components).end is None


def test_other_weights_and_other_components_continue_where_each_component_was(components):
    before = batches_of(components)
    used = before.used_at(6)
    changed = [components[1], components[0]._replace(weight=2.0), MixtureComponent("new", components[2].stream)]
    after = batches_of(changed, cursor=DataCursor(6, used))
    assert after.used_at(6) == {"text": used["text"], "code": used["code"], "new": 0}
    seen = {
        name: [
            int(sample)
            for batches, steps, order in ((before, range(6), "code text maths"), (after, range(6, 9), "text code new"))
            for step in steps
            for component, sample in zip(*batches.rows_at(step), strict=True)
            if order.split()[component] == name
        ]
        for name in ("code", "text")
    }
    for samples in seen.values():  # less than an epoch, and nothing twice
        assert len(set(samples)) == len(samples)
    with pytest.raises(ValueError, match="step 5 is before step 6"):
        after.at(5)


def test_the_same_data_under_two_names_has_two_orders(components):
    twice = [components[0], components[0]._replace(name="again")]
    rows = batches_of(twice, sequences=80).rows_at(0)
    one, other = rows.samples[rows.components == 0], rows.samples[rows.components == 1]
    length = min(len(one), len(other))
    assert (one[:length] == other[:length]).sum() < 8


# --- datasets


def mixture_of(**components: config.ComponentConfig) -> config.DataConfig:
    return config.DataConfig(mixture=components)


def test_a_mixture_has_a_digest_of_its_content_and_proportions(make_dataset):
    a, b, c = (make_dataset([length], name=name).path for name, length in (("a", 9), ("b", 10), ("c", 11)))

    def digest(path=b, **options) -> str:
        return training_data(
            mixture_of(x=config.ComponentConfig(path=a), y=config.ComponentConfig(path=path, **options))
        ).digest

    assert digest() == digest()
    assert (
        len(
            {
                digest(),
                digest(c),
                digest(weight=2.0),
                digest(epochs=3.0),
                training_data(config.DataConfig(path=a)).digest,
            }
        )
        == 5
    )


def test_components_must_have_the_same_tokenizer(make_dataset, tmp_path):
    a, b = make_dataset([9], name="a").path, make_dataset([9], name="b", vocab=100).path
    with pytest.raises(ValueError) as raised:
        training_data(mixture_of(x=config.ComponentConfig(path=a), y=config.ComponentConfig(path=b)))
    assert str(raised.value) == (
        f"data.mixture: x ({a}) and y ({b}) have different tokenizers: vocab 65536 and 100; prepare them with the same "
        "one (of data that does not say: data.tokenizer, data.vocab, data.separator)"
    )


def test_data_of_other_programs_mixes_with_prepared_data(make_dataset, tmp_path):
    prepared = make_dataset([9], vocab=100).path
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.bin").write_bytes(np.arange(50, dtype="<u2").tobytes())
    parts = dict(x=config.ComponentConfig(path=prepared), y=config.ComponentConfig(path=tmp_path / "raw"))
    data = training_data(config.DataConfig(mixture=parts, vocab=100, separator=0))
    assert [len(component.stream) for component in data.components("train")] == [9, 50]
    assert data.weights == {"x": 1.0, "y": 1.0}


def test_a_component_that_is_too_short_is_named(components):
    with pytest.raises(ValueError, match="a sequence of 500 needs 501 tokens, and there are 401 in maths; shorten"):
        batches_of(components, sequence=500)
