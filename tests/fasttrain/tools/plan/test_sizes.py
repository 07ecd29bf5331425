from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fasttrain.config import BatchConfig, ComponentConfig, Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig
from fasttrain.model import Decoder
from fasttrain.recipes import RECIPES
from fasttrain.tools.plan.sizes import Stated, at_start, sizes, stated_size
from fasttrain.units import count, duration, memory_size, parse_bytes, parse_count


def config(name="300m", **sections):
    base = RECIPES[name]()
    return replace(base, **{section: replace(getattr(base, section), **values) for section, values in sections.items()})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_parameters_are_those_of_the_model(tied, qk_norm):
    model = ModelConfig(layers=3, hidden=48, heads=6, kv_heads=2, head_dim=8, ffn=80, tied_head=tied, qk_norm=qk_norm)
    with torch.device("meta"):
        decoder = Decoder(model, vocab=100, sequence=16)
    found = sizes(Config(model=model), vocab=100).parameters
    assert found.total == sum(p.numel() for p in decoder.parameters())
    assert found.embedding == 4800
    assert found.head == (0 if tied else 4800)
    assert found.non_embedding == found.total - 4800 * (1 if tied else 2)


def test_a_300m_that_counts_its_tied_head_twice_is_found_out():
    """Effort B: 249M parameters, called 300M."""
    model = ModelConfig(layers=16, hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=2752, vocab=50_304)
    stated = Stated(size=stated_size("300m"), size_from="--size")
    run = sizes(config(model=vars(model)), vocab=50_304, stated=stated)
    (text,) = run.contradictions
    assert "--size says 300m, but the model has 253.9M parameters" in text
    assert "305.4M only if the tied head were counted a second time" in text


def test_a_550m_that_is_200m_is_found_out():
    """Effort D."""
    changed = dict(layers=12, hidden=896, heads=14, kv_heads=14, ffn=3584)
    run = sizes(config("550m", model=changed), vocab=50_304, stated=Stated(size=stated_size("550m"), size_from="out"))
    assert "out says 550m, but the model has 199.2M parameters" in run.contradictions[0]
    assert "call it 199m" in run.contradictions[0]


@pytest.mark.parametrize("name", [name for name in RECIPES if stated_size(name)])
def test_no_recipe_contradicts_its_name(name):
    settings = RECIPES[name]()
    stated = Stated(size=stated_size(name), size_from="name")
    found = sizes(settings, vocab=settings.model.vocab, stated=stated).contradictions
    assert not [text for text in found if "says" in text]


def test_tokens_that_the_batch_does_not_give_are_found_out():
    """Effort B: 105B by its own arithmetic against 12.8B claimed."""
    settings = config(batch=dict(steps=100_000))
    run = sizes(settings, vocab=50_304, dp_size=4, stated=Stated(tokens=12.8e9))
    assert run.tokens_per_step == 512 * 2048
    assert run.tokens == 100_000 * 512 * 2048
    assert "are 104.9B; set batch.steps to 12207" in run.contradictions[0]
    assert not sizes(config(), vocab=50_304, dp_size=4, stated=Stated(tokens=12.8e9)).contradictions


@pytest.mark.parametrize(
    ("batch", "parallel", "world", "expected"),
    [
        (dict(sequences=512, micro=16), {}, 3, "set batch.sequences to 528"),
        (dict(sequences=512, micro=16), {}, 64, "or batch.micro to 8"),
        (dict(sequences=512, micro=16), dict(dp_replicate=3), 4, "(3) must divide the number of ranks, 4; set it to 2"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_share_the_batch(batch, parallel, world, expected):
    run = sizes(config(batch=batch, parallel=parallel), vocab=50_304, dp_size=world)
    assert any(expected in text for text in run.contradictions), run.contradictions


def test_disk_space_for_checkpoints():
    """Effort E: the disk filled up."""
    settings = RECIPES["llama2-7b"]()
    run = sizes(settings, vocab=32_000, dp_size=128, stated=Stated(disk=300e9, disk_from="/data"))
    assert run.checkpoint_bytes == 12 * run.parameters.total
    assert run.checkpoints_held == 5
    assert "need 412.5 GB (5 of 80.9 GB) and there are 300.0 GB in /data" in run.contradictions[0]
    assert "lower checkpoint.keep_last (3)" in run.contradictions[0]
    assert not sizes(settings, vocab=32_000, dp_size=128, stated=Stated(disk=500e9)).contradictions


def test_muon_has_a_smaller_state():
    adamw, muon = (sizes(config(optim=dict(kind=kind)), vocab=50_304) for kind in ("adamw", "muon"))
    matrices = 20 * 1024 * (4 * 16 * 64 + 3 * 2816)
    assert adamw.checkpoint_bytes - muon.checkpoint_bytes == 4 * matrices


def test_epochs_and_what_they_are_worth():
    few = sizes(config(), vocab=50_304, dp_size=4, stated=Stated(dataset={"": 12.8e9}))
    assert few.epochs[""] == pytest.approx(1, rel=0.01)
    assert not few.warnings
    many = sizes(config(), vocab=50_304, dp_size=4, stated=Stated(dataset={"": 1e9}))
    assert "12.8 epochs" in many.warnings[0]


def test_a_mixture_that_ends_before_the_run():
    parts = {name: ComponentConfig(path=Path(name), weight=weight, epochs=1) for name, weight in (("a", 3), ("b", 1))}
    settings = config(data=dict(mixture=parts))
    run = sizes(settings, vocab=50_304, dp_size=4, stated=Stated(dataset={"a": 5e9, "b": 5e9}))
    assert run.epochs["a"] == pytest.approx(3 * run.epochs["b"])
    assert not run.contradictions
    run = sizes(settings, vocab=50_304, dp_size=4, stated=Stated(dataset={"a": 1e9, "b": 1e9}))
    assert "data.mixture reaches its epochs" in run.contradictions[0]


def test_where_a_run_stands_against_compute_optimal():
    lines = "\n".join(sizes(config(), vocab=50_304, dp_size=4).lines())
    assert "2.1 times the 20 that are compute-optimal" in lines
    assert "1,048,576 tokens a step (512 x 2048)" in lines
    small = Config(
        model=ModelConfig(vocab=4096),
        data=DataConfig(),
        batch=BatchConfig(steps=30),
        optim=OptimConfig(),
        parallel=ParallelConfig(),
    )
    large = replace(small, model=ModelConfig(vocab=50_304, hidden=1024, layers=8))
    assert "a smaller model would do better" in "\n".join(sizes(large, vocab=50_304).lines())
    for toy in (small, RECIPES["tiny"]()):  # the rule is of models of 44M parameters and more
        assert "a smaller model would do better" not in "\n".join(sizes(toy, vocab=4096).lines())


def test_numbers_as_people_write_them():
    assert [parse_count(text) for text in ("12.8B", "550m", "1e9", "1_000", "2t")] == [12.8e9, 550e6, 1e9, 1000, 2e12]
    assert [parse_bytes(text) for text in ("32GB", "24GiB", "1.5 TB")] == [32e9, 24 * 2**30, 1.5e12]
    for wrong in ("", "many", "12x", "0"):
        with pytest.raises(ValueError, match="must be a number"):
            parse_count(wrong)
    assert stated_size("llama2-7b") == ("7b", 7e9)
    assert stated_size("qwen3-0.6b") == ("0.6b", 0.6e9)
    assert stated_size("runs/124m-continued") == ("124m", 124e6)
    assert [
        stated_size(name) for name in ("tiny", "gpt2", "v2beta", "run-3", "5090", "lr-sweep-10k", "ctx-4k", "2t")
    ] == [None] * 8
    assert [count(n) for n in (6_738_415_616, 549_900_000, 96)] == ["6.738B", "549.9M", "96"]
    assert (memory_size(2**30), memory_size(2**20), duration(90), duration(200_000)) == (
        "1.0 GiB",
        "1.0 MiB",
        "90.0 s",
        "2.3 days",
    )


def test_a_run_that_starts_hears_the_same(tmp_path):
    settings = replace(config("550m", model=dict(layers=12)), out=tmp_path / "550m")
    found = at_start(settings, vocab=50_304, dp_size=1, dataset={"": 11e9})
    assert not found.contradictions  # a name is no promise
    assert "550m, but the model has" in found.warnings[0]
    assert any("epochs over the data: 1.01" in line for line in found.lines())
    for name in ("mine", "lr-sweep-10k", "ctx-4k"):
        named = replace(settings, out=tmp_path / name)
        assert not at_start(named, vocab=50_304, dp_size=1, dataset={"": 11e9}).warnings
