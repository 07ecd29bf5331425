"""Two checkpoints are equal bit by bit, or it is said where they are not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fasttrain.checkpoint import compare
from fasttrain.checkpoint.committed import Checkpoint
from fasttrain.checkpoint.compare import Difference, differences, names
from tests.fasttrain.checkpoint.subject import checksums


def saved(path: Path, changed: dict[str, torch.Tensor] | None = None, scale: float = 2.0) -> Checkpoint:
    dcp.save(state() | (changed or {}), checkpoint_id=path, no_dist=True)
    given: dict[str, Any] = dict(optimizer="AdamW", scaler={"scale": scale}, metadata={}, files=checksums(path))
    return Checkpoint(path=path, step=3, loss=None, **given)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "model.a": torch.randn(3, 5),
        "model.b": torch.randn(7).bfloat16(),
        "optimizer.a.step": torch.tensor(3.0),
        "optimizer.b.exp_avg": torch.tensor([0.0, math.nan, 4.0]),
    }


@pytest.mark.parametrize("at_once", [compare._AT_ONCE, 1])
def test_equal_ones_have_no_difference(tmp_path, at_once):
    with patch.object(compare, "_AT_ONCE", at_once):
        assert differences(saved(tmp_path / "a"), saved(tmp_path / "b")) == []


@pytest.mark.parametrize("at_once", [compare._AT_ONCE, 1])
def test_the_greatest_difference_of_each_tensor_is_named(tmp_path, at_once):
    a = state()["model.a"]
    a[2, 1] += 4
    a[0, 3] += 1
    one, other = saved(tmp_path / "a"), saved(tmp_path / "b", {"model.a": a, "optimizer.a.step": torch.tensor(3.5)})
    with patch.object(compare, "_AT_ONCE", at_once):
        first, second = differences(one, other)
    assert (first.tensor, first.index, first.elements) == ("model.a", (2, 1), 2)
    assert first.values == (state()["model.a"][2, 1].item(), a[2, 1].item())
    assert second == Difference(
        tensor="optimizer.a.step",
        index=(),
        values=(3.0, 3.5),
        elements=1,
        relative=pytest.approx(1 / 7),  # type: ignore[arg-type]
    )
    assert str(second) == "optimizer.a.step is 3 and 3.5"
    assert str(first).startswith("model.a[2, 1] is ")


@pytest.mark.parametrize(("index", "value"), [(0, -0.0), (1, 0.0), (2, math.nan), (2, math.inf)])
def test_bits_count_not_numbers(tmp_path, index, value):
    average = state()["optimizer.b.exp_avg"]
    average[index] = value
    (found,) = differences(saved(tmp_path / "a"), saved(tmp_path / "b", {"optimizer.b.exp_avg": average}))
    assert (found.tensor, found.index) == ("optimizer.b.exp_avg", (index,))


def test_loss_scales_and_tensors_that_one_does_not_have(tmp_path):
    one, other = saved(tmp_path / "a"), saved(tmp_path / "b", {"model.c": torch.ones(2)}, scale=4.0)
    assert {str(found) for found in differences(one, other)} == {
        "scaler.scale is 2 and 4",
        "model.c is absent and present",
    }
    assert set(names(other)) - set(names(one)) == {"model.c"}


def test_other_shapes_are_an_error(tmp_path):
    one, other = saved(tmp_path / "a"), saved(tmp_path / "b", {"model.a": torch.ones(5, 3)})
    with pytest.raises(ValueError, match="model.a has other shapes"):
        differences(one, other)
