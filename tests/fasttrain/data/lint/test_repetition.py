"""Loops, copies, text in both splits, and the lengths of documents."""

import numpy as np
import pytest

from fasttrain.data.lint import lint
from fasttrain.data.lint.repetition import MIN_RUN, PERIODS, Hasher, HashSample, loops_in
from tests.fasttrain.data.lint.defects import SEPARATOR, documents, found, write

RNG = np.random.default_rng(0)


def slow_loops(tokens: np.ndarray) -> np.ndarray:
    out = np.zeros(len(tokens), bool)
    for period in PERIODS:
        run = 0
        for i in range(period, len(tokens) + 1):
            if i < len(tokens) and tokens[i] == tokens[i - period]:
                run += 1
                continue
            if run >= MIN_RUN:
                out[i - run : i] = True
            run = 0
    return out


@pytest.mark.parametrize("period", [1, 2, 7, 31, 64, 65])
@pytest.mark.parametrize("length", [MIN_RUN - 1, MIN_RUN, MIN_RUN + 1, 200])
def test_loops_are_found_from_the_length_that_counts(period, length):
    tokens = RNG.integers(0, 60_000, 700).astype(np.uint16)
    for i in range(length):
        tokens[200 + period + i] = tokens[200 + i]
    loops = loops_in(tokens)
    assert (loops == slow_loops(tokens)).all()
    assert loops.sum() == (length if period <= 64 and length >= MIN_RUN else 0)


@pytest.mark.parametrize("ids", [1, 2, 3])
def test_loops_of_tokens_that_all_loop(ids):
    tokens = RNG.integers(0, ids, 500).astype(np.uint16)
    assert (loops_in(tokens) == slow_loops(tokens)).all()


def test_documents_that_repeat_themselves(tmp_path):
    content = documents(100)
    for number in (3, 50, 99):
        content[number] += content[number][1:6] * 100
    finding = found(lint(write(tmp_path / "d", content)), "repetition")
    assert finding.severity == "warning"
    assert finding.figures == {"loops": 3, "documents": 3}
    assert 3 * 490 <= finding.count <= 3 * 510
    assert [example.document for example in finding.examples] == [3, 50, 99]


def test_copies_of_documents(tmp_path):
    content = documents(100)
    content += [content[5], content[5], content[80], content[7][:20]]
    finding = found(lint(write(tmp_path / "d", content)), "duplicates")
    assert (finding.severity, finding.count, finding.of) == ("warning", 3, 103)  # the last one is too short to count
    assert [example.document for example in finding.examples] == [100, 101, 102]


def test_text_that_every_document_carries(tmp_path):
    menu = documents(1, seed=9)[0][1:]
    finding = found(lint(write(tmp_path / "d", [[*document, *menu] for document in documents(100)])), "repeated text")
    assert finding.severity == "warning"
    assert 0.4 < finding.rate < 0.6


def test_documents_of_validation_in_the_training_data(tmp_path):
    train, validation = documents(100), documents(20, seed=1)
    assert found(lint(write(tmp_path / "clean", train, validation)), "leak", "validation").severity == "ok"
    report = lint(write(tmp_path / "leaking", train, [*validation, train[42]]))
    finding = found(report, "leak", "validation")
    assert (finding.severity, finding.count, finding.of) == ("error", 1, 21)
    assert finding.examples[0].document == 20
    assert report.exit_code() == 1


def test_lengths(tmp_path):
    content = [[SEPARATOR, *RNG.integers(0, 256, length - 1).tolist()] for length in range(1, 1001)]
    finding = found(lint(write(tmp_path / "d", content)), "document lengths")
    assert finding.figures["longest"] == 1000
    assert finding.figures["mean"] == 500.5
    for name, value in dict(p5=50, p50=500, p95=950).items():
        assert 0.95 * value <= finding.figures[name] <= value


def test_lines_taken_for_documents(tmp_path):
    content = [[SEPARATOR, *document[1:6]] for document in documents(100)]
    finding = found(lint(write(tmp_path / "d", content)), "document lengths")
    assert finding.severity == "warning"
    assert "100% of 100 documents have 8 tokens or fewer" in finding.text


# --- hashes


def test_equal_spans_have_equal_hashes_and_no_others():
    tokens = RNG.integers(0, 1000, 500).astype(np.uint16)
    tokens[300:340] = tokens[100:140]
    hasher = Hasher(1000, 500)
    hashes = hasher.runs(hasher.sums(tokens), 40)
    assert np.flatnonzero(hashes == hashes[100]).tolist() == [100, 300]
    assert len(np.unique(hashes)) == len(hashes) - 1


def test_a_sample_knows_the_share_of_repeats_whatever_its_size_and_order():
    hashes = RNG.integers(0, 2**64, 100_000, dtype=np.uint64)
    hashes = np.concatenate([hashes, hashes[:25_000]])
    whole, small, backwards = HashSample(10**6), HashSample(5000), HashSample(5000)
    for chunk in np.array_split(hashes, 30):
        whole.add(chunk, 0)
        small.add(chunk, 0)
    for chunk in np.array_split(hashes[::-1], 7):
        backwards.add(chunk, 0)
    whole_share, small_share = (len(again) / len(places) for places, again in (whole.repeats, small.repeats))
    assert whole_share == 0.2
    assert small_share == pytest.approx(0.2, abs=0.02)
    assert 2500 <= len(small.all()[0]) <= 5000
    assert sorted(small.all()[0]) == sorted(backwards.all()[0])
