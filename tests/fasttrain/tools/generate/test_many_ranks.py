"""Sharded weights write the same text: the sample at the end of a run goes through the cache on every rank."""

from tests.runs import events, train


def test_two_ranks_write_as_one(small_run, tmp_path):
    train(tmp_path / "two", world=2)
    one, two = (events(run, "sample")[-1]["text"] for run in (small_run, tmp_path / "two"))
    assert one == two
    assert len(one) > len("def ")
