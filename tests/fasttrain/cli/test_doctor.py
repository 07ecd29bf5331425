"""fasttrain doctor, as a user runs it."""

import dataclasses
import json
import subprocess
import sys

import pytest

from fasttrain.cli.doctor import main
from fasttrain.tools.doctor import examine as speed
from fasttrain_kernels import cpp
from fasttrain_kernels.testing import self_check


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(speed, "WRITTEN", 2**22)


def answer(capsys, *arguments):
    code = main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    return code, {finding["name"]: finding for finding in found["findings"]}, found["broken"]


def test_all_sections_and_what_is_measured(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    sections = ["hardware", "limits", "software", "environment", "a run will use", "ops", "disk", "speed"]
    assert [line for line in lines if line in sections] == sections
    for case in self_check.CASES:
        assert f"  {case.name:<24} CPU, float32: OK (" in printed
    for figure in ("matmul float32", "matmul bfloat16", "write"):
        assert any(line.startswith(f"  {figure}") for line in lines)
    assert lines[-1] == "fine: nothing that a run needs is missing"
    assert "\x1b" not in printed  # in a log


def test_json_and_quick(tmp_path, capsys):
    code, findings, broken = answer(capsys, "--out", str(tmp_path), "--quick")
    assert (code, broken) == (0, [])
    assert findings["processor"]["figure"] >= 1
    assert findings["write"]["value"] == "possible"
    assert "matmul float32" not in findings
    assert findings["device"]["value"] == "cpu (parallel.device is auto)"
    assert findings["precision"]["value"].startswith("fp32")
    assert findings["attention"]["value"] == "cpp"
    assert set(findings["processor"]) == {"section", "name", "value", "level", "remedy", "figure", "unit"}


def test_attention_without_a_compiler(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpp, "missing", lambda: "there is no C++ compiler (g++)")
    code, findings, _ = answer(capsys, "--out", str(tmp_path), "--quick")
    assert code == 0
    assert findings["attention"]["value"] == "blocked (cpp: there is no C++ compiler (g++); sdpa: documents)"
    assert findings["attention"]["level"] == "missing"
    assert findings["attention"]["remedy"].startswith("apt-get install g++")
    _, findings, _ = answer(capsys, "--out", str(tmp_path), "--quick", "--parallel.precision", "bf16")
    assert findings["attention"]["value"].startswith("blocked (cpp: dtype bfloat16: it takes float32")
    assert findings["attention"]["level"] == "ok"  # a compiler would not help


def test_a_wrong_op_and_one_that_fails(tmp_path, capsys, monkeypatch):
    cases = {case.name: case for case in self_check.CASES}

    def fails(**_):
        raise RuntimeError("no kernel image is available for execution on the device\nCompile with ...")

    wrong = dataclasses.replace(cases["swiglu"], op=lambda gate, up: cases["swiglu"].op(gate, up) * 1.1)
    failing = dataclasses.replace(cases["rms_norm"], op=fails)
    monkeypatch.setattr(self_check, "CASES", [wrong, failing, cases["add_rms_norm"]])
    code, findings, broken = answer(capsys, "--out", str(tmp_path), "--quick")
    assert (code, broken) == (1, ["swiglu", "rms_norm"])
    assert findings["swiglu"]["value"].startswith("CPU, float32: output 0: error 0.")
    assert findings["rms_norm"]["value"] == (
        "CPU, float32: fails with RuntimeError: no kernel image is available for execution on the device"
    )
    assert main(["--out", str(tmp_path), "--quick"]) == 1
    printed = capsys.readouterr().out
    assert "    do not train: run make test" in printed
    assert printed.splitlines()[-1] == "2 broken"


def test_settings_of_the_run_count(tmp_path, capsys):
    code, findings, broken = answer(capsys, "--out", str(tmp_path), "--quick", "--parallel.device", "cuda")
    assert (code, broken) == (1, ["device"])
    assert findings["device"]["remedy"].startswith("set it to cpu or auto")
    code, findings, _ = answer(
        capsys, "--out", str(tmp_path), "--quick", "--recipe", "124m", "--parallel.compile", "on"
    )
    assert code == 0
    assert findings["blocks"]["value"] == "compiled (parallel.compile is on)"


def test_a_directory_that_cannot_be_written(capsys):
    code, findings, broken = answer(capsys, "--out", "/proc/sys/runs", "--quick")
    assert (code, broken) == (1, ["write"])
    assert "choose another --out than /proc/sys/runs" in findings["write"]["remedy"]


def test_a_machine_without_triton_is_told_so(tmp_path):
    """Without a GPU it is no obstacle."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from fasttrain.cli.doctor import main\n"
        f"sys.exit(main(['--quick', '--json', '--out', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = next(f for f in json.loads(done.stdout)["findings"] if f["name"] == "triton")
    assert (found["level"], found["remedy"]) == ("missing", "pip install 'triton>=3.7': kernels of GPUs need it")


def test_an_unknown_option_is_a_mistake(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--quik"])
    assert exit.value.code == 2
    assert "quik" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_real_gpu(tmp_path, capsys):
    code, findings, broken = answer(capsys, "--out", str(tmp_path))
    assert (code, broken) == (0, [])
    assert findings["device"]["value"].startswith("cuda")
    assert findings["matmul bfloat16"]["figure"] > 1e12
