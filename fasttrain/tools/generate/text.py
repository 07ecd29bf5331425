"""Between text and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fasttrain.model import Decoder
from fasttrain.tools.generate.decoding import generate
from fasttrain.tools.generate.sampling import Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"  # what a decoder makes of the first bytes of a character


class TextStream:
    """Text of tokens as they come. A character whose bytes are in several tokens appears with the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._shown = 0  # a decoder may need a token before those to show: for the space between words

    def add(self, ids: list[int]) -> str:
        """What they add to the text, as far as it is complete."""
        self._ids += ids
        new = self._new()
        if not new or new.endswith(_INCOMPLETE):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return new

    def rest(self) -> str:
        """What is incomplete, at the end."""
        return self._new()

    def _new(self) -> str:
        before, now = self._ids[self._begin : self._shown], self._ids[self._begin :]
        return self._tokenizer.decode(now)[len(self._tokenizer.decode(before)) :]


def continue_text(model: Decoder, tokenizer: Tokenizer, separator: int, prompt: str, *, tokens: int) -> str:
    """The prompt, as the beginning of a document, and what the model makes of it. Every rank has to call this."""
    known = tokenizer.encode(prompt, add_special_tokens=False).ids
    known = known[-max(model.sequence - tokens - 1, 1) :]  # of a long one the end: this is no place for an error
    prompts, vocab = [[separator, *known]], tokenizer.get_vocab_size()
    *_, (text,) = generate(model, prompts, tokens=tokens, sampling=Sampling(), end=separator, vocab=vocab)
    return tokenizer.decode(known + text.ids)
