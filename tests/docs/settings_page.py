"""docs/config.md from the code: every setting with its type, default and meaning, and every recipe.

python -m tests.docs.settings_page --write
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fasttrain import config
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
    "dict[str, Component]": "a dataset by name",
}
HEAD = """# Settings

<!-- Written from fasttrain/config.py and fasttrain/recipes.py; to write it again: {command} -->

Every setting of a run: `--SECTION.NAME VALUE` on the command line, or `NAME = VALUE` under `[SECTION]` in a file for
`--config`. How recipes, files and the command line go together is in [training.md](training.md#settings);
`python -m fasttrain.train --help` prints the same, with the defaults of a recipe.

Defaults are those of a setting that its recipe leaves alone. A run without `--recipe` is `{first}`, which
[changes some](#recipes). In TOML, leave a setting out where its value is none.

"""
RECIPES_HEAD = """## Recipes

`--recipe NAME`; its directory is `runs/NAME`. A tied head counts once. `fasttrain plan --recipe NAME --gpu TYPE` says
what it takes.

| recipe | meant for | parameters | tokens a step | steps | tokens | tokens per parameter |
|---|---|---|---|---|---|---|
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
            yield field.name, field.default_factory  # type: ignore[misc]
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
        kind = ast.unparse(node.annotation)
        if dataclasses.is_dataclass(getattr(config, kind, None)):
            continue
        text = after.value if isinstance(after, ast.Expr) else None
        meaning = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
        found.append(Documented(node.target.id, kind, " ".join(meaning.split())))
    return found


def page() -> str:
    first = next(iter(RECIPES))
    parts = [HEAD.format(command=COMMAND, first=first)]
    for name, section in sections():
        title, about = (f"`{name}`", f"{section.__doc__}\n\n") if name else ("The run", "")
        parts.append(f"## {title}\n\n{about}| setting | values | default | |\n|---|---|---|---|\n")
        defaults = {field.name: _default(field) for field in dataclasses.fields(section)}
        for setting in settings_of(section):
            key = f"{name}.{setting.name}".removeprefix(".")
            cells = [f"`{key}`", _values(setting.type), _shown(defaults[setting.name]), _cell(setting.meaning)]
            parts.append(f"| {' | '.join(cells)} |\n")
        parts.append("\n")
    parts.append(RECIPES_HEAD)
    parts += [_recipe(name) for name in RECIPES]
    parts.append("\nWhat each changes, beside its directory:\n\n| recipe | settings |\n|---|---|\n")
    parts += [f"| `{name}` | {_changed(RECIPES[name]())} |\n" for name in RECIPES]
    return "".join(parts)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _values(kind: str) -> str:
    if kind.startswith("Literal["):
        return ", ".join(f"`{value}`" for value in ast.literal_eval(f"({kind[8:-1]},)"))
    kind, _, none = kind.partition(" | ")
    return TYPES[kind] + (", or none" if none else "")


def _shown(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "needed"
    if value is None or value in ({}, (), ""):
        return "none"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _recipe(name: str) -> str:
    settings, about = RECIPES[name](), _about(name)
    parameters = num_parameters(settings.model, vocab_of(settings)).total
    step = settings.batch.sequences * settings.data.sequence
    tokens = step * settings.batch.steps
    cells = [f"`{name}`", about, _short(parameters), f"{step:,}", f"{settings.batch.steps:,}", _short(tokens)]
    return f"| {' | '.join([*cells, f'{tokens / parameters:,.0f}'])} |\n"


def _about(name: str) -> str:
    """The docstring of the recipe's function."""
    tree = ast.parse((ROOT / "fasttrain" / "recipes.py").read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list)
    named = {node.decorator_list[0].args[0].value: ast.get_docstring(node) for node in functions}  # type: ignore[attr-defined]
    return _cell(named[name] or "").removesuffix(".")


def _short(number: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:,}"


def _changed(settings: config.Config) -> str:
    plain = dict(_flat(dataclasses.asdict(config.Config())))
    changed = [(key, value) for key, value in _flat(dataclasses.asdict(settings)) if plain[key] != value]
    return ", ".join(f"`{key} {value}`" for key, value in changed if key != "out")


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {COMMAND}")
    PAGE.write_text(page())
