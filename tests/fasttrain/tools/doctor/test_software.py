import sys

import pytest

from fasttrain import config
from fasttrain.tools.doctor.software import variables, versions


def found(settings=None, *, on_gpu=False):
    return {finding.name: finding for finding in versions(settings or config.Config(), on_gpu=on_gpu)}


def hide(monkeypatch, *modules):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def no_compiler(monkeypatch):
    from torch._inductor.exc import InvalidCxxCompiler

    def none():
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    monkeypatch.setattr("shutil.which", lambda name: None)


def test_everything_that_is_installed_has_its_version():
    findings = found()
    assert findings["triton"].value.startswith("3.")
    assert findings["torch"].value.startswith("2.")
    assert findings["testing"].value.startswith("ml-dtypes 0.")


def test_no_triton(monkeypatch):
    hide(monkeypatch, "triton")
    triton = found()["triton"]
    assert (triton.level, triton.value) == ("missing", "triton is not installed")
    assert triton.remedy.startswith("pip install 'triton>=3.7'")


def test_no_compiler(monkeypatch):
    no_compiler(monkeypatch)
    for compile, level in (("auto", "missing"), ("on", "broken")):
        finding = found(config.Config(parallel=config.ParallelConfig(compile=compile)))["compiler"]  # type: ignore[arg-type]
        assert (finding.level, finding.value) == (level, "there is no C++ compiler (g++)")
        assert finding.remedy.startswith("apt-get install g++ python3-dev")
    monkeypatch.delenv("CC", raising=False)
    assert found(on_gpu=True)["compiler"].level == "broken"  # Triton needs one


def test_a_missing_extra(monkeypatch):
    hide(monkeypatch, "tensorboard", "wandb")
    findings = found()
    assert (findings["tensorboard"].level, findings["tensorboard"].remedy[:40]) == (
        "missing",
        "pip install 'fasttrain[tensorboard]': cu",
    )
    assert findings["wandb"].level == "missing"
    assert found(config.Config(log=config.LogConfig(wandb="project")))["wandb"].level == "broken"  # the run asks for it


@pytest.fixture
def net(tmp_path):
    for name in ("eth0", "lo"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize(("name", "value", "meaning"), [
    ("NCCL_P2P_DISABLE", "1", "GPUs of a node talk through host memory"),
    ("NCCL_P2P_DISABLE", "0", ""),
    ("NCCL_DEBUG", "INFO", "NCCL narrates"),
    ("NCCL_DEBUG", "WARN", ""),
    ("NCCL_ALGO", "Ring", "NCCL does not choose its algorithm itself"),
    ("CUDA_LAUNCH_BLOCKING", "1", "the host waits for every kernel"),
    ("CUDA_VISIBLE_DEVICES", "", "it hides every GPU"),
    ("CUDA_VISIBLE_DEVICES", "0,1", ""),
    ("TRITON_INTERPRET", "1", "thousands of times slower"),
    ("TORCHDYNAMO_DISABLE", "1", "blocks are not compiled"),
    ("NCCL_SOCKET_IFNAME", "ib", "there is no network interface ib; there are eth0, lo"),
    ("NCCL_SOCKET_IFNAME", "eth", ""),
    ("NCCL_SOCKET_IFNAME", "^docker", ""),
    ("NCCL_TIMEOUT", "5", ""),
])  # fmt: skip
def test_variables_and_what_they_mean(name, value, meaning, net):
    (finding,) = variables({name: value, "HOME": "/root"}, net)
    assert finding.name == name
    assert (finding.level == "warning") == bool(meaning)
    assert meaning in finding.remedy


def test_no_variables():
    (finding,) = variables({"HOME": "/root"})
    assert finding.value.startswith("none of NCCL_*, ")
