"""The first loss, ranges of later ones, and blocks that do not learn."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
from pathlib import Path

import pytest
import torch

from fasttrain.config import Config, ModelConfig, OptimConfig
from fasttrain.events import EventKind
from fasttrain.model import Decoder
from fasttrain.monitor.sanity import Blocks, Envelope, first_loss, first_loss_suspicion, unusual_settings
from fasttrain.recipes import RECIPES

VOCAB = 1024


@pytest.mark.parametrize(
    ("hidden", "layers", "ffn", "std"),
    [(64, 2, 192, 0.02), (128, 6, 384, 0.02), (512, 1, 64, 0.02), (512, 2, 1408, 0.02), (256, 2, 64, 0.05)],
)
@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_untrained_models_have_the_loss_that_is_expected(
    hidden: int, layers: int, ffn: int, std: float, tied_head: bool, z_loss: float
) -> None:
    settings = ModelConfig(
        layers=layers, hidden=hidden, heads=2, kv_heads=2, head_dim=16, ffn=ffn, init_std=std, tied_head=tied_head
    )
    model = Decoder(settings, vocab=VOCAB, sequence=64, z_loss=z_loss)
    model.init_weights(0)
    tokens = torch.randint(0, VOCAB, (4, 65))
    with torch.no_grad():
        loss = float(model(tokens[:, :-1], tokens[:, 1:])) / (4 * 64)
    low, high = first_loss(settings, VOCAB, z_loss)
    assert low - 0.12 < loss < high + 0.12
    run = Config(model=settings, optim=OptimConfig(z_loss=z_loss))
    assert first_loss_suspicion(loss, run, VOCAB) == ""


def test_other_first_losses_are_suspicious() -> None:
    low, high = (first_loss_suspicion(loss, Config(), VOCAB) for loss in (5.0, 9.0))
    expected = "the first loss is 5.000, and untrained weights with a vocabulary of 1024 have 7.008 to 7.049, +- 0.35"
    assert low.startswith(expected)
    assert "data lint" in low
    assert "model.init_std" in high
    assert first_loss_suspicion(math.nan, Config(), VOCAB)


def characters() -> torch.Tensor:
    """Real code, character by character, with its runs of spaces."""
    text = "".join(Path(module.__file__ or "").read_text("utf-8") for module in (ast, argparse, inspect))
    return torch.tensor(list(text.encode("ascii", "replace")))


@pytest.mark.parametrize(("hidden", "layers", "ffn"), [(128, 4, 384), (64, 2, 192), (256, 2, 64)])
def test_runs_of_spaces_under_a_tied_head_are_no_defect_and_targets_among_the_inputs_are(
    hidden: int, layers: int, ffn: int
) -> None:
    tokens = characters()[: 64 * 257].reshape(64, 257)
    repeated = float((tokens[:, 1:] == tokens[:, :-1]).float().mean())
    assert 0.1 < repeated < 0.5
    settings = ModelConfig(layers=layers, hidden=hidden, heads=4, kv_heads=2, head_dim=32, ffn=ffn)
    model, vocab = Decoder(settings, vocab=128, sequence=256), 128
    model.init_weights(0)
    with torch.no_grad():
        loss = float(model(tokens[:, :-1], tokens[:, 1:])) / (64 * 256)
        leak = float(model(tokens[:, :-1], tokens[:, :-1])) / (64 * 256)
    run = Config(model=settings)
    assert first_loss_suspicion(loss, run, vocab, repeated) == ""
    assert hidden == 64 or first_loss_suspicion(loss, run, vocab)  # without knowing of the spaces
    assert "the targets are in the inputs" in first_loss_suspicion(leak, run, vocab, 1.0)
    assert "the targets are in the inputs" in first_loss_suspicion(leak, run, vocab, repeated)


def test_settings_that_nobody_uses_are_named_with_a_value_to_begin_with() -> None:
    assert unusual_settings(Config()) == []
    for recipe in RECIPES.values():
        assert unusual_settings(recipe()) == []
    lr, decay = unusual_settings(Config(optim=OptimConfig(lr=1000, weight_decay=100)))
    assert lr == "optim.lr is 1000, and more than 0.05 is unusual; begin with 0.0003"
    assert decay == "optim.weight_decay is 100, and more than 1 is unusual; begin with 0.1"


TABLE = [(1e6, 5.0, 7.0), (1e8, 3.0, 4.0)]


def test_envelopes_are_linear_in_the_logarithm_of_tokens() -> None:
    envelope = Envelope(TABLE)
    assert envelope.range(1e6) == (5.0, 7.0)
    assert envelope.range(1e7) == pytest.approx((4.0, 5.5))
    assert envelope.range(1e8) == (3.0, 4.0)
    assert envelope.range(9e5) == envelope.range(1.1e8) == (-math.inf, math.inf)
    assert Envelope([(0, 2.0, 9.0), (100, 2.0, 8.0)]).range(10) == pytest.approx((2.0, 8.5))


def test_envelopes_alarm_after_some_steps_in_a_row_and_once_per_stay() -> None:
    envelope = Envelope(TABLE, patience=3)
    losses = [8.0, 8.0, 6.0] + [8.0] * 6 + [6.0] + [4.0] * 3 + [math.nan] * 3
    alarms = {step: alarm for step, loss in enumerate(losses) for alarm in envelope.observe(1e6, loss)}
    assert list(alarms) == [5, 12]
    assert alarms[5].text == "for 3 steps the loss has been above what is expected here: 8.000, not in 5.000 to 7.000"
    assert "below" in alarms[12].text
    assert alarms[12].evidence == {"loss": 4.0, "low": 5.0, "high": 7.0, "steps": 3}


@pytest.mark.parametrize(
    ("table", "error"),
    [([(1, 5, 4)], "the lowest first"), ([(2, 1, 2), (1, 1, 2)], "in rising order"), ([(1, 2)], "must be")],
)
def test_envelopes_that_make_no_sense(table: list, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Envelope(table)


def healthy(step: int) -> list[float]:
    """Norms of six blocks, the first ten times the last, in a run whose norms rise and fall."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.exp(0.5 * torch.randn(7, generator=generator)).tolist()
    return [noise[6] * noise[block] / (1 + 2 * block) for block in range(6)]


def test_healthy_blocks() -> None:
    blocks = Blocks()
    assert [sick for step in range(5000) for sick in blocks.observe(healthy(step))] == []


@pytest.mark.parametrize("norm", [0.0, 1e-7])
def test_dead_blocks_are_told_once(norm: float) -> None:
    blocks = Blocks()
    found = []
    for step in range(400):
        norms = healthy(step)
        norms[3] = norm if step >= 100 else norms[3]
        found += [(step, sick) for sick in blocks.observe(norms)]
    ((step, sick),) = found
    assert (step, sick.kind, sick.evidence["block"]) == (149, EventKind.DEAD_BLOCK, 3)
    assert sick.text.startswith("block 3 is dead: its gradient norm has been ")
    assert json.loads(json.dumps(sick.evidence)) == sick.evidence


def test_exploding_blocks_are_told_once_and_a_spike_of_all_is_another_matter() -> None:
    blocks = Blocks()
    found = []
    for step in range(400):
        norms = healthy(step)
        if step >= 200:
            norms[5] *= 1000
        if 100 <= step < 150:
            norms = [1000 * norm for norm in norms]
        found += [(step, sick) for sick in blocks.observe(norms)]
    ((step, sick),) = found
    assert (step, sick.kind, sick.evidence["block"]) == (204, EventKind.EXPLODING_BLOCK, 5)


def test_norms_that_say_nothing_about_blocks() -> None:
    blocks = Blocks()
    for norms in ([0.0, 0.0, 0.0], [1.0, math.nan, 1.0], [1.0, math.inf, 1.0]):
        assert [sick for _ in range(60) for sick in blocks.observe(norms)] == []
