"""The configuration as TOML: how a run stores it, and how a stored one is read."""

import dataclasses
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fasttrain.config import Config
from fasttrain.schema import build, parse


def to_toml(config: Config) -> str:
    """The effective configuration, as --config reads it."""
    return tomli_w.dumps(_plain(config))


def from_toml(text: str) -> Config:
    """What to_toml has written."""
    try:
        return build(Config, parse(text, tomllib.loads))
    except ValueError as error:
        raise ValueError(
            f"the settings of the run are not of this version of fasttrain ({error}); use the one that wrote them"
        ) from None


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted name."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def summary(config: Config) -> list[str]:
    """The effective configuration, a line for each section."""
    table = _plain(config)
    sections = {key: table.pop(key) for key in list(table) if isinstance(table[key], Mapping)}
    layout: dict[str, Any] = dict(width=100, subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False)
    return [
        textwrap.fill(f"{name:<11}" + " ".join(f"{key}={value}" for key, value in flat(items)), **layout)
        for name, items in {"run": table, **sections}.items()
    ]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, Path):
        return str(value)  # "None": TOML has no null
    return value
