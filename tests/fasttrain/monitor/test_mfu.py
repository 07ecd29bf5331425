"""A low MFU is explained: the largest cause first, with its evidence and the setting to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.config import BatchConfig, Config, DataConfig, ModelConfig, ParallelConfig
from fasttrain.monitor.mfu import MfuContext, explain

LARGE = MfuContext(
    settings=Config(
        model=ModelConfig(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128_256),
        data=DataConfig(sequence=4096),
        batch=BatchConfig(sequences=512, micro=4),
    ),
    mfu=0.2,
    seconds=1.0,
    split={"data": 0.001, "forward": 0.3, "backward": 0.6, "optimizer": 0.05},
    parameters=218_000_000,
    peak=989.5e12,
    device="cuda",
    precision="bf16",
    compiled=True,
    dp_size=8,
)


def changed(section: str, **values: Any) -> Config:
    settings = LARGE.settings
    return replace(settings, **{section: replace(getattr(settings, section), **values)})


def test_a_good_mfu_needs_no_explanation() -> None:
    assert explain(replace(LARGE, mfu=0.4, split={"data": 0.5})) == []


@pytest.mark.parametrize(
    ("context", "evidence", "remedy"),
    [
        (replace(LARGE, split={"data": 0.7}), "70% of a step: waiting for data", "data.prefetch"),
        (replace(LARGE, split={"wait": 0.4}), "40% of a step: waiting for other ranks", "slow rank"),
        (replace(LARGE, split={"optimizer": 0.6}), "the update, after only 262,144 tokens", "batch.sequences"),
        (
            replace(LARGE, parameters=100_000, compiled=False, memory=0.1, settings=changed("data", sequence=64)),
            "calling ops: a block's forward pass over 256 tokens",
            "raise batch.micro and set parallel.compile to on",
        ),
        (replace(LARGE, compiled=False), "blocks are not compiled", "parallel.compile"),
        (replace(LARGE, settings=changed("parallel", recompute="full")), "25% of a step", "selective"),
        (replace(LARGE, precision="fp32"), "multiplied in fp32", "parallel.precision"),
        (replace(LARGE, settings=changed("batch", micro=1)), "weights are gathered", "parallel.reshard_after_forward"),
        (replace(LARGE, settings=changed("model", vocab=50_257)), "model.vocab (50257)", "multiples of 64"),
        (replace(LARGE, sensors={"throttled_heat": 1.0, "sm_clock": 900.0}), "at 900 MHz: heat", "cooling"),
    ],
)
def test_each_cause_is_found_with_its_remedy(context: MfuContext, evidence: str, remedy: str) -> None:
    first = str(explain(context)[0])
    assert evidence in first
    assert remedy in first


def test_causes_are_ordered_by_what_they_cost() -> None:
    context = replace(LARGE, split={"data": 0.3, "wait": 0.1, "optimizer": 0.3}, compiled=False)
    shares = [cause.share for cause in explain(context)]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == 4


def test_what_settings_do_not_explain_is_said() -> None:
    """Effort D: a card at 1%, and nothing in its settings that would do that."""
    settings = Config(
        model=ModelConfig(layers=12, hidden=896, heads=14, kv_heads=14, ffn=3584),
        data=DataConfig(sequence=1024),
        batch=BatchConfig(sequences=64, micro=4),
    )
    context = MfuContext(
        settings=settings, mfu=0.01, seconds=1.0, split={"data": 0.02}, parameters=12_800_000, peak=209.5e12,
        device="cuda", precision="bf16", compiled=False, dp_size=1, sensors={"utilisation": 0.12},
    )  # fmt: skip
    *others, last = explain(context)
    assert "blocks are not compiled" in str(others[0])
    assert "nothing in the settings: they allow for an MFU of about 47%, and it is 1.0%" in str(last)
    assert "busy for 12% of the time" in str(last)


def test_cpus_are_not_told_about_gpus() -> None:
    context = replace(LARGE, device="cpu", precision="fp32", compiled=False, settings=Config(parallel=ParallelConfig()))
    assert all(
        "GPU" not in str(cause) and "precision" not in str(cause) for cause in explain(replace(context, dp_size=1))
    )
