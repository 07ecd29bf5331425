"""Ids that are wrong, tokens that stand for no text, and text that was corrupt before it became tokens."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from fasttrain.data.formats.dataset import ExternalDataset
from fasttrain.data.lint import lint
from fasttrain.data.lint.tokens import corruption_in
from fasttrain.data.stream import TokenStream
from tests.fasttrain.data.lint.defects import (
    PAD,
    SEPARATOR,
    TOKENIZER,
    VOCAB,
    documents,
    encoded,
    faults,
    found,
    texts,
    write,
)  # fmt: skip


def test_ids_outside_of_the_vocabulary(tmp_path):
    content = documents(50)
    content[3][5], content[40][-1] = VOCAB, 60_000
    finding = found(lint(write(tmp_path / "d", content)), "token ids")
    assert (finding.severity, finding.count) == ("error", 2)
    assert [example.document for example in finding.examples] == [3, 40]
    assert "2 ids are not in the vocabulary of 258" in finding.text
    assert "60,000" in finding.text


def test_negative_ids(tmp_path):
    """Some programs write signed numbers."""

    class Signed(ExternalDataset):
        def __init__(self):
            self.path, self.vocab, self.splits = tmp_path, VOCAB, ["train"]

        def split(self, name):
            return TokenStream([tmp_path / "t"], [400], None, dtype=np.dtype("int32"), separator=SEPARATOR)

        def tokenizer(self):
            return Tokenizer.from_str(TOKENIZER)

        def bytes_per_token(self, name):
            return None

    np.array([SEPARATOR, *encoded("word " * 79), *[-1] * 4], "<i4").tofile(tmp_path / "t")
    finding = found(lint(Signed()), "token ids")
    assert (finding.severity, finding.count) == ("error", 4)
    assert "from -1 to 256" in finding.text


def test_special_tokens_inside_documents(tmp_path):
    content = documents(50)
    content[7] = [*content[7], *[PAD] * 9]
    finding = found(lint(write(tmp_path / "d", content)), "special tokens")
    assert (finding.severity, finding.count) == ("warning", 9)
    assert "<|pad|> 9x" in finding.text
    assert finding.examples[0].document == 7


@pytest.mark.parametrize(("padding", "severity"), [(80, "warning"), (400, "error")])
def test_padding_is_an_overused_token(tmp_path, padding, severity):
    content = [[*document, *[PAD] * padding] for document in documents(50)]
    finding = found(lint(write(tmp_path / "d", content)), "token use")
    assert finding.severity == severity
    assert "of the tokens are 257 (<|pad|>): padding" in finding.text


def test_a_vocabulary_for_other_text(tmp_path):
    dataset = write(tmp_path / "d", [[SEPARATOR, *np.random.default_rng(0).integers(0, 256, 500_000)]])
    assert found(lint(dataset), "token use").severity == "ok"
    dataset.vocab = 4096
    finding = found(lint(dataset), "token use")
    assert finding.severity == "warning"
    assert "94% of the vocabulary never occurs in 500,001 tokens" in finding.text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("caf\u00c3\u00a9", "wrongly decoded characters"),
        ("it\u00e2\u20ac\u2122s", "wrongly decoded characters"),
        ("10\u00c2\u00a0km", "wrongly decoded characters"),
        ("caf\ufffd", "U+FFFD"),
        ("a\0b", "NUL"),
        ("café, it\u2019s 10 km, São Paulo, Århus, PÂTÉ, ÂGE, ÃO, naïve", None),
    ],
)
def test_corrupt_text(tmp_path, text, kind):
    assert corruption_in(text) == kind
    content = [[SEPARATOR, *encoded(f"{words} {text} {words}")] for words in texts(40, words=10)]
    report = lint(write(tmp_path / "d", content))
    finding = found(report, "encoding")
    assert (finding.severity, finding.count, finding.of) == (("error", 40, 40) if kind else ("ok", 0, 40))
    if kind:
        assert f"({kind}: 40)" in finding.text


def test_nul_is_counted_in_all_of_the_stream(tmp_path):
    content = documents(2000)
    content[1] += encoded("\0\0")
    assert found(lint(write(tmp_path / "d", content)), "corrupt tokens").count == 2


def test_tokens_of_another_tokenizer(tmp_path):
    rng = np.random.default_rng(0)
    other = rng.permutation(256)
    content = [[SEPARATOR, *other[document[1:]].tolist()] for document in documents(50)]
    assert found(lint(write(tmp_path / "d", content)), "round trip").severity == "error"
    assert found(lint(write(tmp_path / "e", documents(50))), "round trip").severity == "ok"


def test_documents_that_are_parts_of_a_text_come_out_the_same_but_for_their_ends(tmp_path):
    stream = [id for text in texts(60) for id in encoded(text + " é \u2019 ")]
    content = [[SEPARATOR, *stream[first : first + 101]] for first in range(0, len(stream), 101)]
    assert found(lint(write(tmp_path / "d", content)), "round trip").count == 0


def test_few_documents_are_no_proof(tmp_path):
    """Of a wrong tokenizer: counting tokens are what tests train on."""
    content = [[SEPARATOR, *range(200)]]
    assert faults(lint(write(tmp_path / "d", content)))["round trip"] == "warning"


def test_an_unreadable_tokenizer_is_said_and_the_rest_is_checked(tmp_path):
    dataset = write(tmp_path / "d", [[SEPARATOR, *document] for document in documents(50)])
    (tmp_path / "d" / "tokenizer.json").write_text(" " * len(TOKENIZER.encode()))
    report = lint(dataset)
    assert found(report, "tokenizer", "").severity == "warning"
    assert "so text is not checked" in found(report, "tokenizer", "").text
    assert found(report, "doubled separators").severity == "error"
    assert found(report, "doubled separators").examples[0].text.startswith("256 256")


def test_bytes_per_token_that_contradict_the_description(tmp_path):
    dataset = write(tmp_path / "d", documents(50))
    assert found(lint(dataset), "bytes per token").severity == "ok"
    dataset.bytes_per_token = lambda split: 3.5  # type: ignore[assignment]
    finding = found(lint(dataset), "bytes per token")
    assert finding.severity == "warning"
    assert "but 3.50 by dataset.json" in finding.text
