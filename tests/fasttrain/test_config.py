import dataclasses
import re
from pathlib import Path

import pytest

from fasttrain.cli.parse import OTHER_TRAINERS, _hint, load
from fasttrain.config import ComponentConfig, Config, ModelConfig, OptimConfig
from fasttrain.config_toml import summary, to_toml

RECIPES = {"tiny": Config, "wide": lambda: Config(model=ModelConfig(hidden=512))}


def fails(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as exit:
        load(argv, RECIPES)
    assert exit.value.code == 2
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).replace("│", " ").split())


def test_the_first_recipe_is_the_default():
    assert load([], RECIPES) == Config()
    assert load(["--recipe", "wide"], RECIPES).model.hidden == 512


def test_the_command_line_overrides_files_which_override_the_recipe(tmp_path: Path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("seed = 5\n[optim]\nlr = 1e-4\nwarmup = 7\n")
    second.write_text("[optim]\nlr = 2e-4\nbetas = [0.8, 0.9]\n[model]\nqk_norm = false\n")
    config = load(["--recipe", "wide", "--config", str(first), "--config", str(second), "--optim.warmup", "9"], RECIPES)
    assert config.model == ModelConfig(hidden=512, qk_norm=False)
    assert config.optim == OptimConfig(lr=2e-4, warmup=9, betas=(0.8, 0.9))
    assert config.seed == 5


def test_the_effective_configuration_reads_back_as_itself(tmp_path: Path):
    config = load(["--model.vocab", "77", "--data.path", "x y", "--validation.sets", "a", "b/c"], RECIPES)
    mixed = load(
        ["--data.mixture.a-b.path", "x", "--data.mixture.c.path", "y", "--data.mixture.c.weight", "3"], RECIPES
    )
    for effective in (config, mixed, Config()):
        (tmp_path / "config.toml").write_text(to_toml(effective))
        assert load(["--config", str(tmp_path / "config.toml")], RECIPES) == effective


def test_a_mixture_is_named_in_files_and_on_the_command_line(capsys, tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[data.mixture.code]\npath = "x"\nweight = 0.3\n[data.mixture.text]\npath = "y"\nepochs = 4\n')
    config = load(
        ["--config", str(file), "--data.mixture.code.weight", "0.5", "--data.mixture.more.path", "z"], RECIPES
    )
    assert config.data.mixture == {
        "code": ComponentConfig(path=Path("x"), weight=0.5),
        "text": ComponentConfig(path=Path("y"), epochs=4),
        "more": ComponentConfig(path=Path("z")),
    }
    assert "mixture.code.path=x mixture.code.weight=0.5" in " ".join(" ".join(summary(config)).split())
    for mistake, message in [
        (["--data.mixture.code.wieght", "3"], "Unrecognized options: --data.mixture.code.wieght"),
        (["--data.mixture.new.weight", "3"], "--data.mixture.new.path PATH"),
        (["--data.path", "p"], "data.path (p) and data.mixture (code, text) exclude each other"),
        (
            ["--data.mixture.code.weight", "0"],
            "data.mixture.code.weight (0.0) must be a finite number from 1e-09 to",
        ),
        (
            ["--data.mixture.code.epochs", "-1"],
            "data.mixture.code.epochs (-1.0) must be a finite number from 0 to",
        ),
    ]:
        assert message in fails(capsys, "--config", str(file), *mistake)


@pytest.mark.parametrize("source", ["command line", "file"])
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lrr", "3", "Unrecognized options: --optim.lrr, 3 .* Perhaps you meant: --optim.lr FLOAT"),
        ("optim.learning_rate", "3", "--optim.learning_rate is unknown; here it is --optim.lr"),
        ("training.dropout", "3", "there is no section training; did you mean --model.dropout?"),
        ("trainer.gpus", "3", "there is no section trainer; sections are model, data, batch"),
        ("optim.lr", "fast", "Error parsing --optim.lr: could not convert string to float: 'fast'"),
        ("model.layers", "2.5", "Error parsing --model.layers"),
        ("optim.schedule", "cosin", "cosin"),
        ("model.heads", "5", r"model.heads \(5\) must be a multiple of model.kv_heads \(6\)"),
        ("batch.sequences", "9", r"batch.sequences \(9\) must be a multiple of batch.micro \(8\)"),
        ("batch.steps", "0", r"batch.steps \(0\) must be a whole number from 1 to 1_000_000_000"),
        (
            "optim.warmup",
            "301",
            r"optim.warmup \(301\) must be shorter than the run: batch.steps is 300; set optim.warmup to 30",
        ),
        ("model.attention_dropout", "0.1", r"model.attention_dropout \(0.1\) needs data.document_mask False"),
        ("model.dropout", "1.5", r"model.dropout \(1.5\) must be a finite number from 0 to below 1"),
        ("model.head_dim", "63", r"model.head_dim \(63\) must be even"),
    ],
)
def test_a_mistake_ends_the_program_and_names_the_key(capsys, tmp_path, source, key, value, message):
    if source == "command line":
        printed = fails(capsys, f"--{key}", value)
    else:
        section, name = key.split(".")
        file = tmp_path / "run.toml"
        file.write_text(f"[{section}]\n{name} = {value if value.replace('.', '').isdigit() else repr(value)}\n")
        printed = fails(capsys, "--config", str(file))
    assert re.search(message, printed), printed


def test_a_warm_up_and_a_decay_that_are_longer_than_the_run_together_are_named(capsys):
    message = (
        "optim.warmup (100) and the decay (optim.decay_fraction 0.9 of 300 steps) are longer than the run together"
    )
    wsd = ("--optim.schedule", "wsd", "--optim.decay_fraction", "0.9")
    assert message in fails(capsys, *wsd, "--optim.warmup", "100")
    assert load([*wsd, "--optim.warmup", "30"], RECIPES).optim.warmup == 30


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (12, 1), (20, 2), (21, 20), (300, 20)])
def test_the_warm_up_of_a_recipe_is_shortened_to_fit_and_that_is_said(capsys, tmp_path, steps, warmup):
    (tmp_path / "run.toml").write_text(f"[batch]\nsteps = {steps}\n")
    for words in (["--batch.steps", str(steps)], [f"--batch.steps={steps}"], ["--config", str(tmp_path / "run.toml")]):
        assert load(words, RECIPES).optim.warmup == warmup
        said = capsys.readouterr().err
        note = (
            f"note: the recipe's warm-up of 20 steps is not shorter than the run, batch.steps {steps}: "
            f"optim.warmup is {warmup}, a tenth of it\n"
        )
        assert said == (note if warmup < 20 else "")


def test_a_warm_up_that_the_user_states_is_not_shortened(capsys):
    said = fails(capsys, "--batch.steps", "12", "--optim.warmup", "12")
    assert "optim.warmup (12) must be shorter than the run: batch.steps is 12; set optim.warmup to 1, or" in said


def test_unreadable_sources_are_named(capsys, tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("lr = = 3")
    assert f"--config {broken}: " in fails(capsys, "--config", str(broken))
    assert "No such file" in fails(capsys, "--config", str(tmp_path / "missing.toml"))
    assert "there is no recipe 'huge'; there are tiny, wide" in fails(capsys, "--recipe", "huge")


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as exit:
        load(["--help"], RECIPES)
    assert exit.value.code == 0
    printed = capsys.readouterr().out
    for section in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section.default_factory):
            for setting in dataclasses.fields(section.default_factory):
                assert f"--{section.name}.{setting.name}" in printed
    assert "--recipe NAME (tiny, wide)" in printed


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().optim.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("ours", "theirs"), [(o, t) for o, names in OTHER_TRAINERS.items() for t in names])
def test_a_setting_of_another_trainer_is_answered_with_ours(ours: str, theirs: str) -> None:
    section, _, key = ours.removeprefix("--").rpartition(".")
    assert hasattr(getattr(Config(), section) if section else Config(), key)
    for spelling in (f"--{theirs}", f"--{theirs.replace('_', '-')}"):
        assert _hint(spelling) == f"{spelling} is unknown; here it is {ours}"


def test_a_setting_of_ours_gets_no_hint() -> None:
    for section in ("model", "data", "batch", "optim", "parallel", "checkpoint", "validation", "monitor", "log"):
        for key in vars(getattr(Config(), section)):
            assert _hint(f"--{section}.{key}") == ""


def test_the_hint_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(["--learning_rate", "3e-4"], RECIPES)
    assert "--learning_rate is unknown; here it is --optim.lr" in capsys.readouterr().err
