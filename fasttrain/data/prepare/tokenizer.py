"""The tokenizer of a preparation: trained on its text, that of another model, or plain bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
SEPARATOR = "<|endoftext|>"
KNOWN = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>", "<|endofdocument|>")


class Vocabulary(NamedTuple):
    """What a dataset has to know of its tokenizer."""

    json: str  # the content of tokenizer.json
    size: int  # token ids are below
    separator: int
    separator_text: str


def trained_on(texts: Iterable[str], size: int, *, separator: str = SEPARATOR) -> Vocabulary:
    """A byte-level BPE of up to `size` tokens: every text can be encoded, and decodes to itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < 257:
        raise ValueError(
            f"prepare: a vocabulary of {size} has no room for 256 bytes and the separator; train 257 tokens or more, "
            f"or choose --tokenizer {BYTES}"
        )
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
    return _vocabulary(tokenizer, separator)


def plain_bytes(*, separator: str = SEPARATOR) -> Vocabulary:
    """256 bytes and the separator, in the form of a byte-level BPE without merges: token = value of the byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # the letters in which byte-level BPE writes bytes: themselves where they can be seen, else from 256 on
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(separator, special=True, normalized=False)])
    return _vocabulary(tokenizer, separator)


def loaded(name: Path, *, separator: str | None = None) -> Vocabulary:
    """That of a tokenizer.json, or of the directory of a model or a dataset that has one."""
    from tokenizers import Tokenizer

    path = name / "tokenizer.json" if name.is_dir() else name
    if not path.exists():
        raise FileNotFoundError(
            f"prepare: there is no tokenizer {path}; name a tokenizer.json, the directory of one, or {BYTES!r}"
        )
    try:
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library has no class of its own for it
        raise ValueError(f"prepare: {path} is no tokenizer.json of Hugging Face tokenizers ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _vocabulary(tokenizer, _separator(tokenizer, path, separator))


def _vocabulary(tokenizer: Tokenizer, separator: str) -> Vocabulary:
    names = tokenizer.get_vocab()
    return Vocabulary(tokenizer.to_str(), max(names.values()) + 1, names[separator], separator)


def _separator(tokenizer: Tokenizer, path: Path, asked: str | None) -> str:
    """The token that stands between documents: as asked, as the files beside it say, or by a usual name."""
    for name in (asked,) if asked else (_of_dataset(tokenizer, path), _of_model(path), *KNOWN):
        if name and tokenizer.token_to_id(name) is not None:
            return name
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    trouble = f"has no token {asked!r}" if asked else "does not say which token separates documents"
    raise ValueError(
        f"prepare: {path} {trouble}; set --separator, for instance to one of its special tokens: "
        f"{', '.join(special[:20]) or 'it has none'}"
    )


def _of_dataset(tokenizer: Tokenizer, path: Path) -> str | None:
    number = _json(path.with_name("dataset.json")).get("separator")
    return tokenizer.id_to_token(number) if isinstance(number, int) else None


def _of_model(path: Path) -> str | None:
    found = _json(path.with_name("tokenizer_config.json")).get("eos_token")
    return found.get("content") if isinstance(found, dict) else found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
