"""Batches are a function of the step: for any ranks, skips, documents and order of steps; and read ahead."""

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.data.batches import IGNORED, Batch, Batches, MixtureComponent, Prefetcher
from fasttrain.data.cursor import DataCursor, Skip
from fasttrain.data.stream import TokenStream

LENGTHS = [7, 1, 1, 30, 2, 5, 8, 8, 8, 1, 40, 3, 16, 9]  # of documents, separator included


def stream_of(lengths: list[int], *, separator: bool = True, path) -> TokenStream:
    """Documents whose tokens tell their place: token number i of the stream is i + 1, separators are 0."""
    ends = np.cumsum(lengths)
    tokens = np.arange(1, ends[-1] + 1)
    if separator:
        tokens[np.concatenate([[0], ends[:-1]])] = 0
    (path / "tokens").write_bytes(tokens.astype("<u2").tobytes())
    (path / "ends").write_bytes(ends.astype("<i8").tobytes())
    return TokenStream(
        [path / "tokens"], [len(tokens)], path / "ends", dtype=np.dtype("uint16"), separator=0 if separator else None
    )


@pytest.fixture
def stream(tmp_path) -> TokenStream:
    return stream_of(LENGTHS * 3, path=tmp_path)


def batches_of(stream: TokenStream, **options) -> Batches:
    return Batches(stream, **dict(sequence=8, sequences=4, seed=0, document_mask=True) | options)


def same(one: Batch, other: Batch) -> bool:
    tensors = ("tokens", "targets", "positions", "cu_seqlens")
    equal = [
        torch.equal(getattr(one, name), getattr(other, name)) for name in tensors if getattr(one, name) is not None
    ]
    return all(equal) and np.array_equal(one.samples, other.samples)


def test_a_step_is_the_same_batch_whenever_and_whoever_asks(stream):
    forwards = [batches_of(stream).at(step) for step in range(12)]
    again = batches_of(stream)
    assert all(same(again.at(step), forwards[step]) for step in reversed(range(12)))
    assert not same(forwards[0], forwards[1])
    assert not same(forwards[0], batches_of(stream, seed=1).at(0))


def test_the_longest_document_travels_with_the_batch(stream):
    """As an int of few values, in whole batches and in micro-batches, and below B * T."""
    seen = set()
    for step in range(12):
        batch = batches_of(stream).at(step)
        for micro in (batch, *batch.split(2), *batch.split(1)):
            longest = int(micro.cu_seqlens.diff().max())
            assert type(micro.max_seqlen) is int
            assert longest <= micro.max_seqlen < 2 * longest
            assert micro.max_seqlen <= 8
            seen.add(micro.max_seqlen)
        assert batch.to("cpu").max_seqlen == batch.max_seqlen == batch.inputs()[4]
        assert batch.pad_documents().max_seqlen is None  # a CUDA graph has one grid for all
    assert seen <= {1, 2, 4, 8}
    assert batches_of(stream, document_mask=False).at(0).max_seqlen is None


def test_a_skip_skips_the_batches_of_some_steps_and_changes_no_other(stream):
    whole, skipping = batches_of(stream), batches_of(stream, cursor=DataCursor(skips=(Skip(3, 2), Skip(6, 1))))
    came = [step for step in range(12) if step not in (3, 4, 8)]
    assert all(same(skipping.at(step), whole.at(before)) for step, before in enumerate(came))
    assert skipping.used_at(7) == whole.used_at(10)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(skips=st.lists(st.builds(Skip, st.integers(0, 20), st.integers(1, 4)), max_size=4))
def test_a_later_skip_is_in_the_steps_that_earlier_ones_have_left(tmp_path_factory, skips):
    stream = stream_of(LENGTHS, path=tmp_path_factory.mktemp("stream"))
    left = list(range(100))
    for skip in skips:
        del left[skip.step : skip.step + skip.steps]
    whole, skipping = batches_of(stream), batches_of(stream, cursor=DataCursor(skips=tuple(skips)))
    assert [skipping.used_at(step) for step in range(40)] == [whole.used_at(step) for step in left[:40]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    weight=st.sampled_from([0.2, 1.0, 3.0]),
    epochs=st.sampled_from([0.0, 2.0]),
    cursor=st.sampled_from([DataCursor(), DataCursor(4, {"a": 13, "b": 30})]),
    skips=st.lists(st.builds(Skip, st.integers(5, 20), st.integers(1, 4)), max_size=2),
)
def test_the_steps_of_a_sample_are_those_whose_batches_hold_it(tmp_path_factory, weight, epochs, cursor, skips):
    data = [
        MixtureComponent("a", stream_of(LENGTHS, path=tmp_path_factory.mktemp("a")), weight, epochs),
        MixtureComponent("b", stream_of(LENGTHS * 2, path=tmp_path_factory.mktemp("b"))),
    ]
    batches = batches_of(data, cursor=replace(cursor, skips=tuple(skips)))  # type: ignore[arg-type]
    seen: dict[Any, Any] = {}
    for step in range(cursor.step, 24):
        for row, taken in enumerate(zip(*map(np.ndarray.tolist, batches.rows_at(step)), strict=True)):
            seen.setdefault(taken, []).append((step, row))
    for component, size in enumerate(batches.sizes):
        for sample in range(size):
            assert list(batches.steps_of(component, sample, 24)) == seen.get((component, sample), [])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ranks_together_see_the_same_step_whatever_their_number(stream, world):
    options = dict(sequences=24, document_mask=False)
    for step in (0, 1, 5):
        whole = batches_of(stream, **options).at(step)
        parts = [batches_of(stream, **options, dp_rank=rank, dp_size=world).at(step) for rank in range(world)]
        assert np.array_equal(np.concatenate([part.samples for part in parts]), whole.samples)
        assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_the_order_of_the_run_does_not_depend_on_the_size_of_a_step(stream):
    small = np.concatenate([batches_of(stream, sequences=3).rows_at(step).samples for step in range(8)])
    assert np.array_equal(
        small, np.concatenate([batches_of(stream, sequences=6).rows_at(step).samples for step in range(4)])
    )


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("sequence", [1, 7, 8, 100])
def test_every_token_is_a_target_once_per_epoch_but_the_first_and_a_short_rest(stream, sequence, document_mask):
    batches = batches_of(stream, sequence=sequence, sequences=1, document_mask=document_mask)
    everything = stream.windows(np.array([0]), len(stream))[0].astype(int)
    seen = [batches.at(step) for step in range(batches.sizes[0])]
    seen.sort(key=lambda batch: int(batch.samples[0]))
    targets = torch.cat([batch.targets.flatten() for batch in seen]).numpy()
    inputs = torch.cat([batch.tokens.flatten() for batch in seen]).numpy()
    rest = (len(stream) - 1) % sequence
    assert np.array_equal(targets, everything[1 : len(stream) - rest])
    assert np.array_equal(inputs, everything[: len(stream) - rest - 1])


def documents_by_hand(stream: TokenStream, batch: Batch) -> tuple[list[int], list[int], list[bool]]:
    """Token by token: where documents begin, positions, and whether the target belongs to another document."""
    ends, T = set(stream.document_ends.tolist()), batch.tokens.shape[1]
    begins, positions, crossing = [], [], []
    for row, sample in enumerate(batch.samples.tolist()):
        for column in range(T):
            if column == 0 or sample * T + column in ends:
                begins.append(row * T + column)
            positions.append(row * T + column - begins[-1])
            crossing.append(sample * T + column + 1 in ends)
    return [*begins, batch.tokens.numel()], positions, crossing


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 7, 8, 9, 16, 40]), min_size=1, max_size=30),
    sequence=st.sampled_from([1, 2, 8, 16]),
    separator=st.booleans(),
)
def test_documents_begin_positions_restart_and_targets_stop_where_they_should(
    tmp_path_factory, lengths, sequence, separator
):
    stream = stream_of([sequence, *lengths, sequence], separator=separator, path=tmp_path_factory.mktemp("stream"))
    batch = batches_of(stream, sequence=sequence).at(0)
    begins, positions, crossing = documents_by_hand(stream, batch)
    assert batch.cu_seqlens.tolist() == begins
    assert batch.positions.flatten().tolist() == positions
    next_tokens = stream.windows(batch.samples * sequence + 1, sequence).astype(int).flatten()
    for target, next_token, crosses in zip(batch.targets.flatten().tolist(), next_tokens, crossing, strict=True):
        assert target == (IGNORED if crosses and not separator else next_token)
        assert not (crosses and separator) or target == stream.separator


def test_a_document_boundary_at_the_border_of_a_sample_is_no_empty_document(tmp_path):
    batch = batches_of(stream_of([8, 8, 8, 9], path=tmp_path)).at(0)
    assert batch.cu_seqlens.tolist() == [0, 8, 16, 24, 32]
    assert batch.positions.tolist() == [list(range(8))] * 4


def test_empty_documents_of_other_programs_are_passed_over(tmp_path):
    stream = stream_of([4, 4, 9], path=tmp_path)
    stream.document_ends = np.array([0, 4, 4, 8, 8, 17])
    batch = batches_of(stream, sequence=16, sequences=1).at(0)
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 16]


def test_without_a_document_mask_a_sample_is_one_text(stream):
    batch = batches_of(stream, document_mask=False).at(0)
    assert batch.cu_seqlens is None
    assert batch.positions is None
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_types_and_shapes(stream):
    batch = batches_of(stream).at(3)
    assert (batch.tokens.dtype, batch.targets.dtype) == (torch.int64, torch.int64)
    assert (batch.positions.dtype, batch.cu_seqlens.dtype) == (torch.int32, torch.int32)
    assert batch.tokens.shape == batch.targets.shape == batch.positions.shape == (4, 8)
    assert all(tensor.is_contiguous() for tensor in (batch.tokens, batch.targets, batch.positions))


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
@pytest.mark.parametrize("document_mask", [False, True])
def test_micro_batches_are_the_rows_of_a_batch_with_documents_of_their_own(stream, rows, document_mask):
    batch = batches_of(stream, sequences=6, document_mask=document_mask).at(1)
    parts = batch.split(rows)
    assert torch.equal(torch.cat([part.tokens for part in parts]), batch.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    assert np.array_equal(np.concatenate([part.samples for part in parts]), batch.samples)
    if not document_mask:
        assert all(part.cu_seqlens is None and part.positions is None for part in parts)
        return
    assert torch.equal(torch.cat([part.positions for part in parts]), batch.positions)
    for part in parts:
        assert part.cu_seqlens.tolist() == documents_by_hand(stream, part)[0]


def test_a_batch_moves_as_a_whole(stream):
    moved = batches_of(stream).at(0).to("meta")
    assert {t.device.type for t in (moved.tokens, moved.targets, moved.positions, moved.cu_seqlens)} == {"meta"}
    assert batches_of(stream, document_mask=False).at(0).to("meta").cu_seqlens is None


@pytest.mark.gpu
def test_a_pinned_batch_arrives_unchanged(stream):
    batch = batches_of(stream).at(0)
    pinned = batch.pin_memory()
    assert pinned.tokens.is_pinned()
    assert same(pinned.to("cuda").to("cpu"), batch)


def test_what_cannot_be_divided_or_filled_is_an_error(stream):
    for call, message in [
        (lambda: batches_of(stream, dp_size=3), "data: 4 sequences of a step do not divide among 3 ranks"),
        (
            lambda: batches_of(stream).at(0).split(3),
            "data: 4 sequences of a rank do not divide into micro-batches of 3",
        ),
        (
            lambda: batches_of(stream, sequence=417),
            "data: a sequence of 417 needs 418 tokens, and there are 417; shorten data.sequence, or prepare more data",
        ),
    ]:
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == message


def test_attention_of_the_kernels_accepts_the_documents(stream):
    from fasttrain_kernels import attention

    batch = batches_of(stream).at(0)
    q, k, v = torch.randn(3, 4, 8, 2, 16)
    whole = attention(q, k, v, cu_seqlens=batch.cu_seqlens)
    parts = [
        attention(*(x[i * 2 : i * 2 + 2] for x in (q, k, v)), cu_seqlens=part.cu_seqlens)
        for i, part in enumerate(batch.split(2))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


class Reader:
    """Counts what is read, and can be slow, or fail at a step."""

    def __init__(self, seconds: float = 0.0, broken: int | None = None) -> None:
        self.seconds, self.broken = seconds, broken
        self.steps: list[int] = []

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


def test_what_is_in_memory_is_read_without_the_thread_and_only_one_step_at_a_time():
    """After a slow read the thread takes over, so that the loop waits for storage once at most."""
    threads: list[bool] = []
    reader = Reader()

    def read(step: int) -> int:
        threads.append(threading.current_thread() is threading.main_thread())
        return reader(step)

    with Prefetcher(read, ahead=2) as prefetcher:
        prefetcher.at(0)
        assert reader.has_read(0, 1, 2)
        assert threads == [False] * 3
        for step in range(1, 5):
            assert prefetcher.at(step) == step * 10
        assert threads[3:] == [True] * 4
        reader.seconds = 0.02
        prefetcher.at(5)
        assert threads[7:] == [True]
        prefetcher.at(6)
        assert reader.has_read(8)
        assert threads[8:] == [False]
        reader.broken, reader.seconds = 10, 0.0
        for step in (7, 8, 9):
            prefetcher.at(step)
        with pytest.raises(OSError, match="step 10 cannot be read"):
            prefetcher.at(10)


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
            parts = prefetcher.at(step)
            assert [part.tokens.tolist() for part in parts] == [
                part.tokens.tolist() for part in batches.at(step).split(2)
            ]
