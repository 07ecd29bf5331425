import pytest

from fasttrain.gpus import find_gpu
from fasttrain.recipes import RECIPES
from fasttrain.tools.plan.advice import USABLE, advice, largest_micro, largest_model, options, remedies, scaling, search
from fasttrain.tools.plan.estimate import changed, estimate
from fasttrain.tools.plan.speed import Hardware

SETTINGS = RECIPES["550m"]()
CARD = Hardware.of(find_gpu("rtx-5090"), 1)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("rtx-4090", "varlen"),
        ("a100-80gb", "varlen"),
        ("h100-sxm", "fa4 with flash-attn-4, else fa2 with flash-attn, else varlen"),
        ("b200", "fa4 with flash-attn-4, else fa2 with flash-attn, else varlen"),
        ("rtx-5090", "fa2 with flash-attn, else varlen"),
        ("mi300x", "triton"),
    ],
)
def test_attention_is_advised_for_the_card(gpu, expected):
    plan = estimate(SETTINGS, Hardware.of(find_gpu(gpu), 1), vocab=50_304)
    assert f"attention runs on {expected}" in advice(plan)


def test_the_largest_micro_batch_fits_and_the_next_one_does_not():
    micro = largest_micro(SETTINGS, CARD, vocab=50_304)
    assert estimate(changed(SETTINGS, batch=dict(micro=micro)), CARD, vocab=50_304).fits
    larger = estimate(changed(SETTINGS, batch=dict(micro=2 * micro)), CARD, vocab=50_304)
    assert not larger.memory.fits(USABLE * CARD.memory)


def test_search_finds_the_fastest_of_all_that_fit():
    found = search(SETTINGS, CARD, vocab=50_304)
    everything = [o for o in options(SETTINGS, CARD, vocab=50_304) if o.plan.memory.bytes <= 0.97 * CARD.memory]
    assert len(everything) > 10
    assert found[0].plan.speed.rate >= max(o.plan.speed.rate for o in everything) - 10
    assert [o.plan.speed.rate for o in found] == sorted((o.plan.speed.rate for o in found), reverse=True)
    assert all(o.plan.fits for o in found)


def test_an_option_is_written_as_it_is_set():
    found = search(SETTINGS, CARD, vocab=50_304)[0]
    assert str(found).startswith("--batch.micro ")
    assert found.plan.settings.batch.micro == int(found.settings["batch.micro"])


def test_effort_d_learns_what_its_card_can_do():
    fit = largest_model(SETTINGS, CARD, vocab=50_304)
    assert 1.2e9 < fit.parameters < 2.5e9  # 16 bytes each, and activations, in 31 GiB
    assert fit.option.plan.fits
    heads = fit.model.heads + 4
    wider = dict(hidden=fit.model.hidden + 4 * 64, heads=heads, kv_heads=heads)
    larger = changed(fit.option.plan.settings, model=wider)
    assert not estimate(larger, CARD, vocab=50_304).fits


def test_remedies_make_it_fit():
    hardware = Hardware.of(find_gpu("rtx-4090"), 16)
    settings = changed(RECIPES["llama2-7b"](), parallel=dict(dp_replicate=1))
    plan = estimate(settings, hardware, vocab=32_000)
    assert not plan.fits
    first = remedies(plan)[0]
    assert first.startswith("--parallel.recompute full --parallel.grad_reduce every")
    mended = changed(settings, parallel=dict(recompute="full", grad_reduce="every"))
    assert estimate(mended, hardware, vocab=32_000).fits


def test_where_no_settings_help_the_remedy_is_more_gpus():
    plan = estimate(RECIPES["llama2-70b"](), Hardware.of(find_gpu("a100-80gb"), 8), vocab=32_000)
    (remedy,) = remedies(plan)
    gpus = int(remedy.split()[1].rstrip(":"))
    settings = changed(RECIPES["llama2-70b"](), parallel=dict(grad_reduce="every"))
    assert estimate(settings, Hardware.of(find_gpu("a100-80gb"), gpus), vocab=32_000).fits
    assert gpus in (16, 32)


def test_advice_covers_what_can_be_changed():
    hardware = Hardware.of(find_gpu("h100-sxm"), 64)
    text = "\n".join(advice(estimate(RECIPES["qwen3-8b"](), hardware, vocab=151_936)))
    for word in (
        "largest batch.micro",
        "recomputation",
        "sharding for these GPUs",
        "linear cross-entropy takes",
        "HSDP beats FSDP on",
    ):
        assert word in text
    assert "%" in text


def test_scaling_says_where_hybrid_wins_and_where_the_batch_ends():
    plan = estimate(RECIPES["llama2-7b"](), Hardware.of(find_gpu("a100-80gb"), 128), vocab=32_000)
    rows = scaling(plan)
    assert [row["gpus"] for row in rows] == [2**n for n in range(13)]
    assert [row["too_small"] for row in rows] == [0.0] * 9 + [1.0] * 4  # 256 sequences
    assert not rows[0]["fsdp_fits"]
    assert rows[4]["fsdp_fits"]
    assert rows[-1]["hsdp"] > rows[-1]["fsdp"]
    per_gpu = [row["fsdp"] / row["gpus"] for row in rows]
    assert per_gpu[-1] < per_gpu[3]


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_plan_that_fits_less_memory_is_told_apart(gpus):
    hardware = Hardware.of(find_gpu("a100-80gb"), gpus)
    plan = estimate(RECIPES["124m"](), hardware, vocab=50_304)
    assert plan.fits
    low, high = plan.memory_gib.low, plan.memory_gib.high
    assert low < plan.memory.bytes / 2**30 < high
