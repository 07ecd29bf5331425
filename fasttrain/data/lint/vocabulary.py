"""Which ids occur, and how often, against the tokenizer."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from fasttrain.data.lint.findings import SYSTEMATIC, Finding, graded
from fasttrain.data.lint.source import Piece, Source
from fasttrain.data.lint.text import WORDS, damage_in

UNUSED = 0.5  # share of a vocabulary of words: a larger one is a tokenizer for other text
OVERUSED = (0.25, 0.6)  # share of one token: a space among letters has 18%, the commonest word among words 5%
UNKNOWN = (1e-3, 5e-2)  # share of the token that stands for what the tokenizer cannot spell
OFTEN = 100  # tokens seen per id of the vocabulary, before one that is missing means something
REPLACEMENTS = ("\ufffd", "ï¿½")  # U+FFFD, as it is and as byte-level tokenizers spell its three bytes


class Vocabulary:
    """A histogram, and what follows from it without looking at the tokens again."""

    def __init__(self, source: Source, *, quick: bool) -> None:
        self._source, self._quick = source, quick
        self.histogram = np.zeros(source.vocab + 1, np.int64)  # the last: ids outside of the vocabulary
        self._outside, self._special, self._damaged = (source.tally() for _ in range(3))
        self._lowest = self._highest = 0

    def add(self, piece: Piece) -> None:
        tokens, vocab = piece.tokens, self._source.vocab
        lowest, highest = int(tokens.min()), int(tokens.max())
        self._lowest, self._highest = min(self._lowest, lowest), max(self._highest, highest)
        if lowest < 0 or highest >= vocab:
            tokens = tokens.astype(np.int64)
            outside = (tokens < 0) | (tokens >= vocab)
            self._outside.add(np.flatnonzero(outside) + piece.start)
            tokens[outside] = vocab
        counts = np.bincount(tokens, minlength=vocab + 1)
        self.histogram += counts
        for ids, tally in ((self._special_ids, self._special), (self._damaged_ids, self._damaged)):
            if counts[ids].any():
                tally.add(np.flatnonzero(np.isin(tokens, ids)) + piece.start)

    def findings(self) -> list[Finding]:
        findings = [self._outside_finding()]
        if self._source.tokenizer is not None:
            findings += [self._special_finding(), *([] if self._quick else [self._damaged_finding()])]
        return [*findings, self._use()]

    @property
    def _seen(self) -> int:
        return int(self.histogram.sum())

    def _outside_finding(self) -> Finding:
        vocab, seen = self._source.vocab, self._seen
        if not self._outside.count:
            return self._source.finding("token ids", "ok", 0, seen, "tokens", f"all below the vocabulary of {vocab:,}")
        text = (
            f"{self._outside.count:,} ids are not in the vocabulary of {vocab:,} and have no row in the embedding (ids "
            f"go from {self._lowest:,} to {self._highest:,}); prepare the dataset again with this tokenizer, or name "
            "the one that made it"
        )
        return self._source.finding("token ids", "error", self._outside, seen, "tokens", text)

    def _special_finding(self) -> Finding:
        seen, special = self._seen, self._special
        if not special.count:
            text = f"none of the {len(self._special_ids)} beside the separator" if len(self._special_ids) else "none"
            return self._source.finding("special tokens", "ok", 0, seen, "tokens", text)
        often = sorted(self._special_ids.tolist(), key=lambda id: -self.histogram[id])
        named = ", ".join(f"{self._source.special[id]} {self.histogram[id]:,}x" for id in often[:3])
        text = (
            f"{special.count:,} special tokens stand inside documents ({named}): padding, a second separator, or text "
            "that spells one; encode text without special tokens, unless you put them there"
        )
        return self._source.finding("special tokens", "warning", special, seen, "tokens", text)

    def _damaged_finding(self) -> Finding:
        seen, damaged = self._seen, self._damaged
        severity = graded(damaged.count, seen, warning=1e-6, error=SYSTEMATIC)
        text = f"{damaged.count:,} of {seen:,} tokens spell U+FFFD, NUL or wrongly decoded characters"
        if severity != "ok":
            text += "; decode the sources with their true encoding, and drop what stays damaged"
        return self._source.finding("damaged tokens", severity, damaged, seen, "tokens", text)

    def _use(self) -> Finding:
        """Unused, overused and unknown tokens."""
        source, seen = self._source, self._seen
        histogram = self.histogram[:-1].copy()
        unused = int((histogram == 0).sum())
        if source.separator is not None and source.separator < len(histogram):
            histogram[source.separator] = 0
        top = int(histogram.argmax())
        share = histogram[top] / max(seen, 1)
        figures = dict(unused=unused / source.vocab, top_token=top, top_share=float(share))
        text = f"{source.vocab - unused:,} of {source.vocab:,} ids are used; most often {source.name(top)}: {share:.1%}"
        unknown = self._unknown
        if unknown is not None and (severity := graded(int(histogram[unknown]), seen, **_levels(UNKNOWN))) != "ok":
            text = (
                f"{histogram[unknown] / seen:.2%} of the tokens are {source.name(unknown)}, which stands for text that "
                "the tokenizer cannot spell and no model can learn; use a tokenizer that knows every byte"
            )
        elif (severity := graded(int(histogram[top]), seen, **_levels(OVERUSED))) != "ok":
            text = (
                f"{share:.0%} of the tokens are {source.name(top)}: padding, or text of little else; look at it, and "
                "leave padding out"
            )
        elif unused > UNUSED * source.vocab and source.vocab >= WORDS and seen > OFTEN * source.vocab:
            severity = "warning"
            text = (
                f"{unused / source.vocab:.0%} of the vocabulary never occurs in {seen:,} tokens: it was made for other "
                "text, or by another tokenizer; train a tokenizer on this text to save the embedding's memory"
            )
        return source.finding("token use", severity, unused, source.vocab, "ids", text, **figures)

    @cached_property
    def _special_ids(self) -> np.ndarray:
        unknown = self._unknown
        return np.array([id for id in self._source.special if id < self._source.vocab and id != unknown], np.int64)

    @cached_property
    def _damaged_ids(self) -> np.ndarray:
        tokenizer = self._source.tokenizer
        if tokenizer is None or self._quick:  # a large vocabulary takes a second to decode
            return np.empty(0, np.int64)
        # A part of a character decodes to U+FFFD as well, and is no damage: for that one, the spelling counts.
        spelled = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=False).items()}
        texts = tokenizer.decode_batch([[id] for id in spelled], skip_special_tokens=False)
        damaged = [
            id
            for (id, token), text in zip(spelled.items(), texts, strict=True)
            if any(spelling in token for spelling in REPLACEMENTS) or damage_in(text.replace("\ufffd", ""))
        ]
        return np.array([id for id in damaged if id < self._source.vocab], np.int64)

    @cached_property
    def _unknown(self) -> int | None:
        tokenizer = self._source.tokenizer
        name = getattr(tokenizer.model, "unk_token", None) if tokenizer is not None else None
        id = tokenizer.token_to_id(name) if tokenizer is not None and name else None
        return id if id is not None and id < self._source.vocab else None


def _levels(levels: tuple[float, float]) -> dict[str, float]:
    return dict(warning=levels[0], error=levels[1])
