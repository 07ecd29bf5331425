from dataclasses import replace

import pytest

from fasttrain.flops import num_parameters
from fasttrain.gpus import find_gpu, gpu_of_device, gpus
from fasttrain.recipes import RECIPES
from fasttrain.tools.plan.estimate import changed
from fasttrain.tools.plan.speed import Hardware, collectives, speed, work_of

LLAMA = RECIPES["llama2-7b"]()
A100 = Hardware.of(find_gpu("a100-80gb"), 128)


def rate(settings=LLAMA, dp_size=128, hardware=A100, **work):
    described = work_of(settings, vocab=settings.model.vocab, dp_size=dp_size)
    return speed(replace(described, **work), hardware).rate


def test_what_helps_helps():
    assert rate() > rate(fused=False, compiled=False)
    assert rate() > rate(changed(LLAMA, parallel=dict(recompute="selective")))
    assert rate(changed(LLAMA, parallel=dict(recompute="selective"))) > rate(
        changed(LLAMA, parallel=dict(recompute="full"))
    )
    assert rate() > rate(hardware=replace(A100, network=A100.network / 8))
    assert rate(hardware=Hardware.of(find_gpu("h100-sxm"), 128)) > 1.5 * rate()
    assert rate(precision="bf16") > 3 * rate(precision="fp32")


def test_the_parts_are_the_step():
    found = speed(work_of(LLAMA, vocab=32_000, dp_size=128), A100)
    assert set(found.parts) == {"matmuls", "attention", "streaming", "launching", "optimizer", "exposed"}
    assert found.rate == pytest.approx(2 * 4096 / sum(found.parts.values()))
    assert 0.3 < found.mfu < 0.8
    flops = 6 * (num_parameters(LLAMA.model, 32_000).total - 32_000 * 4096) * 2 * 4096
    assert found.parts["matmuls"] == pytest.approx(flops / 312e12 / 0.8433, rel=0.01)


def test_volumes_of_communication_are_those_of_theory():
    """Seconds times bandwidth are the bytes: 2 (2 P_blocks + P_root) gathered, 4 P reduced, and among replicas
    2 (R - 1) / R * 4 P / S for each of a node's GPUs."""
    counts = num_parameters(LLAMA.model, 32_000)
    root = counts.total - counts.blocks
    fast = replace(A100, gpu=replace(A100.gpu, link=1e30))
    settings = changed(LLAMA, parallel=dict(dp_replicate=1))
    found = collectives(work_of(settings, vocab=32_000, dp_size=128), fast)
    network = 0.85 * A100.network
    hops = 1.5e-6 * 127 + 8e-6 * 15
    assert (found["gather"] - (2 * 32 + 1) * hops) * network == pytest.approx(15 / 16 * 2 * (2 * counts.blocks + root))
    assert (found["reduce"] - 33 * hops) * network == pytest.approx(15 / 16 * 4 * counts.total)
    hybrid = collectives(work_of(LLAMA, vocab=32_000, dp_size=128), fast)
    assert hybrid["dp_replicate"] * network == pytest.approx(8 * 2 * 15 / 16 * 4 * counts.total / 8)


def test_accumulation_gathers_again_and_reduces_once():
    settings = changed(LLAMA, batch=dict(micro=1), parallel=dict(dp_replicate=1))
    once = collectives(work_of(changed(settings, batch=dict(sequences=128)), vocab=32_000, dp_size=128), A100)
    twice = collectives(work_of(settings, vocab=32_000, dp_size=128), A100)
    assert twice["gather"] == pytest.approx(2 * once["gather"])
    assert twice["reduce"] == pytest.approx(once["reduce"])


def test_hybrid_sharding_wins_where_groups_are_large():
    """Rings over thousands of GPUs are slow to go round."""
    settings = changed(LLAMA, batch=dict(sequences=8192))
    many = work_of(settings, vocab=32_000, dp_size=4096)
    assert speed(replace(many, dp_replicate=512), A100).rate > 1.1 * speed(replace(many, dp_replicate=1), A100).rate


def test_the_table_has_what_people_rent():
    for name in (
        "a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "b200", "l40s", "rtx-3090", "rtx-4090", "rtx-5090",
        "mi300x",
    ):  # fmt: skip
        gpu = find_gpu(name)
        assert gpu.half > gpu.fp32 > 0
        assert gpu.bandwidth > 5e11
        assert gpu.memory > 20 * 2**30
        assert gpu.price is not None or name == "mi300x"
    assert all(gpu_of_device(gpu.device) == gpu for gpu in gpus().values())


def test_a_wrong_name_gets_a_hint():
    with pytest.raises(ValueError, match="did you mean h100-nvl or h100-pcie or h100-sxm"):
        find_gpu("H100")
    with pytest.raises(ValueError, match="there are gb200, b200"):
        find_gpu("tpu")
