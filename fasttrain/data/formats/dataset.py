"""A dataset of another program. Its files hold tokens and little else; the rest is told, or taken from a sample.

Opening reads a sample of each split, some MB at any size: its largest token must lie in the vocabulary, and it stands
for the content in the digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fasttrain.data.dataset import DocumentSource, corrupt, read_tokenizer
from fasttrain.data.stream import TokenStream, spread

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WHOLE_TOKENS = 2**24  # a split of so many is read whole, in 0.1 s
SAMPLE_TOKENS = 2**20  # of a longer one
DECODED_TOKENS = 2**17  # tokens of a split whose text is measured, in 0.1 s
REWRITE = "copy it again, or write it again"
NO_SEPARATOR = -1  # as data.separator
SEPARATORS = ("<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "</s>")  # names, the likeliest first


class KnownVocab(NamedTuple):
    """A vocabulary, and the token between documents, if there is one."""

    vocab: int
    separator: int | None


GPT2 = KnownVocab(50257, 50256)
LLAMA3 = KnownVocab(128256, 128000)


class Described(NamedTuple):
    """Settings for what the files do not say: data.tokenizer, data.vocab, data.separator."""

    tokenizer: Path | None = None
    vocab: int | None = None
    separator: int | None = None

    def __bool__(self) -> bool:
        return self != Described()


class FoundFiles(NamedTuple):
    """Files, and what they say of themselves."""

    kind: str
    splits: dict[str, TokenStream]  # without a separator
    known: KnownVocab | None = None


class ExternalDataset:
    """A dataset with the attributes of `Dataset`; what nobody knows is None."""

    def __init__(self, path: Path, found: FoundFiles, described: Described) -> None:
        self.path, self.kind = path, found.kind
        self._streams, self._described = found.splits, described
        self.splits = list(found.splits)
        self.tokenizer_path = described.tokenizer
        samples = {name: spread(stream, SAMPLE_TOKENS, whole=WHOLE_TOKENS) for name, stream in found.splits.items()}
        self.vocab, self.separator = self._known(found, samples)
        for stream in found.splits.values():
            stream.separator = self.separator
        for name, sample in samples.items():
            low, high = sample.min(), sample.max()
            if low < 0 or high >= self.vocab:
                trouble = f"has tokens from {low} to {high} in {name}, outside the vocabulary of {self.vocab}"
                raise corrupt(path, trouble, "set data.vocab or data.tokenizer to what made them")
        content = [(name, stream.dtype.name, stream.lengths) for name, stream in found.splits.items()]
        hashed = hashlib.sha256(repr((self.vocab, self.separator, content)).encode())
        for sample in samples.values():
            hashed.update(sample.tobytes())
        self.digest = hashed.hexdigest()
        """Equal for equal data, as far as sizes and a sample tell."""

    @property
    def tokenizer_digest(self) -> str | None:
        """Equal for equal tokenizers."""
        path = self.tokenizer_path
        return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()

    def split(self, name: str) -> TokenStream:
        """ "train" or "validation"."""
        if name not in self._streams:
            raise ValueError(f"dataset: {self.path} has no split {name!r}, only {', '.join(self.splits)}")
        return self._streams[name]

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of data.tokenizer, read each time."""
        return None if self.tokenizer_path is None else read_tokenizer(self.tokenizer_path, "data.tokenizer")

    def bytes_per_token(self, name: str) -> float | None:
        """Text bytes per token, by a sample of the split."""
        tokenizer, stream = self.tokenizer(), self.split(name)
        if tokenizer is None:
            return None
        tokens = spread(stream, DECODED_TOKENS, whole=DECODED_TOKENS)
        return sum(len(text.encode()) for text in tokenizer.decode_batch(tokens.tolist())) / tokens.size

    def source(self, name: str, document: int) -> DocumentSource | None:
        """Where a document came from: the files do not say."""
        return None

    def notes(self) -> list[str]:
        """Assumptions about the data, for people."""
        separator = "none, so that a sample is one text" if self.separator is None else self.separator
        lines = [f"{self.path}: read as {self.kind}; vocabulary {self.vocab}, separator {separator}"]
        if self.tokenizer_path is None:
            lines.append(f"{self.path}: no data.tokenizer, and so no bits per byte and no sample of text")
        return lines

    def _known(self, found: FoundFiles, samples: dict[str, np.ndarray]) -> KnownVocab:
        """Vocabulary and separator by the settings, else by the format, else by the sample."""
        tokenizer, (_, vocab, separator) = self.tokenizer(), self._described
        if tokenizer is not None:
            ids = (tokenizer.token_to_id(name) for name in SEPARATORS)
            size = max(tokenizer.get_vocab().values(), default=0) + 1
            known = KnownVocab(size, next((id for id in ids if id is not None), None))
        else:
            every = samples.values()
            fits = all(some.max() < GPT2.vocab for some in every) and any(GPT2.separator in some for some in every)
            known = found.known or (GPT2 if fits else KnownVocab(vocab or self._counted(samples), None))
        vocab = vocab or known.vocab
        if separator is None:
            fits = known.separator is not None and known.separator < vocab
            return KnownVocab(vocab, known.separator if fits else None)
        if not NO_SEPARATOR <= separator < vocab:
            raise ValueError(
                f"data.separator ({separator}) is not a token of the vocabulary of {vocab} ({self.path}); set it to "
                f"the token between documents, or to {NO_SEPARATOR} if there is none"
            )
        return KnownVocab(vocab, None if separator == NO_SEPARATOR else separator)

    def _counted(self, samples: dict[str, np.ndarray]) -> int:
        """The smallest vocabulary that all tokens are in, where all of them were read."""
        largest = max(int(sample.max()) for sample in samples.values())
        if all(sample.size == len(self._streams[name]) for name, sample in samples.items()):
            return largest + 1
        pickle = self.path / "meta.pkl"
        hint = f" ({pickle.name} has it as vocab_size, but a pickle can run any program, and is not read here)"
        no_separator = f"without GPT-2's separator {GPT2.separator}"
        trouble = f"does not say how large its vocabulary is, and a sample goes up to {largest} {no_separator}"
        remedy = f"set data.vocab{hint * pickle.exists()}, and data.separator if there is a token between documents"
        raise corrupt(self.path, trouble, remedy)
