"""CONTRIBUTING says which files an addition touches: they exist, and each table that it names is the only one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from fasttrain import cli, events, gpus, recipes
from fasttrain.cli.parse import load
from fasttrain.config import Config, LogConfig, OptimConfig
from fasttrain.events import Event
from fasttrain.flops import block_matrices, num_parameters
from fasttrain.metrics import logger
from fasttrain.optim.optimizer import make_optimizer, set_learning_rate
from fasttrain.optimizers import OPTIMIZERS, OptimizerRow
from fasttrain.rundir import RunDir
from fasttrain.tools.plan.memory import memory
from fasttrain.tools.plan.sizes import sizes
from fasttrain.tools.plan.speed import Hardware, speed, work_of
from fasttrain_kernels.ops.attention import capabilities
from fasttrain_kernels.testing import self_check
from fasttrain_kernels.testing.specs import SPECS, OpSpec
from tests.docs import settings_page
from tests.docs.pages import DOCS, ROOT
from tests.kernels.numbers.cases import CASES as NUMBERS

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ADDITIONS = dict(re.findall(r"^- \*\*([\w ]+)\*\*: (.+?)(?=^- \*\*|^## )", PAGE, re.M | re.S))


def named(kind: str) -> str:
    """What the page says about an addition, on one line."""
    return " ".join(ADDITIONS[kind].split())


def test_every_usual_addition_is_explained() -> None:
    usual = {"Setting", "Recipe", "Optimizer", "Logger", "Event", "Command", "GPU", "Attention backend", "Op"}
    assert set(ADDITIONS) == usual


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+(?:[\w.]+)?)`", PAGE))))
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()


def test_every_table_is_where_the_page_says() -> None:
    """`NAME` ... `file`: the file has it."""
    for kind in ADDITIONS:
        files = re.findall(r"`((?:\w+/)+\w+\.(?:py|toml))`", named(kind))
        source = "".join((ROOT / file).read_text() for file in files if file.endswith(".py"))
        for name in re.findall(r"`(_?[A-Z]{3,}|[A-Z][a-z]+[A-Z]?[a-z]*|make_\w+)`", named(kind)):
            assert re.search(rf"^(class |def )?{name}\b", source, re.M), f"{kind}: {name} is not in {files}"


def test_a_setting_is_found_by_parser_and_page() -> None:
    text = settings_page.page()
    for name, section in settings_page.sections():
        for setting in settings_page.settings_of(section):
            assert f"`{f'{name}.{setting.name}'.removeprefix('.')}` (" in text
    assert load(["--monitor.first", "100"], recipes.RECIPES).monitor.first == 100


def test_a_recipe_is_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "RECIPES", dict(recipes.RECIPES))
    recipes.recipe("fake")(lambda: Config(seed=7))
    settings = load(["--recipe", "fake"], recipes.RECIPES)
    assert (settings.seed, settings.out) == (7, Path("runs/fake"))


def test_an_optimizer_has_a_name_a_row_and_a_line() -> None:
    kinds = get_args(get_type_hints(OptimConfig)["kind"])
    assert kinds == tuple(OPTIMIZERS)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)])})
    for kind in kinds:
        assert type(make_optimizer(model, OptimConfig(kind=kind), torch.device("cpu"))).__name__.lower() == kind
        assert f"`{kind}`" in (DOCS / "training.md").read_text()


def test_an_optimizer_is_a_module_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else asks the table: what makes it, the rates of its groups, checkpoints, memory and speed of plan."""
    module: Any = ModuleType("fake_optimizer")
    module.settings = lambda optim, group: dict(lr=3 * optim.lr)
    module.make = lambda model, optim, device: torch.optim.SGD([dict(name="all", params=model.parameters(), lr=1.0)])
    monkeypatch.setitem(sys.modules, "fake_optimizer", module)
    row = OptimizerRow("fake_optimizer", matrix_bytes=0, other_bytes=2, whole_matrices=7, matrix_flops=10**6)
    monkeypatch.setitem(OPTIMIZERS, "fake", row)  # type: ignore[misc]
    fake: Any = OptimConfig(kind="fake", lr=0.5, warmup=0)  # type: ignore[arg-type]
    optimizer = make_optimizer(nn.Linear(2, 2), fake, torch.device("cpu"))
    assert (set_learning_rate(optimizer, fake, 0, 10), optimizer.param_groups[0]["lr"]) == (0.5, 1.5)
    run, adamw = Config(optim=fake), Config()
    parameters = num_parameters(run.model, 512)
    others = parameters.total - run.model.layers * block_matrices(run.model)
    assert sizes(run, vocab=512).checkpoint_bytes == 4 * parameters.total + 2 * others
    needs = [memory(one, vocab=512, device="cpu", process=0).moments[-1].parts for one in (run, adamw)]
    assert [need["optimizer"] for need in needs] == [2 * others, 8 * parameters.total]
    assert needs[0]["fsdp"] - needs[1].get("fsdp", 0) == 7 * 2 * run.model.hidden * run.model.ffn * 4
    hardware = Hardware.of(gpus.find_gpu("h100-sxm"), 1)
    seconds = [speed(work_of(one, vocab=512, dp_size=1), hardware).parts["optimizer"] for one in (run, adamw)]
    assert seconds[0] > 2 * seconds[1]


class Kept:
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append((step, values["loss"]))

    def validation(self, step: int, name: str, values: Mapping[str, float]) -> None:
        self.seen.append((step, name))

    def event(self, event: Event) -> None:
        self.seen.append(event.kind)

    def close(self, exit_code: int) -> None:
        self.seen.append(exit_code)


def test_a_logger_is_a_row_of_sinks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept, asked = Kept(), list[logger.SinkOptions]()

    def open_sink(options: logger.SinkOptions) -> Kept:
        asked.append(options)
        return kept

    monkeypatch.setattr(logger, "SINKS", [open_sink, lambda options: None])
    options = logger.SinkOptions(run=RunDir(tmp_path), log=LogConfig(), config_toml="", resume_step=0)
    sinks = logger.Sinks(options, is_main=True)
    sinks.each("step", 1, {"loss": 2.5})
    sinks.each("validation", 1, "held-out", {"loss": 2.5})
    sinks.each("event", Event(step=1, kind=events.EventKind.SPIKE, text=""))
    sinks.close(3)
    assert asked == [options]
    assert kept.seen == [(1, 2.5), (1, "held-out"), "spike", 3]


def test_an_event_is_a_member_of_its_enum(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(events.__file__).read_text()
    last, line = '    FINISH = "finish", Severity.INFO\n', '    FAKE = "fake", Severity.WARNING\n'
    changed = ModuleType("changed_events")
    monkeypatch.setitem(sys.modules, "changed_events", changed)  # dataclasses look there
    exec(source.replace(last, last + line, 1), changed.__dict__)
    event = changed.Event.of({"step": 3, "kind": "fake", "text": "so"})
    assert (event.kind, event.severity) == (changed.EventKind.FAKE, "warning")


def test_a_command_is_a_row_of_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("fake_command")
    module.main = lambda arguments: len(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_command", module)
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("fake_command", "does nothing"))
    assert cli.main(["fake", "--a", "--b"]) == 2
    assert cli.main(["--help"]) == 0
    assert "does nothing" in capsys.readouterr().out


def test_every_command_has_its_module_and_its_page() -> None:
    documented = "".join(page.read_text() for page in DOCS.glob("*.md"))
    for name, command in cli.COMMANDS.items():
        path = command.module.replace(".", "/")
        assert (ROOT / f"{path}.py").exists() or (ROOT / path / "__init__.py").exists()
        assert f"fasttrain {name}" in documented


@pytest.fixture
def no_table() -> Iterator[None]:
    """The GPU table is read once."""
    yield
    gpus.gpus.cache_clear()
    gpus._table.cache_clear()


def test_a_gpu_is_a_section_of_its_table(no_table: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = 'architecture = "hopper"\nmemory = 1.0\nhalf = 2\ntf32 = 1\nfp32 = 1\nbandwidth = 1\nlink = 1\nnode = 8\n'
    table = tmp_path / "gpus.toml"
    table.write_text(f'{gpus.TABLE.read_text()}\n[fake]\ndevice = "Fake"\n{figures}network = 1\n')
    monkeypatch.setattr(gpus, "TABLE", table)
    gpus.gpus.cache_clear()
    gpus._table.cache_clear()
    assert gpus.find_gpu("fake").peak("bf16") == 2e12
    assert gpus.gpu_of_device("NVIDIA Fake 80GB") == gpus.find_gpu("fake")


def test_an_attention_backend_is_a_row_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    row = capabilities.Capabilities(generations=("cpu",), repeats=("cpu",), dtypes=("float32",), softcap=False)
    monkeypatch.setitem(capabilities.TABLE, "fake", row)
    monkeypatch.setitem(capabilities.PREFERENCE, "cpu", ("fake", *capabilities.PREFERENCE["cpu"]))
    plain = capabilities.Request(
        generation="cpu", dtype="float32", num_queries=2, num_keys=2, num_heads=2, num_kv_heads=2, head_dim=16
    )
    capped = replace(plain, softcap=5.0)
    assert capabilities.choose(plain, "auto") == "fake"
    assert capabilities.choose(capped, "auto") != "fake"
    assert capabilities.explain(capped)["fake"] == "softcap=5.0"


@pytest.mark.parametrize("spec", SPECS, ids=[spec.title for spec in SPECS])
def test_an_op_is_its_file_its_spec_its_test_and_its_page(spec: OpSpec) -> None:
    package = ROOT / "kernels" / "fasttrain_kernels" / "ops"
    own = (package / spec.name).is_dir() or (package / f"{spec.name}.py").is_file()
    assert own or spec.name in ("add_rms_norm", "swiglu_linear")  # in the file of a smaller one
    assert any(spec.function is case.op for case in NUMBERS.values()) or spec.name == "linear"  # a BLAS's own numbers
    assert any(case.name == spec.title for case in self_check.CASES) == bool(spec.small)
    if spec.fuses:
        assert (DOCS / "kernels" / f"{spec.name}.md").exists()
        assert spec.compiled or spec.name == "linear"  # which has no Triton kernel


def test_the_table_of_ops_says_what_their_specs_say() -> None:
    rows = re.findall(r"^\| \[`(\w+)`\]\(\1\.md\).*?\| (.*?) \|", (DOCS / "kernels" / "README.md").read_text(), re.M)
    assert dict(rows).items() <= {spec.name: spec.fuses for spec in SPECS if spec.fuses}.items()
    assert len(rows) >= 7
