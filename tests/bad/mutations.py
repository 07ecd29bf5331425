"""Bad content made of good content: bytes that changed, and values of another kind or size."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))  # of each target; make test takes the same ones each time
SECONDS = 30  # that an input may take
MEMORY = 2 * 2**30  # bytes that an input may take
FUZZ = settings(
    max_examples=EXAMPLES,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # an example that fails is reported as it is
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
ODD = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**32, 2**63, 10**15, 10**30, -(2**63), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "..", "../../etc/passwd", "None", "nan", "10", "\0", "é\u2028", "\ud800", [], [[]], [None],
    [0], ["x", 1], {}, {"x": 1}, {"": None}, "x" * 5000,
]  # fmt: skip
NUMBERS = [0, 1, 2, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 10**15, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def changed_bytes(data: st.DataObject, content: bytes) -> bytes:
    """One to four changes: of bytes, of whole numbers, of length."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(changed) - 1, 0)) | st.integers(0, min(len(changed), 64)))
        match data.draw(st.sampled_from(["byte", "number", "cut", "remove", "insert", "repeat"])):
            case "byte":
                changed[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "number":
                width = data.draw(st.sampled_from([1, 2, 4, 8]))
                value = data.draw(st.sampled_from(NUMBERS)) % 2 ** (8 * width)
                changed[at : at + width] = value.to_bytes(width, "little")
            case "cut":
                del changed[at:]
            case "remove":
                del changed[at : at + data.draw(st.integers(1, 16))]
            case "insert":
                changed[at:at] = data.draw(st.binary(min_size=1, max_size=16) | st.just(b"[" * 20_000))
            case "repeat":
                changed[at:at] = changed[at : at + data.draw(st.integers(1, 64))]
    return bytes(changed)


def changed_value(data: st.DataObject, value: Any) -> Any:
    """One to three changes of a JSON value: something of another kind, a key too few or too many."""
    changed = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3))):
        places = list(_places(changed))
        if not places:
            return data.draw(st.sampled_from(ODD))
        inside, key = places[data.draw(st.integers(0, len(places) - 1))]
        match data.draw(st.sampled_from(["replace", "replace", "number", "remove", "add", "swap"])):
            case "replace":
                inside[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
            case "number":
                inside[key] = data.draw(st.integers() | st.floats() | st.text(max_size=8))
            case "remove":
                del inside[key]
            case "add" if isinstance(inside, dict):
                inside[data.draw(st.text(max_size=4))] = data.draw(st.sampled_from(ODD))
            case "add":
                inside.insert(key, data.draw(st.sampled_from(ODD)))
            case "swap":
                other, name = places[data.draw(st.integers(0, len(places) - 1))]
                with contextlib.suppress(LookupError):
                    inside[key] = copy.deepcopy(other[name])
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def changed_json(data: st.DataObject, content: bytes) -> bytes:
    return json.dumps(changed_value(data, json.loads(content))).encode()


def changed_lines(data: st.DataObject, content: bytes) -> bytes:
    """Some lines of JSON changed."""
    lines = content.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        with contextlib.suppress(ValueError):  # it has become something else already
            lines[at] = changed_json(data, lines[at])
    return b"\n".join(lines) + b"\n"


class TakesTooLong(BaseException):
    """No error that any code handles."""


def answered(call: Callable[[], Any], *, codes: tuple[int, ...] = (0, 1, 2)) -> str:
    """What is wrong, as a user reads it; empty: nothing. Whatever is no clear error goes through: the test fails."""

    def ended(*_: object) -> None:
        raise TakesTooLong

    before, limit = signal.signal(signal.SIGALRM, ended), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limit[1]))
    try:
        call()
    except SystemExit as end:
        if end.code not in codes:
            raise
        return "it has been said"
    except UnicodeError:  # it says nothing of the file
        raise
    except (ValueError, OSError, ImportError) as error:
        if not str(error):
            raise
        return str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limit)
    return ""
