"""What belongs to one step; whole runs are in test_train.py."""

from unittest.mock import patch

import torch

from fasttrain.train.step import seed_step


def test_a_step_has_random_numbers_of_its_own_and_the_same_ones_each_time():
    def drawn(*place):
        seed_step(*place)
        return torch.rand(4)

    first = drawn(0, 7, 1)
    assert torch.equal(drawn(0, 7, 1), first)
    assert not any(torch.equal(drawn(*other), first) for other in [(1, 7, 1), (0, 8, 1), (0, 7, 0)])


def test_a_gpu_in_use_is_seeded_as_the_cpu_is_and_others_cost_nothing():
    with patch("torch.cuda.manual_seed_all") as seeded:
        seed_step(0, 7, 1)
        seeded.assert_not_called()
        with patch("torch.cuda.is_initialized", return_value=True):
            seed_step(0, 7, 1)
        seeded.assert_called_once_with(torch.initial_seed())
