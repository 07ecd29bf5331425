"""Exponentials at the edges: one key, and very negative logits."""

import pytest
import torch

from fasttrain_kernels import attention, attention_reference
from fasttrain_kernels.testing import interpret


@pytest.mark.parametrize(("shapes", "options"), [(dict(queries=1, heads=5), {}), (dict(heads=1), dict(window=1))])
def test_a_query_that_sees_one_key_returns_its_value(shapes, options, make):
    inputs = make(**shapes)
    with interpret():
        out = attention(**inputs, **options)
        dq, dk, dv = torch.autograd.grad(out.sum(), list(inputs.values()))
    torch.testing.assert_close(out, inputs["v"].expand_as(out))
    torch.testing.assert_close(dv, torch.full_like(dv, shapes["heads"]))
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5  # a difference of equal sums: no relative measure for it


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_very_negative_logits_leave_a_finite_maximum(softcap, make):
    inputs = make(heads=1, queries=20)
    q, k, v = (x.detach() for x in inputs.values())
    q, k = q.abs() * 1e3, -k.abs() * 1e3
    with interpret():
        torch.testing.assert_close(
            attention(q, k, v, softcap=softcap), attention_reference(q, k, v, softcap=softcap), atol=1e-5, rtol=1e-5
        )
