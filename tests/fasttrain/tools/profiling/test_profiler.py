"""Runs with --profile: what they leave and print, and that their numbers are those of a run without."""

import gzip
import json
import re
from typing import Any

import pytest
import torch

from fasttrain.cli.parse import load
from fasttrain.config import Config
from fasttrain.recipes import RECIPES
from fasttrain.tools.profiling import Profiler, check
from fasttrain.train import main
from tests.runs import command, curve, train, weights

BESIDE = ("time/profile", "time/checkpoint", "time/validation")
STEPS = ("--batch.steps", "10", "--checkpoint.every", "4", "--validation.every", "0")


def events(path):
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def test_a_profiled_run(tmp_path, capfd):
    plain = train(tmp_path / "plain", *STEPS)
    assert not (tmp_path / "plain" / "profile").exists()
    capfd.readouterr()
    profiled = train(tmp_path / "run", *STEPS, "--profile")
    printed = capfd.readouterr()

    # the same numbers, bit by bit
    assert curve(profiled) == curve(plain)
    assert curve(profiled, "grad_norm") == curve(plain, "grad_norm")
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if isinstance(before[name], torch.Tensor))

    # the steps 6, 7 and 8, and no other
    assert [path.name for path in (tmp_path / "run" / "profile").iterdir()] == ["trace-rank0-step8.json.gz"]
    trace = events(tmp_path / "run" / "profile" / "trace-rank0-step8.json.gz")
    names = [event["name"] for event in trace]
    assert sum(name.startswith("ProfilerStep#") and event.get("cat") == "user_annotation"
               for name, event in zip(names, trace, strict=True)) == 3  # fmt: skip
    assert sum(name.startswith("Optimizer.step#Muon") for name in names) == 3
    assert {"aten::mm", "fasttrain::attention_cpp"} <= set(names)

    # the table: shares of all time, in order
    assert "profiled steps 6 to 8" in printed.out
    table = re.findall(r"^ +([\d.]+)%  (.+?)  +[\d.]+ ms", printed.out, re.M)
    shares = [float(share) for share, _ in table]
    assert len(table) == 12  # ten, all others, no op
    assert shares[:10] == sorted(shares[:10], reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.6)  # as printed
    parts = dict(re.findall(r"(\w+) ([\d.]+)%", re.search(r"a step takes .* ms: (.*)", printed.out)[1]))
    assert {"data", "forward", "backward", "optimizer"} <= parts.keys()
    assert "profiler_start" not in printed.err  # kineto's own words

    # writing the trace is not a step's time
    assert max(line["time/profile"] for line in profiled if "time/profile" in line) == profiled[8]["time/profile"]
    own = [seconds for part, seconds in profiled[8].items() if part.startswith("time/") and part not in BESIDE]
    assert profiled[8]["step_seconds"] == pytest.approx(sum(own))


def test_every_rank_leaves_a_trace(tmp_path):
    run = tmp_path / "run"
    train(run, "--log.profile", 1, world=2)
    assert sorted(path.name for path in (run / "profile").iterdir()) == [
        "trace-rank0-step6.json.gz",
        "trace-rank1-step6.json.gz",
    ]
    for rank in (0, 1):
        names = {event["name"] for event in events(run / "profile" / f"trace-rank{rank}-step6.json.gz")}
        assert "gloo:all_reduce" in names


def test_a_resumed_run_warms_up_again(tmp_path):
    constant = ("--optim.schedule", "constant", "--optim.warmup", 1, "--validation.every", 0)
    train(tmp_path, "--batch.steps", 3, *constant)
    train(tmp_path, "--batch.steps", 9, *constant, "--log.profile", 1)
    assert [path.name for path in (tmp_path / "profile").glob("trace*")] == ["trace-rank0-step9.json.gz"]


def test_a_run_that_is_too_short_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main(command(tmp_path / "run", "--profile"))
    assert exit.value.code == 2
    assert (
        "log.profile is 3 and 6 steps are left to do; the first 5 of a process are not profiled: raise batch.steps, or "
        "lower log.profile" in capsys.readouterr().err
    )
    check(3, left=8)
    check(0, left=1)


def test_the_flag_and_the_setting():
    assert load([], RECIPES).log.profile == 0
    assert load(["--profile"], RECIPES).log.profile == 3
    assert load(["--profile", "--log.profile", "7", "--batch.steps", "90"], RECIPES).log.profile == 7
    with pytest.raises(SystemExit):
        load(["--log.profile", "-1"], RECIPES)


def test_off_it_does_nothing(tmp_path, monkeypatch):
    """Neither files nor a profiler: a step costs one comparison."""
    monkeypatch.setattr("fasttrain.tools.profiling.profile", None)
    runtime: Any = type("Runtime", (), {"device": torch.device("cpu"), "rank": 0})
    with Profiler(
        tmp_path / "profile", runtime, steps=Config().log.profile, completed=0, on_progress=print
    ) as profiler:
        assert not any(profiler.begin_step() for _ in range(20))
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_says_what_was_profiled(tmp_path):
    runtime: Any = type("Runtime", (), {"device": torch.device("cpu"), "rank": 0})
    for begun, said in (
        (3, "nothing was profiled: the run ended within the 5 warm-up steps"),
        (7, "profiled steps 106 to 107"),
    ):
        told: list[str] = []
        with Profiler(tmp_path / str(begun), runtime, steps=3, completed=100, on_progress=told.append) as profiler:
            for _ in range(begun):
                profiler.begin_step()
                torch.ones(8, 8) @ torch.ones(8, 8)
                profiler.end_step(type("PhaseTimes", (), {"seconds": lambda self: {"forward": 0.5}})())
        assert told[0].startswith(said)
    assert [path.name for path in (tmp_path / "7").glob("trace*")] == ["trace-rank0-step107.json.gz"]


def test_a_profile_that_cannot_be_written_is_not_the_end_of_the_run(tmp_path):
    runtime: Any = type("Runtime", (), {"device": torch.device("cpu"), "rank": 0})
    told: list[str] = []
    (tmp_path / "profile").write_text("in the way")
    with Profiler(tmp_path / "profile", runtime, steps=1, completed=0, on_progress=told.append) as profiler:
        for _ in range(9):
            profiler.begin_step()
    assert len(told) == 1
    assert told[0].startswith("the profile could not be written: [Errno 17] File exists")


def test_an_error_is_not_followed_by_a_trace(tmp_path):
    runtime: Any = type("Runtime", (), {"device": torch.device("cpu"), "rank": 0})
    profiler = Profiler(tmp_path / "profile", runtime, steps=1, completed=0, on_progress=print)
    for _ in range(6):
        profiler.begin_step()
    with pytest.raises(ZeroDivisionError), profiler:
        raise ZeroDivisionError
    assert not (tmp_path / "profile").exists()
    with torch.profiler.profile() as after:  # it is stopped: another one can start
        torch.ones(2) + 1
    assert after.key_averages()


def test_the_memory_of_a_gpu_is_its_allocators_history(tmp_path, monkeypatch):
    """The calls, in their order; what they record needs a GPU."""
    calls: list[Any] = []
    told: list[str] = []
    runtime: Any = type("Runtime", (), {"device": torch.device("cuda"), "rank": 3})
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: calls.append(name))
    with Profiler(tmp_path, runtime, steps=2, completed=0, on_progress=told.append) as profiler:
        for step in range(1, 9):
            profiler.begin_step()
            assert len(calls) == (0 if step < 6 else 1 if step < 8 else 3)  # from the first profiled step on
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.end_step(type("PhaseTimes", (), {"seconds": lambda self: {"forward": 0.5}})())
    assert calls[0]["stacks"] == "python"
    assert calls[1:] == [str(tmp_path / "memory-rank3-step7.pickle"), {"enabled": None}]
    assert told[-1].endswith("memory-rank3-step7.pickle (open it at pytorch.org/memory_viz)")


@pytest.mark.gpu
def test_a_profiled_run_on_a_gpu(tmp_path, capsys):
    train(tmp_path, *STEPS, "--profile")
    assert (tmp_path / "profile" / "memory-rank0-step8.pickle").stat().st_size > 0
    printed = capsys.readouterr().out
    assert 0 < float(re.search(r"the GPU is busy ([\d.]+)% of the time", printed)[1]) <= 100
    assert "aten::mm" in printed
