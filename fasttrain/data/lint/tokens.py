"""Checks of tokens: which ids occur and how often, against the tokenizer; and samples of them as text.

Does a sample decode, was its text decoded rightly before, and does it encode to the same tokens again?
"""

import re
from collections import Counter
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fasttrain.data.lint.findings import SYSTEMATIC, LintFinding, Severity, graded
from fasttrain.data.lint.split import TokenChunk, TokenSource

# The bytes of UTF-8 read as Latin-1 or Windows-1252: "Ã©" was é, "â€™" was ’, "Â " was a space that does not break.
WRONGLY_DECODED = re.compile("[ÂÃ][\u0080-\u00bf]|â€[\u0080-\u00bf\u0152-\u2122]|ï»¿|ï¿½")
KINDS = {"U+FFFD": re.compile("\ufffd"), "NUL": re.compile("\0"), "wrongly decoded characters": WRONGLY_DECODED}
CORRUPT = (0.01, 0.2)  # share of documents; in odd ones it is what they are about
MIN_DOCUMENTS = 16  # with fewer, a share says little
EDGE_TOKENS = 16  # at either end of a sample, that may come out otherwise, as the text may continue there
LOOK = "look whether tokenizer.json is the one that made these tokens"
DECODE_AGAIN = "; decode the sources with their true encoding, and drop what stays corrupt"
REENCODED = (0.02, 0.5)  # share of documents that encode to other tokens
BYTES_PER_TOKEN = (1.5, 16.0)  # of text by a vocabulary of words
WORD_VOCAB = 4096  # ids of a vocabulary that has words
AGREEMENT = 0.25  # of bytes per token with dataset.json: documents differ, and only their beginnings are sampled
MAX_UNUSED = 0.5  # share of a vocabulary of words: a larger one is a tokenizer for other text
OVERUSED = (0.25, 0.6)  # share of one token: a space among letters has 18%, the commonest word among words 5%
UNKNOWN = (1e-3, 5e-2)  # share of the token that stands for what the tokenizer cannot spell
MIN_TOKENS_PER_ID = 100  # seen, before an id that is missing means something
REPLACEMENTS = ("\ufffd", "ï¿½")  # U+FFFD, as it is and as byte-level tokenizers spell its three bytes


class DecodedSample(NamedTuple):
    offset: int
    tokens: list[int]
    text: str


def corruption_in(text: str) -> str | None:
    """The kind of corruption, if there is some."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(text)), None)


def text_findings(
    source: TokenSource, *, documents: int, tokens: int, bytes_per_token: float | None
) -> list[LintFinding]:
    """Check the beginnings of `documents` documents, up to `tokens` of each."""
    if source.tokenizer is None:
        return []
    texts = _texts(source, documents, tokens)
    if not texts:
        text = "no document that could be decoded was found among the samples"
        return [source.finding("encoding", "ok", 0, 0, "documents", text)]
    return [_encoding(source, texts), _round_trip(source, texts), _bytes(source, texts, bytes_per_token)]


def _encoding(source: TokenSource, texts: list[DecodedSample]) -> LintFinding:
    corrupt, kinds = source.counter(), Counter[str]()
    for sample in texts:
        text = sample.text.strip("\ufffd")  # a character may be split in two at either end
        if kind := corruption_in(text):
            kinds[kind] += 1
            # about there: the tokens before it, by its share of the text
            place = min(match.start() for pattern in KINDS.values() if (match := pattern.search(text)))
            before = min(place * len(sample.tokens) // len(sample.text), len(sample.tokens) - 1)
            corrupt.add(np.array([sample.offset + before]))
    named = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
    text = f"{corrupt.count:,} of {len(texts):,} sampled documents have corrupt characters{f' ({named})' * bool(named)}"
    levels = _levels(CORRUPT, len(texts))
    return source.graded("encoding", corrupt, len(texts), "documents", text, levels, DECODE_AGAIN)


def _round_trip(source: TokenSource, texts: list[DecodedSample]) -> LintFinding:
    assert source.tokenizer is not None
    texts = [sample for sample in texts if len(sample.tokens) > 2 * EDGE_TOKENS]
    before = source.tokenizer.encode_special_tokens
    source.tokenizer.encode_special_tokens = True  # text that spells a special token is text
    encoded = source.tokenizer.encode_batch_fast([sample.text for sample in texts], add_special_tokens=False)
    source.tokenizer.encode_special_tokens = before
    changed = source.counter()
    for sample, encoding in zip(texts, encoded, strict=True):
        if not _holds(encoding.ids, sample.tokens[EDGE_TOKENS:-EDGE_TOKENS]):
            changed.add(np.array([sample.offset + EDGE_TOKENS]))
    severity = graded(changed.count, len(texts), _levels(REENCODED, len(texts)))
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


def _bytes(source: TokenSource, texts: list[DecodedSample], stated: float | None) -> LintFinding:
    tokens = sum(len(sample.tokens) for sample in texts)
    found = sum(len(sample.text.encode("utf-8", "replace")) for sample in texts) / tokens
    text, (low, high) = f"{found:.2f} in {len(texts):,} sampled documents", BYTES_PER_TOKEN
    severity: Severity = "ok"
    if source.vocab >= WORD_VOCAB and len(texts) >= MIN_DOCUMENTS and not low < found < high:
        severity = "warning"
        text += f", where a vocabulary of {source.vocab:,} gives {low:g} to {high:g}; {LOOK}"
    elif stated is not None and len(texts) >= MIN_DOCUMENTS and abs(found / stated - 1) > AGREEMENT:
        severity = "warning"
        text += f", but {stated:.2f} by dataset.json: bits per byte may be wrong by that factor; {LOOK}"
    figures = dict(sampled=found) | ({} if stated is None else dict(stated=stated))
    return source.finding("bytes per token", severity, 0, tokens, "tokens", text, **figures)


def _texts(source: TokenSource, documents: int, tokens: int) -> list[DecodedSample]:
    assert source.tokenizer is not None
    if source.ends is not None:  # beginnings of documents
        numbers = np.unique(np.linspace(0, len(source.ends) - 1, documents).astype(np.int64))
        starts = np.where(numbers > 0, source.ends[np.maximum(numbers, 1) - 1], 0)
        lengths = source.ends[numbers] - starts
    else:  # places in which a document will begin soon, or not
        starts = np.unique(np.linspace(0, max(0, len(source) - tokens), documents).astype(np.int64))
        lengths = np.full(len(starts), tokens)
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
    return [DecodedSample(start, sample, text) for (start, sample), text in zip(samples, texts, strict=True) if text]


def _text_in(tokens: np.ndarray, separator: int | None) -> tuple[int, np.ndarray]:
    """The text between separators: the number of tokens before it, and its tokens."""
    if separator is None:
        return 0, tokens
    separates = tokens == separator
    before = int(separates.argmax()) if separates[: len(tokens) // 2].any() else 0  # there is more after it
    while before < len(tokens) and separates[before]:
        before += 1
    rest = separates[before:]
    return before, tokens[before:][: rest.argmax() if rest.any() else len(rest)]


def _levels(levels: tuple[float, float], documents: int) -> tuple[float, float]:
    """With few documents, no share is an error."""
    return levels if documents >= MIN_DOCUMENTS else (levels[0], 1.0)


class TokenUse:
    """A histogram, and what follows from it without looking at the tokens again."""

    def __init__(self, source: TokenSource, *, quick: bool) -> None:
        self._source, self._quick = source, quick
        self.histogram = np.zeros(source.vocab + 1, np.int64)  # the last: ids outside of the vocabulary
        self._outside, self._special, self._corrupt = (source.counter() for _ in range(3))
        self._lowest = self._highest = 0

    def add(self, chunk: TokenChunk) -> None:
        tokens, vocab = chunk.tokens, self._source.vocab
        lowest, highest = int(tokens.min()), int(tokens.max())
        self._lowest, self._highest = min(self._lowest, lowest), max(self._highest, highest)
        if lowest < 0 or highest >= vocab:
            tokens = tokens.astype(np.int64)
            outside = (tokens < 0) | (tokens >= vocab)
            self._outside.add(np.flatnonzero(outside) + chunk.start)
            tokens[outside] = vocab
        counts = np.bincount(tokens, minlength=vocab + 1)
        self.histogram += counts
        for ids, counter in (([*self._special_names], self._special), (self._corrupt_ids, self._corrupt)):
            if counts[ids].any():
                counter.add(np.flatnonzero(np.isin(tokens, ids)) + chunk.start)

    def findings(self) -> list[LintFinding]:
        if self._source.tokenizer is None:
            return [self._outside_finding(), self._use()]
        corrupt, seen = self._corrupt, self._seen
        text = f"{corrupt.count:,} of {seen:,} tokens spell U+FFFD, NUL or wrongly decoded characters"
        levels = (1e-6, SYSTEMATIC)
        spelled = self._source.graded("corrupt tokens", corrupt, seen, "tokens", text, levels, DECODE_AGAIN)
        return [self._outside_finding(), self._special_finding(), *([] if self._quick else [spelled]), self._use()]

    @property
    def _seen(self) -> int:
        return int(self.histogram.sum())

    def _outside_finding(self) -> LintFinding:
        vocabulary = f"the vocabulary of {self._source.vocab:,}"
        text = f"all below {vocabulary}"
        if self._outside.count:
            text = (
                f"{self._outside.count:,} ids are not in {vocabulary} and have no embedding (ids go from "
                f"{self._lowest:,} to {self._highest:,}); prepare it with this tokenizer, or name the one that made it"
            )
        return self._source.graded("token ids", self._outside, self._seen, "tokens", text, (0, 0))

    def _special_finding(self) -> LintFinding:
        special, named = self._special, self._special_names
        text = f"none of the {len(named)} beside the separator" if named else "none"
        if special.count:
            often = sorted(named, key=lambda id: -self.histogram[id])[:3]
            counts = ", ".join(f"{named[id]} {self.histogram[id]:,}x" for id in often)
            text = (
                f"{special.count:,} special tokens stand inside documents ({counts}): padding, a second separator, or "
                "text that spells one; encode text without special tokens, unless you put them there"
            )
        return self._source.graded("special tokens", special, self._seen, "tokens", text, (0, 1.0))

    def _use(self) -> LintFinding:
        """Unused, overused and unknown tokens."""
        source, seen = self._source, self._seen
        histogram = self.histogram[:-1].copy()
        unused = int((histogram == 0).sum())
        if source.separator is not None and source.separator < len(histogram):
            histogram[source.separator] = 0
        top = int(histogram.argmax())
        share = histogram[top] / max(seen, 1)
        well_seen = source.vocab >= WORD_VOCAB and seen > MIN_TOKENS_PER_ID * source.vocab
        figures = dict(unused=unused / source.vocab, top_token=top, top_share=float(share))
        text = f"{source.vocab - unused:,} of {source.vocab:,} ids are used; most often {source.name(top)}: {share:.1%}"
        unknown = self._unknown
        if unknown is not None and (severity := graded(int(histogram[unknown]), seen, UNKNOWN)) != "ok":
            text = (
                f"{histogram[unknown] / seen:.2%} of the tokens are {source.name(unknown)}, which stands for text that "
                "the tokenizer cannot spell and no model can learn; use a tokenizer that knows every byte"
            )
        elif (severity := graded(int(histogram[top]), seen, OVERUSED)) != "ok":
            text = f"{share:.0%} of the tokens are {source.name(top)}: padding, or text of little else"
            text += "; look at it, and write no padding"
        elif well_seen and unused > MAX_UNUSED * source.vocab:
            severity = "warning"
            text = (
                f"{unused / source.vocab:.0%} of the vocabulary never occurs in {seen:,} tokens: it was made for other "
                "text, or by another tokenizer; train a tokenizer on this text to save the embedding's memory"
            )
        return source.finding("token use", severity, unused, source.vocab, "ids", text, **figures)

    @cached_property
    def _special_names(self) -> dict[int, str]:
        """Tokens that stand for no text, but the separator."""
        source = self._source
        others = {source.separator, self._unknown}
        added = {} if source.tokenizer is None else source.tokenizer.get_added_tokens_decoder()
        special = {id: token.content for id, token in added.items() if token.special}
        return {id: name for id, name in special.items() if id < source.vocab and id not in others}

    @cached_property
    def _corrupt_ids(self) -> np.ndarray:
        tokenizer = self._source.tokenizer
        if tokenizer is None or self._quick:  # a large vocabulary takes a second to decode
            return np.empty(0, np.int64)
        # A part of a character decodes to U+FFFD as well, and is not corrupt: for that one, the spelling counts.
        spelled = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=False).items()}
        texts = tokenizer.decode_batch([[id] for id in spelled], skip_special_tokens=False)
        corrupt = [
            id
            for (id, token), text in zip(spelled.items(), texts, strict=True)
            if any(spelling in token for spelling in REPLACEMENTS) or corruption_in(text.replace("\ufffd", ""))
        ]
        return np.array([id for id in corrupt if id < self._source.vocab], np.int64)

    @cached_property
    def _unknown(self) -> int | None:
        tokenizer = self._source.tokenizer
        name = None if tokenizer is None else getattr(tokenizer.model, "unk_token", None)
        id = tokenizer.token_to_id(name) if tokenizer is not None and name else None
        return id if id is not None and id < self._source.vocab else None
