"""Samples as text: does it decode, was it decoded rightly before, and does it encode to the same tokens again?"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import numpy as np

from fasttrain.data.lint.findings import Finding, Severity, graded
from fasttrain.data.lint.source import Source

# The bytes of UTF-8 read as Latin-1 or Windows-1252: "Ã©" was é, "â€™" was ’, "Â " was a space that does not break.
WRONGLY_DECODED = re.compile("[ÂÃ][\u0080-\u00bf]|â€[\u0080-\u00bf\u0152-\u2122]|ï»¿|ï¿½")
KINDS = {
    "U+FFFD": re.compile("\ufffd"),
    "NUL": re.compile("\0"),
    "wrongly decoded characters": WRONGLY_DECODED,
}
DAMAGED = (0.01, 0.2)  # share of documents; in odd ones it is what they are about
ENOUGH = 16  # documents: with fewer, a share says little
CUT = 16  # tokens at either end of a sample that may come out otherwise, as the text may go on there
OTHERWISE = (0.02, 0.5)  # share of documents that encode to other tokens
BYTES_PER_TOKEN = (1.5, 16.0)  # of text by a vocabulary of words
WORDS = 4096  # ids of a vocabulary that has words
AGREEMENT = 0.25  # of bytes per token with dataset.json: documents differ, and only their beginnings are sampled


class Text(NamedTuple):
    offset: int
    tokens: list[int]
    text: str


def damage_in(text: str) -> str | None:
    """The kind of damage, if there is some."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(text)), None)


def text_findings(source: Source, *, documents: int, tokens: int, bytes_per_token: float | None) -> list[Finding]:
    """Of the beginnings of `documents` documents, up to `tokens` of each."""
    if source.tokenizer is None:
        return []
    texts = _texts(source, documents, tokens)
    if not texts:
        text = "no document that could be decoded was found among the samples"
        return [source.finding("encoding", "ok", 0, 0, "documents", text)]
    return [_encoding(source, texts), _round_trip(source, texts), _bytes(source, texts, bytes_per_token)]


def _encoding(source: Source, texts: list[Text]) -> Finding:
    damaged, kinds = source.tally(), Counter[str]()
    for sample in texts:
        # a character may be cut in two at either end
        if kind := damage_in(sample.text.strip("\ufffd")):
            kinds[kind] += 1
            damaged.add(np.array([sample.offset + _place(sample)]))
    severity = _grade(damaged.count, len(texts), DAMAGED)
    named = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
    text = f"{damaged.count:,} of {len(texts):,} sampled documents have damaged characters"
    text += f" ({named})" if named else ""
    if severity != "ok":
        text += "; decode the sources with their true encoding, and drop what stays damaged"
    return source.finding("encoding", severity, damaged, len(texts), "documents", text)


def _place(sample: Text) -> int:
    """About where the damage is: the tokens before it, by its share of the text."""
    found = min(m.start() for pattern in KINDS.values() if (m := pattern.search(sample.text.strip("\ufffd"))))
    return min(found * len(sample.tokens) // max(len(sample.text), 1), len(sample.tokens) - 1)


def _round_trip(source: Source, texts: list[Text]) -> Finding:
    assert source.tokenizer is not None
    texts = [sample for sample in texts if len(sample.tokens) > 2 * CUT]
    before = source.tokenizer.encode_special_tokens
    source.tokenizer.encode_special_tokens = True  # text that spells a special token is text
    encoded = source.tokenizer.encode_batch_fast([sample.text for sample in texts], add_special_tokens=False)
    source.tokenizer.encode_special_tokens = before
    changed = source.tally()
    for sample, encoding in zip(texts, encoded, strict=True):
        if not _holds(encoding.ids, sample.tokens[CUT:-CUT]):
            changed.add(np.array([sample.offset + CUT]))
    severity = _grade(changed.count, len(texts), OTHERWISE)
    text = f"{len(texts) - changed.count:,} of {len(texts):,} sampled documents decode to text that encodes to the same"
    if severity != "ok":
        text = (
            f"{changed.count:,} of {len(texts):,} sampled documents decode to text that encodes to other tokens: "
            "tokenizer.json is not the one that made them; name the right one, or prepare the dataset again"
        )
    return source.finding("round trip", severity, changed, len(texts), "documents", text)


def _holds(ids: list[int], wanted: list[int]) -> bool:
    """Whether the wanted ids occur in a row."""
    place = np.array(ids, "<i8").tobytes().find(np.array(wanted, "<i8").tobytes())
    return place >= 0 and place % 8 == 0


def _bytes(source: Source, texts: list[Text], stated: float | None) -> Finding:
    tokens = sum(len(sample.tokens) for sample in texts)
    found = sum(len(sample.text.encode("utf-8", "replace")) for sample in texts) / tokens
    text, (low, high) = f"{found:.2f} in {len(texts):,} sampled documents", BYTES_PER_TOKEN
    severity: Severity = "ok"
    if source.vocab >= WORDS and len(texts) >= ENOUGH and not low < found < high:
        severity = "warning"
        text += (
            f", where a vocabulary of {source.vocab:,} gives {low:g} to {high:g}; look whether tokenizer.json is the "
            "one that made these tokens"
        )
    elif stated is not None and len(texts) >= ENOUGH and abs(found / stated - 1) > AGREEMENT:
        severity = "warning"
        text += (
            f", but {stated:.2f} by dataset.json: bits per byte may be wrong by that factor; look whether the files "
            "belong together"
        )
    figures = dict(sampled=found) | ({} if stated is None else dict(stated=stated))
    return source.finding("bytes per token", severity, 0, tokens, "tokens", text, **figures)


def _texts(source: Source, documents: int, tokens: int) -> list[Text]:
    assert source.tokenizer is not None
    starts, lengths = _indexed(source, documents) if source.indexed else _spread(source, documents, tokens)
    tokens = min(tokens, len(source))
    firsts = np.minimum(starts, len(source) - tokens)  # a window may not run over the end of the stream
    samples = []
    for window, skipped, start, length in zip(
        source.stream.windows(firsts, tokens), starts - firsts, starts.tolist(), lengths.tolist(), strict=True
    ):
        before, sample = _text_in(window[skipped:][:length], source.separator)
        if len(sample) and sample.min() >= 0 and sample.max() < source.vocab:
            samples.append((start + before, sample.tolist()))
    texts = source.tokenizer.decode_batch([sample for _, sample in samples], skip_special_tokens=False)
    return [Text(start, sample, text) for (start, sample), text in zip(samples, texts, strict=True) if text]


def _text_in(tokens: np.ndarray, separator: int | None) -> tuple[int, np.ndarray]:
    """What lies between separators: the number of tokens before it, and its tokens."""
    if separator is None:
        return 0, tokens
    separates = tokens == separator
    before = int(separates.argmax()) if separates[: len(tokens) // 2].any() else 0  # there is more after it
    while before < len(tokens) and separates[before]:
        before += 1
    rest = separates[before:]
    return before, tokens[before:][: rest.argmax() if rest.any() else len(rest)]


def _indexed(source: Source, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Where documents begin, and their lengths."""
    assert source.ends is not None
    numbers = np.unique(np.linspace(0, len(source.ends) - 1, documents).astype(np.int64))
    starts = np.where(numbers > 0, source.ends[np.maximum(numbers, 1) - 1], 0)
    return starts, source.ends[numbers] - starts


def _spread(source: Source, documents: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Places in which a document will begin soon, or not."""
    starts = np.unique(np.linspace(0, max(0, len(source) - tokens), documents).astype(np.int64))
    return starts, np.full(len(starts), tokens)


def _grade(count: int, of: int, levels: tuple[float, float]) -> Severity:
    severity = graded(count, of, warning=levels[0], error=levels[1])
    return "warning" if severity == "error" and of < ENOUGH else severity
