"""The intervals of keys say the same as the mask of the specification, element by element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain_kernels.ops.attention import intervals
from fasttrain_kernels.ops.attention.intervals import check_documents, document_bounds, key_intervals, reach
from fasttrain_kernels.ops.attention.reference import visible_keys
from fasttrain_kernels.testing import interpret


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    queries=st.integers(0, 12),
    documents=st.booleans(),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 9),
)
def test_intervals_are_the_mask(lengths, queries, documents, causal, window):
    keys = sum(lengths)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32) if documents else None
    queries = keys if documents else queries
    bounds = document_bounds(cu_seqlens, keys) if documents else None
    lo, hi = key_intervals(queries, keys, causal, window, bounds)
    key = torch.arange(keys)
    mask = (key >= lo[:, None]) & (key < hi[:, None])
    assert torch.equal(mask, visible_keys(queries, keys, causal, window, cu_seqlens, torch.device("cpu")))
    assert (lo.diff() >= 0).all()  # what makes a range of blocks out of a tile of queries
    assert (hi.diff() >= 0).all()


def test_a_window_reaches_as_flash_attn_counts():
    assert reach(causal=True, window=128) == (127, 0)
    assert reach(causal=False, window=128) == (127, 127)
    assert reach(causal=True, window=None) == (-1, 0)
    assert reach(causal=False, window=None) == (-1, -1)


@pytest.mark.parametrize("wrong", [[1, 8], [0, 7], [0, 5, 3, 8], [0, 9]])
def test_wrong_documents_are_an_error_on_the_cpu(wrong):
    with pytest.raises(
        ValueError, match=r"attention: cu_seqlens must rise from 0 to the 8 tokens of the batch, got \["
    ):
        check_documents(torch.tensor(wrong, dtype=torch.int32), 8)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 90) | st.just(0), min_size=1, max_size=9))
def test_the_kernel_finds_the_same_documents(lengths):
    """Trap 13: runs of empty documents, at the beginning and the end too."""
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    expected = document_bounds(cu_seqlens, sum(lengths))
    with interpret():
        assert torch.equal(document_bounds(cu_seqlens, sum(lengths)), expected)


def test_wrong_documents_cannot_lead_outside_the_tensors(monkeypatch):
    """A GPU does not check the values, so they must do no harm."""
    monkeypatch.setattr(intervals, "check_documents", lambda cu_seqlens, num_tokens: None)
    with interpret():
        bounds = document_bounds(torch.tensor([3, -5, 900], dtype=torch.int32), 8)
    assert bounds.min() >= 0
    assert bounds.max() <= 8
