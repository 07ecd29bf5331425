"""The bytes that the ops allocate on a CPU are those that are stored."""

import json

from bench import exact


def test_no_op_allocates_more_or_less_than_is_stored():
    found = exact.changes(exact.measured(), json.loads(exact.STORED.read_text()))
    assert not found, f"{'; '.join(found)} (if that is right: python -m bench.exact --update)"


def test_changes_are_named():
    assert exact.changes({"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 2, "d": 1}) == [
        "a: 1 -> 2 bytes, worse",
        "b: 2 -> 1 bytes, better",
        "c: None -> 1 bytes, new",
        "d: 1 -> None bytes, gone",
    ]
