"""Separators that are doubled, missing, or where no document begins."""

import json

import numpy as np
import pytest

from fasttrain.data.lint import lint
from fasttrain.data.lint.findings import LintReport
from tests.fasttrain.data.lint.defects import SEPARATOR, documents, faults, found, write


def test_a_clean_dataset_has_no_faults(tmp_path):
    report = lint(write(tmp_path / "d", documents(200), documents(20, seed=1)))
    assert faults(report) == {}
    assert found(report, "separators").count == found(report, "separators").of == 200
    assert report.exit_code(strict=True) == 0


def every_separator_doubled(how: str) -> list[list[int]]:
    """<sep> <sep> text <sep> <sep> text, on which a 7B model once trained for 1.7T tokens. Three indices fit it."""
    clean = documents(100)
    if how == "both begin the document":
        return [[SEPARATOR, *document] for document in clean]
    if how == "one ends it, one begins the next":
        return [[*document, SEPARATOR] for document in clean]
    return [chunk for document in clean for chunk in ([SEPARATOR], document)]  # each is a document of its own


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("how", "doubled"),
    [("both begin the document", 100), ("one ends it, one begins the next", 99), ("an empty document between", 100)],
)
def test_every_separator_doubled(tmp_path, how, doubled, quick):
    report = lint(write(tmp_path / "d", every_separator_doubled(how)), quick=quick)
    finding = found(report, "doubled separators")
    assert (finding.severity, finding.count, finding.of) == ("error", doubled, 200)
    assert finding.text == (
        f"{doubled} of 200 separators follow another one, and the model trains on an empty document at each; write one "
        "separator between documents, and drop empty ones (prepare the dataset again)"
    )
    assert found(report, "separators inside").count == 0  # one fault, one name
    assert found(report, "missing separators").count == 0
    assert report.exit_code() == 1
    place = finding.examples[0]
    assert place.text.count("<|separator|>") >= 2
    assert place.split == "train"


def test_an_example_says_where(tmp_path):
    content = documents(3000)
    content[1234] = [SEPARATOR, *content[1234]]
    finding = found(lint(write(tmp_path / "d", content)), "doubled separators")
    (example,) = finding.examples
    assert (finding.count, finding.severity) == (1, "warning")  # one of 3,000: an odd document, not a program
    assert example.document == 1234
    assert example.offset == sum(map(len, content[:1234])) + 1


def test_an_example_names_the_file_where_the_dataset_knows_it(tmp_path):
    dataset = write(tmp_path / "d", [[SEPARATOR, *document] for document in documents(10)])
    assert found(lint(dataset), "doubled separators").examples[0].source is None
    dataset.source = lambda split, document: f"{split}.txt:{document}"  # type: ignore[assignment, return-value]
    sources = [example.source for example in found(lint(dataset), "doubled separators").examples]
    assert sources == ["train.txt:0", "train.txt:1", "train.txt:2"]


def test_empty_documents(tmp_path):
    content = documents(100)
    content[10:10] = [[SEPARATOR], [], [SEPARATOR, SEPARATOR]]
    report = lint(write(tmp_path / "d", content))
    assert found(report, "empty documents").count == 3
    assert [example.document for example in found(report, "empty documents").examples][:1] == [10]


def test_an_empty_document_at_the_end(tmp_path):
    report = lint(write(tmp_path / "d", [*documents(40), []]))
    assert [example.document for example in found(report, "empty documents").examples] == [40]


@pytest.mark.parametrize("place", [0, 1, 50, 99])
def test_missing_separators(tmp_path, place):
    content = documents(100)
    content[place] = content[place][1:]
    report = lint(write(tmp_path / "d", content))
    finding = found(report, "missing separators")
    assert (finding.severity, finding.count, finding.of) == ("error", 1, 100)
    assert finding.examples[0].document == place
    assert "1 of 100 documents do not begin with the separator 256 (<|separator|>)" in finding.text


def test_no_separator_at_all(tmp_path):
    report = lint(write(tmp_path / "d", [document[1:] for document in documents(100)]))
    assert found(report, "separators").severity == "error"
    assert found(report, "missing separators").count == 100
    assert "there is no separator 256 (<|separator|>) in" in found(report, "separators").text


def test_separators_that_end_documents_make_the_same_stream(tmp_path):
    report = lint(write(tmp_path / "d", [[*document[1:], SEPARATOR] for document in documents(100)]))
    assert faults(report) == {}
    assert "end with it instead of beginning with it" in found(report, "missing separators").text


def test_separators_inside_documents(tmp_path):
    content = documents(100)
    content[7] = [*content[7][:20], SEPARATOR, *content[7][20:]]
    report = lint(write(tmp_path / "d", content))
    finding = found(report, "separators inside")
    assert (finding.severity, finding.count) == ("error", 1)
    assert (finding.examples[0].document, finding.examples[0].offset) == (7, sum(map(len, content[:7])) + 20)
    assert found(report, "doubled separators").count == 0


def test_two_documents_taken_for_one(tmp_path):
    """The rate shows it where each document is whole."""
    content = documents(100)
    merged = [[*content[i], *content[i + 1]] for i in range(0, 100, 2)]
    report = lint(write(tmp_path / "d", merged))
    assert found(report, "separators").severity == "warning"
    assert "100 separators 256 (<|separator|>)" in found(report, "separators").text
    assert "for 50 documents: 2.00 for each, which should be 1" in found(report, "separators").text


@pytest.mark.parametrize("ends", [[50, 40, 90], [-5, 40, 90], [95, 40, 90]])
def test_an_index_that_is_not_ascending(tmp_path, ends):
    dataset = write(tmp_path / "d", [documents(1)[0][:30]] * 3)
    np.array(ends, "<i8").tofile(tmp_path / "d" / "train.documents")
    report = lint(dataset)
    assert found(report, "index").severity == "error"
    assert found(report, "separators").count == 3  # the stream is checked without it


def test_the_report_as_json(tmp_path):
    report: LintReport = lint(write(tmp_path / "d", every_separator_doubled("both begin the document")), max_examples=2)
    content = json.loads(report.to_json())
    assert list(content) == [
        "format", "version", "dataset", "quick", "seconds", "read", "errors", "warnings", "findings",
    ]  # fmt: skip
    assert (content["format"], content["version"], content["quick"]) == ("fasttrain lint", 1, False)
    assert content["errors"] == sum(finding["severity"] == "error" for finding in content["findings"]) >= 1
    for finding in content["findings"]:
        assert list(finding) == [
            "check", "split", "severity", "count", "of", "unit", "text", "examples", "figures", "rate",
        ]  # fmt: skip
        assert finding["severity"] in ("ok", "warning", "error")
        assert len(finding["examples"]) <= 2
    (doubled,) = [finding for finding in content["findings"] if finding["check"] == "doubled separators"]
    assert doubled["rate"] == 0.5
    assert list(doubled["examples"][0]) == ["split", "document", "offset", "text", "source"]
