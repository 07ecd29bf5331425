"""Values of JSON and TOML as what the program declares: dataclasses, lists and dicts, with their kinds and bounds."""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def parse(text: str | bytes, loads: Callable[[Any], Any] = json.loads) -> Any:
    """What JSON says, or TOML with tomllib.loads; a ValueError if it says nothing."""
    try:
        return loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def build(kind: Any, value: Any, name: str = "") -> Any:
    """The value as a type: a dataclass, a NamedTuple or TypedDict of declared fields, or a plain one.

    What does not fit is a ValueError that names the key; name: of the value itself, for the error.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Annotated:
        built = build(arguments[0], value, name)
        whole = arguments[0] in (int, int | None)
        for bounds in arguments[1:] if isinstance(built, int | float) else ():
            if problem := bounds.problem(built, int if whole else float):
                raise ValueError(f"{name} ({built}) {problem}")
        return built
    if origin in (typing.Union, types.UnionType):
        return _built_as_one_of(arguments, value, name)
    if origin is typing.Literal:
        if value not in arguments:
            raise _wrong(name, value)
        return value
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return _built_of_fields(kind, value, name)
    if origin is dict:
        inner = f"{name}." if name else ""
        return {key: build(arguments[1], item, f"{inner}{key}") for key, item in _checked(dict, value, name).items()}
    if hasattr(kind, "_fields"):  # a NamedTuple
        hints: Any = tuple(typing.get_type_hints(kind, include_extras=True).values())
        return kind(*build(tuple.__class_getitem__(hints), value, name))
    if origin in (list, tuple):
        items = value if isinstance(value, tuple) else _checked(list, value, name)
        kinds = arguments if origin is tuple and arguments[-1] is not Ellipsis else arguments[:1] * len(items)
        if len(kinds) != len(items):
            raise _wrong(name, value)
        return origin(build(kind, item, name) for kind, item in zip(kinds, items, strict=True))
    if (kind, type(value)) in ((float, int), (Path, str)):
        try:
            return kind(value)
        except OverflowError:
            raise _wrong(name, value) from None
    return _checked(kind, value, name)


def _built_as_one_of(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    """The first that fits; the error of the first, if none does."""
    if type(None) in kinds and value in (None, "None"):  # TOML has no null
        return None
    errors = []
    for kind in kinds:
        try:
            return build(kind, value, name)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _built_of_fields(kind: Any, value: Any, name: str) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    prefix = f"{name}." if name else ""
    for key in _checked(dict, value, name):
        if key not in hints:
            raise ValueError(f"{prefix}{key} is unknown")
    fields = {key: build(hints[key], item, f"{prefix}{key}") for key, item in value.items()}
    optional = getattr(kind, "__optional_keys__", None)
    if optional is None:
        fields_of = dataclasses.fields(kind)
        optional = {f.name for f in fields_of if not f.default is f.default_factory is dataclasses.MISSING}
    if missing := [key for key in hints if key not in fields and key not in optional]:
        raise ValueError(f"{prefix}{missing[0]} is missing")
    return kind(**fields)


def _checked(kind: Any, value: Any, name: str) -> Any:
    if type(value) is not kind and not (kind is dict and isinstance(value, Mapping)):
        raise _wrong(name, value)
    return value


def _wrong(name: str, value: Any) -> ValueError:
    return ValueError(f"{name or 'it'} is {repr(value)[:60]}")
