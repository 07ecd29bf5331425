"""The tokenizer of a preparation (trained on its text, that of another model, or plain bytes), and text to tokens.

A byte-level BPE first splits text into words, then merges the bytes of each word by itself. Text has few different
words: a dictionary knows their tokens, ready to be written, and the library sees only words that are new. What is left
to do is to split, to look up, and to join: several times as fast as the library.

Words are split by Python's own regular expressions. The patterns below are those of tokenizers in wide use, in terms of
classes of characters. Python has nearly the same classes by other names. Which characters it puts elsewhere (½ is a
number to one, and a letter to the other; so is what is newer than one of them) is asked of the library itself, and a
text that has such a character is left to the library.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fasttrain.data.dataset import read_tokenizer, tokenizer_errors
from fasttrain.grouping import grouped
from fasttrain.schema import parse

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
SEPARATOR = "<|endoftext|>"
SEPARATOR_NAMES = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|endofdocument|>")
BATCH_CHARACTERS = 2**20  # that the library encodes at a time: an encoding is many times the size of its text
CACHED_WORDS = 2**19  # some 100 MB of a worker at most
MAX_CACHED_WORD = 64  # characters: a longer word will not come again

BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the library's default
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")  # each digit by itself

# L letters, N numbers, S space, T all but space, P what is none of them, O all but letters, numbers and line ends.
# Possessive (++) where going back cannot help.
_LLAMA3 = "(?i:'(?:[stmd]|re|ve|ll))|<O>?<L>++|<N>{1,3}| ?<P>++[\r\n]*+|<S>*[\r\n]+|<S>+(?!<T>)|<S>+"
PATTERNS = {
    BYTE_LEVEL: " ?<L>++| ?<N>++|'(?:[stmd]|re|ve|ll)| ?<P>++|<S>+(?!<T>)|<S>+",
    LLAMA3: _LLAMA3,
    QWEN: _LLAMA3.replace("{1,3}", ""),
}
# sets of few ranges are half as fast again as classes of all characters (14 and 21 MB/s)
ASCII = dict(
    L="[A-Za-z]", N="[0-9]", S=r"[\t-\r ]", T=r"[^\t-\r ]", P=r"[^\t-\r A-Za-z0-9]", O=r"[^\r\nA-Za-z0-9]"
)  # fmt: skip
UNICODE = dict(L=r"[^\W\d_]", N=r"\d", S=r"\s", T=r"\S", P=r"(?:[^\w\s]++|_)", O=r"(?:[^\r\n\w]|_)")


class TokenizerSpec(NamedTuple):
    """A tokenizer, as far as a dataset has to know it."""

    json: str  # the content of tokenizer.json
    size: int  # token ids are below
    separator: int
    separator_text: str


def trained_on(texts: Iterable[str], size: int, *, separator: str = SEPARATOR) -> TokenizerSpec:
    """Train a byte-level BPE of up to `size` tokens: every text can be encoded, and decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < 257:
        trouble = f"a vocabulary of {size} is too small for 256 bytes and the separator"
        raise ValueError(f"prepare: {trouble}; train 257 tokens or more, or choose --tokenizer {BYTES}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[separator],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so that nothing is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _spec(tokenizer, separator)


def plain_bytes(*, separator: str = SEPARATOR) -> TokenizerSpec:
    """256 bytes and the separator, as a byte-level BPE without merges: token = value of the byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # the letters in which byte-level BPE writes bytes: themselves where they can be seen, else from 256 on
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(separator, special=True, normalized=False)])
    return _spec(tokenizer, separator)


def loaded(name: Path, *, separator: str | None = None) -> TokenizerSpec:
    """Read a tokenizer.json, or that of the directory of a model or a dataset that has one."""
    path = name / "tokenizer.json" if name.is_dir() else name
    if not path.exists():
        remedy = f"name a tokenizer.json, the directory of one, or {BYTES!r}"
        raise FileNotFoundError(f"prepare: there is no tokenizer {path}; {remedy}")
    tokenizer = read_tokenizer(path, "prepare")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _spec(tokenizer, _separator(tokenizer, path, separator))


def _spec(tokenizer: Tokenizer, separator: str) -> TokenizerSpec:
    names = tokenizer.get_vocab()
    return TokenizerSpec(tokenizer.to_str(), max(names.values()) + 1, names[separator], separator)


def _separator(tokenizer: Tokenizer, path: Path, asked: str | None) -> str:
    """The token that stands between documents: as asked, as the files beside it say, or by a usual name."""
    number = _setting(path.with_name("dataset.json"), "separator")
    of_dataset = tokenizer.id_to_token(number) if isinstance(number, int) else None
    eos = _setting(path.with_name("tokenizer_config.json"), "eos_token")
    of_model = eos.get("content") if isinstance(eos, dict) else eos
    for name in (asked,) if asked else (of_dataset, of_model, *SEPARATOR_NAMES):
        if name and tokenizer.token_to_id(name) is not None:
            return name
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    trouble = f"has no token {asked!r}" if asked else "does not say which token separates documents"
    remedy = f"set --separator, for instance to one of its special tokens: {', '.join(special[:20]) or 'it has none'}"
    raise ValueError(f"prepare: {path} {trouble}; {remedy}")


def _setting(path: Path, name: str) -> Any:
    """What a JSON file says, if it can be read."""
    try:
        return parse(path.read_text("utf-8"))[name]
    except (OSError, ValueError, TypeError, LookupError):
        return None


def splitter_of(description: dict[str, Any]) -> Callable[[str], list[str] | None] | None:
    """A function that splits as a tokenizer does, or returns None for a text that it may split otherwise; or None."""
    pattern = PATTERNS.get(_pattern_of(description))
    if pattern is None:
        return None
    split_ascii = re.compile(re.sub("<(.)>", lambda name: ASCII[name[1]], pattern)).findall
    split_unicode = re.compile(re.sub("<(.)>", lambda name: UNICODE[name[1]], pattern)).findall
    normalizes, characters = bool(description["normalizer"]), Characters()

    def split(text: str) -> list[str] | None:
        if text.isascii():
            return split_ascii(text)
        if characters.has_odd(text) or (normalizes and not unicodedata.is_normalized("NFC", text)):
            return None
        return split_unicode(text)

    return split


class Characters:
    """Which characters are odd: of another class to the library, or newer than this Python."""

    def __init__(self) -> None:
        self._plain = {chr(code) for code in range(128)} - {*"\x1c\x1d\x1e\x1f"}  # those are space to Python
        self._odd: set[str] = set()

    def has_odd(self, text: str) -> bool:
        from tokenizers import Regex, pre_tokenizers

        found = set(text) - self._plain
        if new := "".join(found - self._odd):
            odd = {character for character in new if unicodedata.category(character) == "Cn"}
            for theirs, ours in ((r"\p{L}+", "L"), (r"\p{N}+", "N"), (r"\s+", "S")):
                matches = pre_tokenizers.Split(Regex(theirs), "removed", invert=True).pre_tokenize_str(new)
                odd |= {*"".join(match for match, _ in matches)} ^ {*re.findall(UNICODE[ours], new)}
            self._odd |= odd
            self._plain |= {*new} - odd
        return not self._odd.isdisjoint(found)


def _pattern_of(description: dict[str, Any]) -> str:
    """How a byte-level BPE splits; empty if it is something else."""
    model, steps = description["model"], description["pre_tokenizer"]
    if model["type"] != "BPE" or model.get("dropout") or not steps:
        return ""
    if description["normalizer"] not in (None, dict(type="NFC")):
        return ""
    byte_level = dict(type="ByteLevel", add_prefix_space=False)
    if byte_level.items() <= steps.items():
        return BYTE_LEVEL if steps.get("use_regex", True) else ""
    if steps["type"] != "Sequence" or len(steps["pretokenizers"]) != 2:
        return ""
    split, bytes_ = steps["pretokenizers"]
    if not (dict(type="Split", behavior="Isolated", invert=False).items() <= split.items()):
        return ""
    return split["pattern"].get("Regex", "") if (byte_level | dict(use_regex=False)).items() <= bytes_.items() else ""


def encoder_of(tokenizer: TokenizerSpec, dtype: np.dtype) -> Callable[[list[str]], list[bytes]]:
    """A function of texts: the tokens of each, as bytes of the type they have on disk, without the separator."""
    description = json.loads(tokenizer.json)
    added = [token["id"] for token in description["added_tokens"]]
    if added == [256] and json.loads(plain_bytes().json)["model"] == description["model"]:  # whatever its separator
        return lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(dtype).tobytes() for text in texts]
    library, split = _Library(tokenizer.json, dtype), splitter_of(description)
    return _Words(description, split, library, dtype).encode if split else library.encode


class _Library:
    def __init__(self, text: str, dtype: np.dtype) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Tokenizer = Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True  # a text that spells the separator does not end its document
        self._dtype = dtype

    def encode(self, texts: list[str]) -> list[bytes]:
        with tokenizer_errors("prepare: the tokenizer cannot encode a text"):
            batches = grouped(texts, len, BATCH_CHARACTERS)
            found = (self._tokenizer.encode_batch_fast(some, add_special_tokens=False) for some in batches)
            return [np.array(encoding.ids, self._dtype).tobytes() for encodings in found for encoding in encodings]


class _Words:
    def __init__(
        self,
        description: dict[str, Any],  # of the tokenizer
        split: Callable[[str], list[str] | None],
        library: _Library,
        dtype: np.dtype,
    ) -> None:
        self._split, self._library = split, library
        # of its own, these find whole tokens in a text, across words
        self._whole = [token["content"] for token in description["added_tokens"] if not token["special"]]
        bare = description | dict(
            added_tokens=[], normalizer=None, post_processor=None, truncation=None, padding=None,
            pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False),
        )  # fmt: skip
        self._bare = _Library(json.dumps(bare), dtype)
        self._known: dict[str, bytes] = {}

    def encode(self, texts: list[str]) -> list[bytes]:
        return [tokens for some in grouped(texts, len, BATCH_CHARACTERS) for tokens in self._encoded(some)]

    def _encoded(self, texts: list[str]) -> list[bytes]:
        split = [None if any(token in text for token in self._whole) else self._split(text) for text in texts]
        known = self._known
        new = [word for word in set().union(*filter(None, split)) if word not in known]
        known.update(zip(new, self._bare.encode(new), strict=True))
        tokens = [
            self._library.encode([text])[0] if words is None else b"".join(map(known.__getitem__, words))
            for text, words in zip(texts, split, strict=True)
        ]
        if len(known) > CACHED_WORDS:
            known.clear()
        for word in new:
            if len(word) > MAX_CACHED_WORD:
                known.pop(word, None)
        return tokens
