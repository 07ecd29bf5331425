"""Functions of baselines with parts of their source replaced, where they ask for a device that is not there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def with_replaced(function: Callable[..., Any], *replaced: tuple[str, str]) -> Callable[..., Any]:
    """The function, compiled anew with (old, new) texts."""
    source = inspect.getsource(function)
    for old, new in replaced:
        assert old in source, f"this version of {function.__module__}.{function.__name__} has no {old!r}"
        source = source.replace(old, new)
    namespace = dict(vars(inspect.getmodule(function)))
    exec(compile(source, inspect.getsourcefile(function) or "", "exec"), namespace)
    return namespace[function.__name__]
