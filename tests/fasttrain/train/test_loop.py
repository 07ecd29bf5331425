"""Whole runs of the training command, with one process and with many ranks."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler
from torch.torch_version import TorchVersion

import fasttrain.distributed.parallelize
import fasttrain.model
import fasttrain.train.loop
import fasttrain_kernels
from fasttrain.checkpoint.committed import list_checkpoints
from fasttrain.config import ModelConfig, ParallelConfig
from fasttrain.data.datasets import open_dataset
from fasttrain.data.locate import locate
from fasttrain.data.order import samples_at
from fasttrain.distributed.parallelize import parallelize
from fasttrain.distributed.runtime import start
from fasttrain.metrics.jsonl import read_metrics, read_validations
from fasttrain.model import Decoder
from fasttrain.train import main
from fasttrain.train.state import TrainState
from tests.runs import command, curve, events, train


def test_a_run_learns_and_leaves_everything_behind(tmp_path, capsys):
    run = tmp_path / "run"
    metrics = train(run, "--batch.steps", 30, "--optim.lr", 0.03, "--validation.every", 15)
    losses = curve(metrics)
    assert losses[0] == pytest.approx(math.log(4096), rel=0.01)  # knows nothing yet
    assert losses[-1] < losses[0] - 1
    assert [line["step"] for line in metrics] == list(range(1, 31))
    assert curve(metrics, "tokens") == [256 * step for step in range(1, 31)]
    split = [name for name in metrics[5] if name.startswith("time/")]
    assert {"time/data", "time/forward", "time/backward", "time/optimizer", "time/record"} <= set(split)
    seconds = sum(metrics[5][part] for part in split if part not in ("time/validation", "time/checkpoint"))
    assert metrics[5]["step_seconds"] == pytest.approx(seconds)
    assert metrics[5]["tokens_per_second"] == pytest.approx(256 / seconds)
    assert 0 < metrics[5]["mfu"] < 1
    assert {"grad_norm", "lr", "memory", "data_wait", "epoch"} <= set(metrics[5])
    scores = read_validations(run)
    assert [score["step"] for score in scores] == [15, 30]
    assert scores[-1]["loss"] < scores[0]["loss"] < losses[0]
    assert scores[-1]["perplexity"] == pytest.approx(math.exp(scores[-1]["loss"]))
    assert [c.step for c in list_checkpoints(run / "checkpoints")] == [24, 27, 30]
    printed = capsys.readouterr().out
    assert "layers=2 hidden=32" in printed  # the effective configuration
    assert "a sample:\ndef " in printed
    samples = events(run, "sample")
    assert [sample["step"] for sample in samples] == [15, 30]  # at each validation
    assert all(sample["text"].startswith("def ") for sample in samples)
    assert events(run, "start")[0]["evidence"]["torch"] == torch.__version__


LAYOUTS: dict[str, tuple[int, list[Any]]] = {
    "accumulated": (1, []),
    "two": (2, []),
    "four": (4, ["--batch.micro", 1]),
    "hybrid": (4, ["--parallel.dp_replicate", 2, "--batch.micro", 1]),
    "hybrid, reduced each time": (
        4,
        ["--parallel.dp_replicate", 2, "--parallel.grad_reduce", "every", "--batch.micro", 1],
    ),
    "weights kept": (2, ["--parallel.reshard_after_forward", False]),
    "replicated": (2, ["--parallel.dp_replicate", 2, "--batch.micro", 1]),
}


def test_waiting_for_data_is_measured(tmp_path):
    read = TrainState.micro_batches

    def slow(self: TrainState, step: int) -> Any:
        time.sleep(0.1)
        return read(self, step)

    with patch.object(TrainState, "micro_batches", slow):
        metrics = train(tmp_path / "run", "--data.prefetch", 0)
    assert min(curve(metrics, "data_wait")) >= 0.1
    assert min(curve(metrics, "time/data")) >= 0.1
    assert max(curve(train(tmp_path / "fast"), "data_wait")[1:]) < 0.1


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_ranks_micro_batches_and_sharding_do_not_change_the_curve(tmp_path, optimizer):
    """FSDP on 2 and 4 ranks, HSDP, replicas, and every way to accumulate, against one process with one micro-batch."""
    alone = train(tmp_path / "alone", "--optim.kind", optimizer, "--batch.micro", 8)
    for name, (world, options) in LAYOUTS.items():
        metrics = train(tmp_path / name, "--optim.kind", optimizer, *options, world=world)
        for figure in ("loss", "grad_norm", "valid_tokens"):
            assert curve(metrics, figure) == pytest.approx(curve(alone, figure), rel=2e-5), (name, figure)
        scores = [[s["loss"] for s in read_validations(tmp_path / run)] for run in (name, "alone")]
        assert scores[0] == pytest.approx(scores[1], rel=2e-5), name


def test_fused_ops_and_their_references_give_the_same_curve(tmp_path):
    fused = train(tmp_path / "fused", "--optim.z_loss", 1e-3)
    ops = ("rms_norm", "add_rms_norm", "qk_norm_rope", "attention", "swiglu", "linear_cross_entropy")
    references = {op: getattr(fasttrain_kernels, f"{op}_reference") for op in ops}
    references["swiglu"] = lambda packed: fasttrain_kernels.swiglu_reference(*packed.chunk(2, -1))
    attend = references["attention"]
    references["attention"] = lambda q, k, v, *, cu_seqlens, **_: attend(q, k, v, cu_seqlens=cu_seqlens)
    with patch.multiple(fasttrain_kernels, **references):
        plain = train(tmp_path / "plain", "--optim.z_loss", 1e-3)
    assert curve(plain) == pytest.approx(curve(fused), rel=1e-5)
    assert curve(plain, "grad_norm") == pytest.approx(curve(fused, "grad_norm"), rel=1e-4)


# Resumed


def test_two_ranks_go_on_as_one_as_four_and_as_replicas(tmp_path):
    whole = train(tmp_path / "whole", "--batch.micro", 1, world=2)
    for world, replicas in ((1, 1), (4, 1), (2, 2)):
        run = tmp_path / f"on {world}"
        options = ["--batch.micro", 1, "--resume", f"{tmp_path / 'whole'}@3", "--parallel.dp_replicate", replicas]
        metrics = train(run, *options, world=world)
        assert [line["step"] for line in metrics] == [4, 5, 6]
        assert curve(metrics) == pytest.approx(curve(whole)[3:], rel=1e-5)
        assert curve(metrics, "valid_tokens") == curve(whole, "valid_tokens")[3:]  # the same batches


def test_changed_settings_are_shown_and_recorded(tmp_path, capsys):
    run = tmp_path / "run"
    train(run)
    train(run, "--batch.steps", 8, "--optim.lr", 1e-5, "--optim.schedule", "constant")
    changed = {event["evidence"]["key"]: event["text"] for event in events(run, "changed setting")}
    assert changed["optim.lr"] == "optim.lr: 0.006 -> 1e-05"
    assert set(changed) == {"batch.steps", "optim.lr", "optim.schedule"}
    assert "optim.lr: 0.006 -> 1e-05" in capsys.readouterr().out
    assert read_metrics(run)[-1]["lr"] == 1e-5


def test_other_batches_go_on_in_the_data_where_the_run_was(tmp_path):
    """Effort C: a smaller block and a larger batch. No sample is seen twice, none is left out."""
    run = tmp_path / "run"
    train(run)
    seen: list[int] = []
    read = TrainState.micro_batches

    def noted(self: TrainState, step: int) -> Any:
        seen.extend(self.batches.rows_at(step).samples.tolist())
        return read(self, step)

    with patch.object(TrainState, "micro_batches", noted):
        metrics = train(run, "--data.sequence", 16, "--batch.sequences", 24, "--batch.steps", 9)
    tokens = curve(metrics, "tokens")
    assert tokens[5:] == [6 * 256, 6 * 256 + 384, 6 * 256 + 2 * 384, 6 * 256 + 3 * 384]
    size = (len(open_dataset().split("train")) - 1) // 16
    numbers = np.arange(96, 96 + 3 * 24)
    assert seen == samples_at(np.zeros_like(numbers), numbers, sizes=[size], seeds=[0]).tolist()


def test_a_mixture_goes_on_bitwise_and_with_other_weights_where_each_component_was(tmp_path):
    mixture = [f"--data.mixture.{name}.path={open_dataset().path}" for name in ("one", "two")]
    whole = train(tmp_path / "whole", *mixture, "--data.mixture.one.weight", 3)
    half = train(tmp_path / "half", *mixture, "--data.mixture.one.weight", 3, "--resume", f"{tmp_path / 'whole'}@3")
    assert curve(half) == curve(whole)[3:]
    seen = list_checkpoints(tmp_path / "half" / "checkpoints")[-1].metadata["used"]
    assert sum(seen.values()) == 48
    assert abs(seen["one"] - 36) < 6
    used: list[dict[str, int]] = []
    read = TrainState.micro_batches

    def noted(self: TrainState, step: int) -> Any:
        used.append(self.batches.used_at(step))
        return read(self, step)

    with patch.object(TrainState, "micro_batches", noted):
        train(tmp_path / "half", *mixture, "--data.mixture.two.weight", 9, "--data.sequence", 16, "--batch.steps", 8)
    assert used[0] == {name: 2 * samples for name, samples in seen.items()}  # of half the length
    changed = {event["evidence"]["key"] for event in events(tmp_path / "half", "changed setting")}
    assert changed == {"data.mixture.one.weight", "data.mixture.two.weight", "data.sequence", "batch.steps"}


# Mistakes


def test_what_a_run_trained_on_is_found_again(tmp_path):
    """Also where it was resumed with other batches, and where a resumed run went back a few steps."""
    read, trained = TrainState.micro_batches, {}

    def noted(run: TrainState, step: int) -> list[Any]:
        micro_batches = read(run, step)
        trained[step] = torch.cat([micro.tokens for micro in micro_batches])
        return micro_batches

    options = ["--validation.every", 0, "--data.prefetch", 0]
    with patch.object(TrainState, "micro_batches", noted):
        train(tmp_path, *options)
        train(tmp_path, *options, "--batch.steps", 10, "--batch.sequences", 4, "--data.sequence", 64)
    assert len(trained) == 10
    stream = open_dataset().split("train")
    for step, tokens in trained.items():
        excerpts = list(locate(tmp_path, step))
        assert excerpts[-1].row == len(tokens) - 1
        found = [stream.windows(np.array([e.start]), e.stop - e.start)[0] for e in excerpts]
        assert np.concatenate(found).tolist() == tokens.flatten().tolist()


def refused(capsys, run: Path, *options: Any) -> str:
    with pytest.raises(SystemExit) as exit:
        main(command(run, *options))
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_mistakes_are_named_before_anything_is_trained(tmp_path, capsys):
    run = tmp_path / "run"
    assert f"{tmp_path / 'nothing'} does not exist" in refused(capsys, run, "--data.path", tmp_path / "nothing")
    assert "model.vocab (100) is smaller than the vocabulary of the data, 4096" in refused(
        capsys, run, "--model.vocab", 100
    )
    assert "parallel.device is cuda" in refused(capsys, run, "--parallel.device", "cuda")
    assert "parallel.dp_replicate (2) must divide the number of ranks, 1" in refused(
        capsys, run, "--parallel.dp_replicate", 2
    )
    assert "does not exist" in refused(capsys, run, "--resume", tmp_path / "elsewhere")
    assert not list_checkpoints(run / "checkpoints")


@pytest.mark.parametrize(("name", "told"), [("550m", 1), ("lr-sweep-10k", 0), ("ctx-4k", 0)])
def test_a_run_whose_name_contradicts_its_size_is_told_so(tmp_path, name, told):
    """Effort D: a "550M" that was 160M. A directory's name is a note, and only in millions or billions."""
    train(tmp_path / name, "--batch.steps", 3)
    texts = [event["text"] for event in events(tmp_path / name, "plan")]
    assert sum(f"says {name}, but the model has" in text for text in texts) == told


def test_a_disk_that_the_run_would_fill_is_an_error_before_it_starts(tmp_path, capsys):
    with patch("fasttrain.checkpoint.disk_space.free_bytes", lambda *_: 66_000_000):
        error = refused(capsys, tmp_path / "run")
    assert "no disk space for the checkpoints of this run: 70.6 MB are needed and 66.0 MB are free in" in error
    assert "keep fewer checkpoints (checkpoint.keep_last, keep_every)" in error


def test_what_cannot_change_is_an_error_and_leaves_the_run_alone(tmp_path, capsys):
    run = tmp_path / "run"
    train(run)
    message = refused(capsys, run, "--model.hidden", 64, "--optim.kind", "adamw", "--batch.steps", 9)
    assert "model.hidden: 32 -> 64; optim.kind: muon -> adamw" in message
    assert "holds a run at step 6" in refused(capsys, run, "--resume", "never")
    assert "is at step 6; to resume from step 3" in refused(capsys, run, "--resume", f"{run}@3")
    assert "it has 3, 6" in refused(capsys, run, "--resume", f"{run}@5", "--out", tmp_path / "other")
    assert main(command(run)) == 0  # finished already
    assert "nothing is left to do" in capsys.readouterr().out
    assert len(read_metrics(run)) == 6


def test_a_loss_that_guessing_would_beat_is_called_a_defect(tmp_path, capsys):
    """Effort A: 71 nats per token were taken for over-fitting."""
    train(tmp_path / "run", "--optim.lr", 3.0, "--optim.clip", 0.0, "--optim.schedule", "constant")
    score = read_validations(tmp_path / "run")[-1]
    assert score["loss"] > math.log(4096)
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"]))
    assert "worse than guessing among 4096 tokens" in capsys.readouterr().out


def test_patience_ends_a_run_that_no_longer_improves(tmp_path):
    run = tmp_path / "run"
    stubborn = ["--optim.lr", 1e-30, "--optim.muon_lr", 1e-30, "--batch.steps", 30]
    stubborn += ["--validation.every", 1, "--validation.patience", 2]
    assert main(command(run, *stubborn)) == 0
    assert events(run, "early stop")[0]["step"] == 3
    assert list_checkpoints(run / "checkpoints")[-1].step == 3


@pytest.mark.slow
def test_low_precision_trains_too(tmp_path):
    """bf16 and fp16 with its scaler, weights in fp32, in a process of its own and on two ranks."""
    exact = curve(train(tmp_path / "fp32"))
    for precision in ("bf16", "fp16"):
        for world in (1, 2):
            losses = curve(train(tmp_path / f"{precision} {world}", "--parallel.precision", precision, world=world))
            assert losses == pytest.approx(exact, rel=2e-3), (precision, world)
            assert losses != exact


def test_an_untied_head_is_sharded_with_the_embedding(tmp_path):
    options = ["--model.tied_head", False, "--model.qk_norm", False]
    alone, two = (train(tmp_path / f"{world}", *options, world=world) for world in (1, 2))
    assert curve(two) == pytest.approx(curve(alone), rel=1e-5)
    assert curve(two, "grad_norm") == pytest.approx(curve(alone, "grad_norm"), rel=1e-5)


def test_recomputation_changes_memory_and_nothing_else(tmp_path):
    exact = train(tmp_path / "none")
    for recompute in ("selective", "full"):
        again = train(tmp_path / recompute, "--parallel.recompute", recompute)
        assert curve(again) == curve(exact)
        assert curve(again, "grad_norm") == curve(exact, "grad_norm")
    held = {recompute: activations(recompute) for recompute in ("none", "selective", "full")}
    assert held["full"] < 0.3 * held["selective"]
    assert held["selective"] < 0.8 * held["none"]


def activations(recompute: str) -> int:
    """Bytes that a model of four blocks holds between forward and backward."""
    section = ParallelConfig(recompute=recompute)  # type: ignore[arg-type]
    with start(section) as runtime:
        model = Decoder(
            ModelConfig(layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128), vocab=64, sequence=128
        )
        model.init_weights(0)
        parallelize(model, section, runtime, compiled=False)
        tokens = torch.randint(64, (4, 128))
        with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
            loss = model(tokens, tokens)
        del loss
    return sum(event.nbytes() for event in profile.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_without_a_compiler_a_run_is_eager_and_says_so(tmp_path, capsys, missing):
    def none() -> str:
        raise InvalidCxxCompiler

    absent = (
        patch("torch._inductor.cpp_builder.get_cpp_compiler", none)
        if missing == "compiler"
        else patch("sysconfig.get_path", lambda name: str(tmp_path))
    )
    with absent, patch.object(fasttrain.distributed.parallelize, "COMPILE_PAYS", 0):
        train(tmp_path / "run", "--batch.steps", 3)
        said = capsys.readouterr().out
        assert "not compiled (there " in said
        assert "C++ compiler" in said or "Python headers" in said
        assert "parallel.compile is on, but there" in refused(capsys, tmp_path / "on", "--parallel.compile", "on")


def test_a_run_that_is_too_short_to_pay_for_it_is_not_compiled(tmp_path, capsys):
    compiled = patch.object(torch, "compile", lambda function, **_: function)
    with compiled:
        train(tmp_path / "short")
        assert "not compiled (the run is too short to pay for it)" in capsys.readouterr().out
        with patch.object(fasttrain.distributed.parallelize, "COMPILE_PAYS", 1e6):
            train(tmp_path / "long")
        assert "blocks are compiled" in capsys.readouterr().out


def test_two_ranks_compile_their_blocks_under_fsdp(tmp_path):
    recompute = "none" if torch.__version__ >= TorchVersion("2.15") else "selective"
    options = ["--batch.steps", 3, "--parallel.recompute", recompute, "--validation.every", 0]
    eager = train(tmp_path / "eager", *options)
    compiled = train(tmp_path / "compiled", *options, "--parallel.compile", "on", world=2)
    assert curve(compiled) == pytest.approx(curve(eager), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--parallel.precision", "fp16"], ["--parallel.recompute", "selective"]])
def test_a_gpu_trains_as_a_cpu_does(tmp_path, options):
    cpu = train(tmp_path / "cpu", "--parallel.device", "cpu")
    gpu = train(tmp_path / "gpu", "--parallel.device", "cuda", "--parallel.compile", "on", *options)
    assert curve(gpu) == pytest.approx(curve(cpu), rel=5e-3)


def test_a_compiled_run_never_compiles_again(tmp_path):
    """Documents differ from batch to batch, validation runs without gradients, and the sample with other shapes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = ["--parallel.compile", "on", "--batch.steps", 4, "--validation.every", 2]
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = train(tmp_path / "compiled", *options)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1  # all blocks share it
    eager = train(tmp_path / "eager", *options, "--parallel.compile", "off")
    assert curve(compiled) == pytest.approx(curve(eager), rel=1e-5)
