"""The configuration as TOML: how a run stores it, and how a stored one is read."""

import dataclasses
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fasttrain.config import Config


def to_toml(config: Config) -> str:
    """The effective configuration, as --config reads it."""
    return tomli_w.dumps(_plain(config))


def from_toml(text: str) -> Config:
    """What to_toml has written."""
    try:
        return _built(Config, tomllib.loads(text), "")
    except (TypeError, KeyError, ValueError) as error:
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


def _built(kind: Any, value: Any, name: str) -> Any:
    """A value of TOML as the type of its field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if unknown := set(value) - set(hints):
            raise KeyError(f"{name}{min(unknown)}")
        return kind(**{key: _built(hints[key], item, f"{name}{key}.") for key, item in value.items()})  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType):
        return None if value == "None" else _built(arguments[0], value, name)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{name}: {value}")
        return value
    if origin is dict:
        return {key: _built(arguments[1], item, f"{name}{key}.") for key, item in value.items()}
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_built(kind, item, name) for kind, item in zip(kinds, value, strict=True))
    if (kind, type(value)) in ((float, int), (Path, str)):
        return kind(value)
    if type(value) is not kind:
        raise TypeError(f"{name}: {value!r}")
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _plain(vars(value))
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, Path):
        return str(value)  # "None": TOML has no null
    return value
