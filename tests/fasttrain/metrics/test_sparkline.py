import math
from array import array

import pytest

from fasttrain.metrics.display import sparkline


def curve(values, columns=60):
    return sparkline(array("d", values), columns)


def test_a_falling_loss_falls():
    assert curve([8, 7, 6, 5, 4, 3, 2, 1]) == "███▇▅▄▂▁"  # 6 to 1 are the scale


def test_the_first_quarter_does_not_flatten_the_rest():
    assert curve([1000.0] * 2 + [2.0, 1.0] * 3) == "██" + "█▁" * 3


def test_neighbours_are_merged_where_there_is_no_room():
    assert curve([4, 2, 1, 3, 2, 0], columns=3) == "█▅▁"  # 3, 2, 1
    assert len(curve(range(100), columns=7)) == 7


def test_a_constant_and_the_beginning():
    assert curve([3.0] * 4) == "▁▁▁▁"
    assert curve([3.0]) == curve([]) == curve([1, 2], columns=1) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_marked(value):
    assert curve([2, 1, value, 1]) == "█▁!▁"
    assert curve([value, value]) == "!!"
    assert curve([1, 2, value, -value], columns=2) == "▁!"


def test_all_steps_of_a_long_run_are_in_it():
    """And a step up in the middle is in the middle."""
    text = curve((1.0 if step < 50_000 else 2.0 for step in range(100_000)), columns=40)
    assert text == "▁" * 20 + "█" * 20
