import json
import re
import resource
import subprocess
import sys

import pytest

from fasttrain.cli.plan import main

LLAMA = ["--recipe", "llama2-7b"]
FIELDS = ("memory_gib", "tokens_per_second_per_gpu", "mfu", "days", "cost_usd")


def asked(capsys, *arguments):
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_json_has_every_field_with_its_band(capsys):
    code, answer = asked(capsys, "--recipe", "qwen3-8b", "--gpu", "h100-sxm", "--gpus", "64", "--gpus-per-node", "8")
    assert code == 0
    assert answer["parameters"] == 8_190_735_360
    assert answer["tokens_per_step"] == 256 * 4096
    for field in FIELDS:
        assert answer[field]["low"] < answer[field]["value"] < answer[field]["high"]
    assert answer["fits"]
    assert [row["gpus"] for row in answer["scaling"]] == [2**n for n in range(13)]
    assert sum(answer["memory_parts_gib"].values()) == pytest.approx(answer["memory_gib"]["value"], rel=1e-4)
    assert sum(answer["step_parts_seconds"].values()) == pytest.approx(answer["step_seconds"])
    days = answer["tokens"] / 64 / answer["tokens_per_second_per_gpu"]["value"] / 86_400
    assert answer["days"]["value"] == pytest.approx(days, rel=1e-4)
    assert answer["cost_usd"]["value"] == pytest.approx(days * 24 * 64 * 2.69, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--recipe", "124m", "--gpu", "a100-80gb", "--size", "300m"], "--size says 300m"),
        (["--recipe", "300m", "--gpu", "a100-80gb", "--gpus", "4", "--tokens", "105B"], "set batch.steps to 100136"),
        (["--recipe", "300m", "--gpu", "a100-80gb", "--gpus", "3"], "must be a multiple of 48"),
        ([*LLAMA, "--gpu", "a100-80gb", "--gpus", "128", "--disk", "300GB"], "in --disk; free some"),
        ([*LLAMA, "--gpu", "rtx-4090", "--gpus", "16", "--parallel.dp_replicate", "1"], "do not fit in 23.5 GiB"),
        (["--recipe", "llama2-70b", "--gpu", "a100-80gb", "--gpus", "8"], "no other settings make it fit on 8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_exit_code_1_with_the_remedy(capsys, arguments, expected):
    assert main(arguments) == 1
    assert expected in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("name", [["--recipe", "550m"], ["--recipe", "124m", "--out", "runs/550m"]])
def test_a_name_that_states_another_size_is_a_warning(capsys, name):
    code, answer = asked(capsys, *name, "--gpu", "h200", "--model.layers", "9")
    assert code == 0
    assert "says 550m, but the model has" in answer["warnings"][0]
    code, answer = asked(capsys, "--recipe", "tiny", "--gpu", "h200", "--out", "runs/ctx-4k")
    assert (code, answer["warnings"]) == (0, [])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--recipe", "124m", "--gpu", "h100"], "did you mean h100-nvl or h100-pcie or h100-sxm"),
        (["--recipe", "124m"], "--gpu is required; one of"),
        (["--recipe", "124M", "--gpu", "h200"], "there is no recipe '124M'"),
        (["--recipe", "124m", "--gpu", "h200", "--model.layer", "3"], "--model.layer is unknown; model has layers"),
        (["--recipe", "124m", "--gpu", "h200", "--tokens", "lots"], "must be a number such as 12.8B"),
        (["--recipe", "124m", "--gpu", "cpu", "--gpus", "2"], "cpu is this machine"),
        (["--recipe", "tiny", "--gpu", "h200", "--data.path", "/nowhere"], "set model.vocab"),
    ],
)
def test_mistakes_in_the_command_are_exit_code_2(capsys, arguments, expected):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert expected in capsys.readouterr().err.replace("\n", " ")


def test_a_config_file_is_planned_as_it_would_be_trained(capsys, tmp_path):
    (tmp_path / "run.toml").write_text('out = "runs/mine"\n[model]\nlayers = 3\nvocab = 1024\n')
    code, answer = asked(capsys, "--config", str(tmp_path / "run.toml"), "--gpu", "l40s", "--dataset-tokens", "1M")
    assert code == 0
    assert answer["parameters"] == 1024 * 128 + 128 + 3 * (128 * (12 * 32 + 3 * 384) + 2 * 128 + 2 * 32)
    assert answer["epochs"][""] == pytest.approx(1000 * 8 * 256 / 1e6)


def test_the_price_and_the_network_can_be_told(capsys):
    run = ["--recipe", "llama2-7b", "--gpu", "a100-80gb", "--gpus", "128"]
    _, usual = asked(capsys, *run)
    _, slow = asked(capsys, *run, "--network", "100", "--price", "3")
    assert slow["tokens_per_second_per_gpu"]["value"] < usual["tokens_per_second_per_gpu"]["value"]
    assert slow["cost_usd"]["value"] == pytest.approx(3 * slow["gpu_hours"]["value"], rel=1e-4)


def test_search_and_fit(capsys):
    _, answer = asked(capsys, "--recipe", "550m", "--fit", "32GB", "--search")
    assert answer["gpu"] == "rtx-5090"
    assert answer["search"][0]["tokens_per_second_per_gpu"]["value"] >= answer["tokens_per_second_per_gpu"]["value"]
    assert answer["fit"]["parameters"] > 1e9
    assert answer["fit"]["memory_gib"]["value"] < 32
    assert main(["--recipe", "550m", "--fit", "32GB", "--search"]) == 0
    text = capsys.readouterr().out
    assert "the best that fit" in text
    assert "the largest model in these proportions" in text


def test_the_terminal_shows_a_bar_and_every_section(capsys):
    assert main(["--recipe", "llama2-7b", "--gpu", "a100-80gb", "--gpus", "128"]) == 0
    text = capsys.readouterr().out
    assert "██" in text
    for word in (
        "6,738,415,616 parameters", "activations", "the peak is at: backward of block 32", "matmuls",
        "GPU-hours", "advice", "RunPod's list, 2026-03-10",
    ):  # fmt: skip
        assert word in text


def test_the_page_is_one_file_without_network(capsys, tmp_path):
    page = tmp_path / "plan.html"
    main(["--recipe", "llama2-7b", "--gpu", "a100-80gb", "--gpus", "128", "--html", str(page)])
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?://|@import|<script", text)
    assert text.count("<svg") == 2
    assert text.count("<polygon") == 7  # a layer for each part
    for word in (
        "Memory of a GPU through a step",
        "More GPUs, fewer GPUs",
        "HSDP beats FSDP on",
        "6.738B",
        "predicted",
    ):
        assert word in text


def test_a_page_of_any_speed_has_its_charts(capsys, tmp_path):
    """Here 80k to 100k tokens/s per GPU, of which an axis once made no steps."""
    page = tmp_path / "plan.html"
    assert main(["--recipe", "300m", "--gpu", "a100-80gb", "--gpus", "3", "--html", str(page)]) == 1
    assert page.read_text().count("<svg") == 2


def test_a_plan_takes_less_than_ten_seconds_and_no_torch():
    script = (
        "import sys; from fasttrain.cli import main; "
        "code = main(['plan', '--recipe', 'qwen3-8b', '--gpu', 'h100-sxm', '--gpus', '64', '--json', '--search']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime  # of the CPU: others use the machine too
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 10


def test_the_cpu_is_measured(capsys, monkeypatch):
    """Without what earlier tests have left in this process: test_cpu plans in one of its own."""
    monkeypatch.setattr("fasttrain.tools.plan.cpu.resident_memory", lambda: 2**29)
    code, answer = asked(capsys, "--recipe", "tiny", "--gpu", "cpu", "--model.layers", "2", "--batch.micro", "2")
    assert code == 0
    assert answer["cost_usd"] is None
    assert 100 < answer["tokens_per_second_per_gpu"]["value"] < 1e6
    assert answer["step_parts_seconds"]["blocks"] > 0
    assert 0.3 < answer["memory_gib"]["value"] < 3
