"""Text to tokens, as the tokenizer has them, several times as fast as the library where that is possible.

A byte-level BPE first cuts text into words, then merges the bytes of each word by itself. Text has few different words:
a dictionary knows their tokens, ready to be written, and the library sees only words that are new. What is left to do
is to cut (words.py), to look up, and to join.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fasttrain.data.prepare.tokenizer import Vocabulary, plain_bytes
from fasttrain.data.prepare.words import cutter_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOGETHER = 2**20  # characters that the library encodes at a time: an encoding is many times the size of its text
WORDS = 2**19  # that are remembered: some 100 MB of a worker at most
LONG = 64  # characters of a word that will not come again


class Encoder:
    """encode(texts): the tokens of each, as bytes of the type they have on disk. The separator is not among them."""

    def __init__(self, vocabulary: Vocabulary, dtype: np.dtype) -> None:
        description = json.loads(vocabulary.json)
        self.encode: Callable[[list[str]], list[bytes]]
        if _is_plain_bytes(description):
            self.encode = lambda texts: [
                np.frombuffer(text.encode(), np.uint8).astype(dtype).tobytes() for text in texts
            ]
            return
        library = _Library(vocabulary.json, dtype)
        cut = cutter_of(description)
        self.encode = _Words(description, cut, library, dtype).encode if cut else library.encode


class _Library:
    def __init__(self, text: str, dtype: np.dtype) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True  # a text that spells the separator does not end its document
        self._dtype = dtype

    def encode(self, texts: list[str]) -> list[bytes]:
        found = (self._tokenizer.encode_batch_fast(some, add_special_tokens=False) for some in _batches(texts))
        return [np.array(encoding.ids, self._dtype).tobytes() for encodings in found for encoding in encodings]


class _Words:
    def __init__(
        self,
        description: dict[str, Any],  # of the tokenizer
        cut: Callable[[str], list[str] | None],
        library: _Library,
        dtype: np.dtype,
    ) -> None:
        self._cut, self._library = cut, library
        # of its own, these find whole tokens in a text, across words
        self._whole = [token["content"] for token in description["added_tokens"] if not token["special"]]
        bare = description | dict(
            added_tokens=[], normalizer=None, post_processor=None, truncation=None, padding=None,
            pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False),
        )  # fmt: skip
        self._bare = _Library(json.dumps(bare), dtype)
        self._known: dict[str, bytes] = {}

    def encode(self, texts: list[str]) -> list[bytes]:
        return [tokens for some in _batches(texts) for tokens in self._encoded(some)]

    def _encoded(self, texts: list[str]) -> list[bytes]:
        cuts = [None if any(token in text for token in self._whole) else self._cut(text) for text in texts]
        known = self._known
        new = [word for word in set().union(*filter(None, cuts)) if word not in known]
        known.update(zip(new, self._bare.encode(new), strict=True))
        tokens = [
            self._library.encode([text])[0] if words is None else b"".join(map(known.__getitem__, words))
            for text, words in zip(texts, cuts, strict=True)
        ]
        if len(known) > WORDS:
            known.clear()
        for word in new:
            if len(word) > LONG:
                known.pop(word, None)
        return tokens


def _batches(texts: list[str]) -> Iterator[list[str]]:
    begin = size = 0
    for stop, text in enumerate(texts, 1):
        size += len(text)
        if size > TOGETHER or stop == len(texts):
            yield texts[begin:stop]
            begin, size = stop, 0


def _is_plain_bytes(description: dict[str, Any]) -> bool:
    """Whether each byte is the token of its value: tokenizer.plain_bytes, whatever its separator."""
    added = [token["id"] for token in description["added_tokens"]]
    return added == [256] and json.loads(plain_bytes().json)["model"] == description["model"]
