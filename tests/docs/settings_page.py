"""docs/config.md from the code: every setting with its type, bounds, default and meaning, and every recipe.

python -m tests.docs.settings_page --write
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple, get_args

from fasttrain import config
from fasttrain.bounds import bounds_of
from fasttrain.flops import num_parameters
from fasttrain.recipes import RECIPES
from fasttrain.tools.plan.sizes import vocab_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "config.md"
COMMAND = "python -m tests.docs.settings_page --write"
TYPES = {
    "bool": "`True` or `False`",
    "int": "whole number",
    "float": "number",
    "str": "text",
    "Path": "path",
    "tuple[float, float]": "two numbers",
    "tuple[tuple[float, float, float], ...]": "rows of three numbers",
    "dict[str, Path]": "a path by name",
    "dict[str, ComponentConfig]": "a dataset by name",
}
WIDTH = 118
HEAD = """# Settings

<!-- From fasttrain/config.py and fasttrain/recipes.py; to update it: {command} -->

Every setting of a run with its values and default: `--SECTION.NAME VALUE` on the command line, or `NAME = VALUE` under
`[SECTION]` in a file for `--config`. [training.md](training.md#settings) says how recipes, files and the command line
combine; `python -m fasttrain.train --help` prints the settings with the defaults of a recipe. Without `--recipe` that
is `{first}`. In TOML, omit a setting whose value is none.

"""
RECIPES_HEAD = """## Recipes

`--recipe NAME` trains in `runs/NAME`. A tied head counts once. `fasttrain plan --recipe NAME --gpu TYPE` predicts what
it takes.

"""


class Documented(NamedTuple):
    """A setting as its source has it."""

    name: str
    type: str
    meaning: str  # empty: nobody says


def sections() -> Iterator[tuple[str, type]]:
    """By the name under which a user finds them; the first has none."""
    yield "", config.Config
    for field in dataclasses.fields(config.Config):
        if dataclasses.is_dataclass(field.default_factory):
            yield field.name, field.default_factory
        if field.name == "data":
            yield "data.mixture.NAME", config.ComponentConfig


def settings_of(section: type) -> list[Documented]:
    """Its fields, but for sections, each with the string under it in the source."""
    tree = ast.parse(Path(config.__file__).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == section.__name__)
    found = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        annotation = node.annotation
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
            annotation = annotation.slice.elts[0]  # type: ignore[attr-defined]
        kind = ast.unparse(annotation)
        if values := get_args(getattr(config, kind, None)):  # a Literal with a name
            kind = f"Literal{list(values)}"
        if dataclasses.is_dataclass(getattr(config, kind, None)):
            continue
        text = after.value if isinstance(after, ast.Expr) else None
        meaning = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
        found.append(Documented(node.target.id, kind, " ".join(meaning.split())))
    return found


def page() -> str:
    parts = [HEAD.format(command=COMMAND, first=next(iter(RECIPES)))]
    for name, section in sections():
        title, about = (f"`{name}`", f"{section.__doc__}\n\n") if name else ("The run", "")
        parts.append(f"## {title}\n\n{about}")
        defaults = {field.name: _default(field) for field in dataclasses.fields(section)}
        for setting in settings_of(section):
            key = f"{name}.{setting.name}".removeprefix(".")
            bounds = f" {bounds_of(section)[setting.name][0]}" if setting.name in bounds_of(section) else ""
            values = f"{_values(setting.type, bounds)}; {_shown(defaults[setting.name])}"
            parts.append(_item(f"`{key}` ({values}): {setting.meaning}"))
        parts.append("\n")
    parts.append(RECIPES_HEAD)
    parts += [_recipe(name) for name in RECIPES]
    return "".join(parts)


def _item(text: str) -> str:
    """An entry of a list."""
    return fill(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _values(kind: str, bounds: str) -> str:
    if kind.startswith("Literal["):
        return ", ".join(f"`{value}`" for value in ast.literal_eval(f"({kind[8:-1]},)"))
    kind, _, none = kind.partition(" | ")
    return TYPES[kind] + bounds + (", or none" if none else "")


def _shown(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "needed"
    if value is None or value in ({}, (), ""):
        return "none"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`"
    return f"`{value}`"


def _recipe(name: str) -> str:
    settings = RECIPES[name]()
    parameters = num_parameters(settings.model, vocab_of(settings)).total
    step = settings.batch.sequences * settings.data.sequence
    tokens = step * settings.batch.steps
    size = f"{_short(parameters)} parameters, {settings.batch.steps:,} steps of {step:,} tokens"
    about = f"`{name}`: {_about(name)}. {size}, {_short(tokens)} in all: {tokens / parameters:,.0f} per parameter."
    return _item(about) + _item(f"{_changed(settings)}.").replace("- ", "  ", 1)


def _about(name: str) -> str:
    """The docstring of the recipe's function."""
    tree = ast.parse((ROOT / "fasttrain" / "recipes.py").read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list)
    named = {node.decorator_list[0].args[0].value: ast.get_docstring(node) for node in functions}  # type: ignore[attr-defined]
    return (named[name] or "").removesuffix(".")


def _short(number: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:,}"


def _changed(settings: config.Config) -> str:
    """By section, as a run prints it."""
    plain = dict(_flat(dataclasses.asdict(config.Config())))
    changed: dict[str, list[str]] = {}
    for key, value in _flat(dataclasses.asdict(settings)):
        if plain[key] != value and key != "out":
            section, _, name = key.partition(".")
            changed.setdefault(section, []).append(f"{name}={value}")
    return "; ".join(f"`{section}` {' '.join(values)}" for section, values in changed.items())


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        print(f"usage: {COMMAND}")
        sys.exit(0 if "--help" in sys.argv else 2)
    PAGE.write_text(page())
