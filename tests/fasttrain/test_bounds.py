"""Every number of every section and of every command has bounds, and what is outside is answered before all else."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain import config
from fasttrain.bounds import Bounded, Bounds, bounds_of
from fasttrain.cli import COMMANDS
from fasttrain.cli.options import CommandLine
from fasttrain.recipes import RECIPES
from fasttrain.units import parse_bytes, parse_count

SECTIONS: list[Any] = [kind for kind in vars(config).values() if isinstance(kind, type) and issubclass(kind, Bounded)]
SECTIONS.remove(Bounded)
RANGE = r"must be a (?:whole|finite) number ((?:from|above) \S+ (?:to below|to|and at most) \S+)"
ANSWER = """
import contextlib, io, json, sys, traceback
from fasttrain.cli import main
answers = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
    answers.append((code, said.getvalue()))
json.dump((answers, "torch" in sys.modules), sys.stdout)
"""


class Number(NamedTuple):
    section: type
    field: str
    bounds: Bounds
    kind: type

    @property
    def setting(self) -> str:
        if self.section is config.ComponentConfig:
            return f"data.mixture.a.{self.field}"
        return f"{self.section.__name__.removesuffix('Config').lower()}.{self.field}".removeprefix(".")


NUMBERS = [Number(s, name, *found) for s in SECTIONS for name, found in bounds_of(s).items()]
SETTINGS = [n for n in NUMBERS if n.section not in (config.SamplingConfig, config.PrepareConfig)]


def answers(calls: list[list[str]], columns: int = 1000) -> list[tuple[Any, str]]:
    """Exit codes and what was said, from one process, which torch does not enter."""
    environment = os.environ | {"COLUMNS": str(columns)}
    done = subprocess.run(
        [sys.executable, "-c", ANSWER], input=json.dumps(calls), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found, has_torch = json.loads(done.stdout)
    assert not has_torch
    return [(code, " ".join(said.replace("│", " ").split())) for code, said in found]


def outside(number: Number) -> list[int | float]:
    bounds = number.bounds
    near: list[int | float]
    if number.kind is int:
        near = [int(bounds.low) - 1, int(bounds.high) + 1, -(10**30), 10**30]
    else:
        near = [math.nextafter(bounds.low, -math.inf), math.nextafter(bounds.high, math.inf)]
        near += [math.nan, math.inf, -math.inf, -1e300, 1e300]
    return near + ([] if bounds.without is None else [number.kind(bounds.without)])


def has_number(hint: Any) -> bool:
    return hint in (int, float) or any(map(has_number, typing.get_args(hint)))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_a_field_that_is_a_number_has_bounds(section: type) -> None:
    hints = typing.get_type_hints(section)
    assert {name for name, hint in hints.items() if has_number(hint)} == set(bounds_of(section))


def test_every_section_of_the_configuration_is_looked_at() -> None:
    sections = {type(value) for value in vars(config.Config()).values() if type(value).__module__ == config.__name__}
    assert sections < set(SECTIONS)
    assert len(NUMBERS) > 50


@settings(max_examples=300, deadline=None, derandomize=True)
@given(number=st.sampled_from(NUMBERS), data=st.data())
def test_a_value_outside_is_an_error_for_users_of_the_library_and_one_inside_is_none(
    number: Number, data: st.DataObject
) -> None:
    bounds = number.bounds
    if number.kind is int:
        low, high = int(bounds.low), int(bounds.high)
        drawn: Any = st.one_of(st.integers(max_value=low - 1), st.integers(min_value=high + 1), st.floats(), st.text())
        inside: Any = st.integers(low, high)
    else:
        drawn = st.floats().filter(lambda value: not bounds.low <= value <= bounds.high)
        inside = st.floats(bounds.low, bounds.high, allow_subnormal=False).filter(lambda v: v != bounds.without)
    value = data.draw(st.one_of(st.sampled_from(outside(number)), drawn))
    assert bounds.problem(data.draw(inside), number.kind) == ""
    if isinstance(value, int | float) and number.field == "betas":
        value = (0.9, value)
    if number.field == "envelope":
        value = ((1.0, 2.0, value),)
    section: Any = number.section
    changes: dict[str, Any] = {number.field: value}
    if section is config.ComponentConfig:
        section, changes = config.DataConfig, {"mixture": {"a": section(path=Path("x"), **changes)}}
    with pytest.raises(ValueError, match=RANGE) as error:
        section(**changes)
    assert str(error.value).startswith(f"{number.setting} (")
    assert str(error.value).endswith(f" {bounds}")


def words(number: Number, value: float) -> list[str]:
    values = {"betas": [0.9, value], "envelope": [1, 2, value]}.get(number.field, [value])
    component = ["--data.mixture.a.path", "x"] if number.section is config.ComponentConfig else []
    return [*component, f"--{number.setting}", *map(str, values)]


@pytest.mark.parametrize("command", ["train", "plan", "doctor", "verify-resume"])
def test_a_setting_outside_of_its_bounds_is_named_with_its_value_and_its_range(command: str) -> None:
    cases = [(number, value) for number in SETTINGS for value in outside(number)]
    cases = cases[:: 4 if command == "train" else 13]  # each is parsed in a twentieth of a second
    found = answers([[command, *words(number, value)] for number, value in cases])
    for (number, value), (code, said) in zip(cases, found, strict=True):
        assert code == 2, (number.setting, value, code, said)
        assert f"{number.setting} ({value}) must be a" in said, said
        assert f"number {number.bounds}" in said, said


def test_a_file_is_checked_as_the_command_line_is(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[optim]\nlr = nan\n")
    (tmp_path / "b.toml").write_text("seed = 100000000000000000000000\n")
    (nan, large) = answers([["plan", "--config", str(tmp_path / name)] for name in ("a.toml", "b.toml")])
    assert nan[0] == large[0] == 2
    assert "optim.lr (nan) must be a finite number above 0 and at most 1_000" in nan[1]
    assert "seed (100000000000000000000000) must be a whole number from 0 to 9_223_372_036_854_775_807" in large[1]


def test_help_shows_every_range() -> None:
    ((_, said),) = answers([["train", "--help"]], columns=80)
    for number in SETTINGS:
        if number.section is not config.ComponentConfig:
            text = said.rpartition(f" --{number.setting} ")[2].partition(" (default: ")[0]
            assert text.endswith(f" {str(number.bounds).capitalize()}."), (number.setting, text)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_within(name: str) -> None:
    RECIPES[name]()


# Options of commands


def options_of(name: str) -> Iterator[argparse.Action]:
    command = COMMANDS[name]
    line = getattr(importlib.import_module(command.module), command.function)
    if isinstance(line, CommandLine):
        parser = argparse.ArgumentParser()
        for add in line.options:
            add(parser)
        yield from (action for action in parser._actions if action.option_strings)


def range_of(action: argparse.Action) -> str:
    """Of an option that is a number; empty: it is none."""
    try:
        action.type("nan")  # type: ignore[operator]
    except argparse.ArgumentTypeError as error:
        return "".join(re.findall(RANGE, str(error)))
    except (TypeError, ValueError):
        pass
    return ""


OPTIONS = [(name, action, range_of(action)) for name in COMMANDS for action in options_of(name)]


def test_an_option_that_is_a_number_has_bounds_which_help_shows() -> None:
    assert [(name, action.dest) for name, action, _ in OPTIONS if action.type in (int, float)] == []
    bounded = [(action, range) for _, action, range in OPTIONS if range]
    assert len(bounded) > 25
    for action, range in bounded:
        assert range in (action.help or ""), action.dest


def test_an_option_outside_of_its_bounds_is_named_with_its_value_and_its_range() -> None:
    cases = []
    for name, action, range in OPTIONS:
        if range:
            low, high = (float(word.replace("_", "")) for word in re.findall(r"[\d._e-]*\d", range))
            wrong = ["nan", "inf", "fast", "", "1" * 30, f"{low - 1:.0f}", f"{high * 2:.0f}"]
            cases += [(name, action.option_strings[0], value, range) for value in wrong]
    found = answers([[*name.split(), f"{option}={value}"] for name, option, value, _ in cases])
    for (name, option, value, range), (code, said) in zip(cases, found, strict=True):
        assert code == 2, (name, option, value, code, said)
        assert f"argument {option}: {value!r} must be a" in said, said
        assert f"number {range}" in said, said


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e999", "9e17k", ""])
def test_a_count_or_a_size_is_above_0_and_finite(text: str) -> None:
    for parse in (parse_count, parse_bytes):
        with pytest.raises(ValueError, match="above 0 and at most 1e\\+18"):
            parse(text)
