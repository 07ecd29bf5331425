"""Text from a model: tokens are drawn one after the other, for several texts at a time. docs/generate.md.

for texts in generate(model, [[separator, *ids], ...], tokens=64, sampling=Sampling(top_p=0.9), end=separator):
    ...                                    # after each token: texts[i].ids, texts[i].ended

Sampling takes the temperature first, then the top_k likeliest tokens, then of these the fewest that have top_p of the
probability together. A number between 0 and 1 picks among them as a place on a line of length 1 that tokens divide by
their probability, likeliest first. So a text depends on its own numbers only, whatever is generated beside it.

The cache has keys and values of the tokens so far, so that a new token costs one token's work. Prompts of any lengths
are read in one pass, packed as documents: nothing is padded. After that every row has one token at a time, each at its
own position, and slots that a row has not filled yet are masked.

A text ends with the separator that would begin the next document, after as many tokens as were asked for, or at the
context length: the model has never seen a later position.

B rows, S slots of a row, N tokens of all prompts, H query heads, Hk key heads, G = H / Hk, D head_dim, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fasttrain.config import SamplingConfig
from fasttrain.model import Decoder
from fasttrain_kernels import attention

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Sampling(SamplingConfig):
    """How tokens are drawn."""

    def numbers(self, samples: Sequence[int], tokens: int) -> Tensor:  # (B, tokens) float64 in [0, 1)
        """For each text, by its own number as a sample: as many as it has tokens."""
        digests = [hashlib.sha256(f"{self.seed} {sample}".encode()).digest() for sample in samples]
        generators = [torch.Generator().manual_seed(int.from_bytes(digest[:7])) for digest in digests]
        return torch.stack([torch.rand(tokens, generator=each, dtype=torch.float64) for each in generators])

    def draw(self, logits: Tensor, numbers: Tensor) -> Tensor:  # (B, V), (B,) -> (B,)
        """A token for each row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        V = logits.shape[-1]
        scores, candidates = logits.double().topk(min(self.top_k or V, V))
        shares = (scores / self.temperature).softmax(-1)
        sums = shares.cumsum(-1)
        kept = F.pad(sums[:, :-1], (1, 0)) < self.top_p  # those before it do not have enough yet
        length = (shares * kept).sum(-1)
        place = torch.searchsorted(sums, (numbers * length)[:, None], right=True)
        return candidates.gather(-1, place.minimum(kept.sum(-1, keepdim=True) - 1))[:, 0]


class Cache:
    """Keys and values of a batch of texts that a model continues."""

    def __init__(self, model: Decoder, prompts: Sequence[Sequence[int]], *, slots: int) -> None:
        self._model, self._device = model, model.cos.device
        self._prompts, self._slots = prompts, slots
        self._filled = [0] * len(prompts)  # slots of each row
        self._kv: Tensor | None = None  # (layers, 2, B, S, Hk, D), when the dtype of the first keys is known

    def prefill(self) -> Tensor:  # (B, V)
        """Read the prompts; the logits of the token after each."""
        self._filled = lengths = [len(prompt) for prompt in self._prompts]
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = torch.tensor([0, *accumulate(lengths)])
        tokens = torch.tensor([*chain(*self._prompts)])
        rows, positions, ends, tokens = (x.to(self._device) for x in (rows, positions, ends, tokens))
        cu_seqlens = ends.int()
        layers, most = range(len(self._model.blocks)), max(lengths)
        past = [_Layer(self, layer, rows, positions, most, cu_seqlens=cu_seqlens) for layer in layers]
        return self._model.logits(tokens[None], cu_seqlens, positions[None], past=past, places=ends[1:] - 1)

    def step(self, tokens: Tensor) -> Tensor:  # (B,) -> (B, V)
        """Add a token to each row; the logits of the one after. A row that is full changes its last token."""
        places = [min(filled, self._slots - 1) for filled in self._filled]
        self._filled = [place + 1 for place in places]
        least, most = min(self._filled), max(self._filled)
        positions = torch.tensor(places, device=self._device)
        seen = None if least == most else torch.arange(most, device=self._device) <= positions[:, None]
        rows = torch.arange(len(places), device=self._device)
        past = [_Layer(self, layer, rows, positions, most, seen) for layer in range(len(self._model.blocks))]
        return self._model.logits(tokens[:, None], None, positions[:, None], past=past)[:, 0]

    def layer(self, layer: int, like: Tensor) -> Tensor:  # (..., Hk, D) -> (2, B, S, Hk, D)
        if self._kv is None:
            shape = (len(self._model.blocks), 2, len(self._prompts), self._slots, *like.shape[-2:])
            self._kv = like.new_zeros(shape)  # zeros: what is masked must still be finite
        return self._kv[layer]


@dataclass(frozen=True)
class _Layer:
    """A layer of the cache, for new tokens: a prompt each, packed (1, N), or one token of each row (B, 1)."""

    cache: Cache
    layer: int
    rows: Tensor  # (N,) or (B,): of each token
    positions: Tensor  # the same
    most: int = 0  # slots that any row has filled
    seen: Tensor | None = None  # (B, most) bool; None: all
    cu_seqlens: Tensor | None = None  # (B + 1,), of prompts: each sees itself

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (..., H, D), (..., Hk, D) twice -> (..., H, D)
        kv = self.cache.layer(self.layer, k)
        for cached, new in zip(kv, (k, v), strict=True):
            cached[self.rows, self.positions] = new.flatten(0, 1)
        if self.cu_seqlens is not None:
            return attention(q, k, v, cu_seqlens=self.cu_seqlens, max_seqlen=self.most)
        keys, values = kv[:, :, : self.most].transpose(2, 3)  # (B, Hk, S, D)
        # The G heads of a group are G queries of its one key head: keys are read once, and nothing is repeated.
        grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])  # (B, Hk, G, D)
        mask = None if self.seen is None else self.seen[:, None, None]
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)


@dataclass(kw_only=True)
class Continuation:
    """A continuation of a prompt, so far. Whoever sets `ended` ends it."""

    ids: list[int] = field(default_factory=list)
    ended: str = ""  # "separator", "tokens" or "context"; empty: not yet


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,  # of each continuation, at most
    sampling: Sampling,
    samples: Sequence[int] | None = None,  # which sample of its prompt each is; None: the first
    end: int | None = None,  # token that ends a text, and is not part of it
    never: int | None = None,  # token that is not drawn
    vocab: int | None = None,  # tokens that mean something; None: all rows of the embedding
) -> Iterator[list[Continuation]]:
    """The continuations after each token, until all have ended. Every rank has to call this.

    The same weights, prompt and seed give the same text, whatever the other prompts are.
    """
    _check(model, prompts, tokens)
    device = model.cos.device
    numbers = sampling.numbers([0] * len(prompts) if samples is None else samples, tokens).to(device)
    texts = [Continuation() for _ in prompts]
    room = [min(tokens, model.sequence - len(prompt)) for prompt in prompts]
    cache = Cache(model, prompts, slots=max(len(p) + n for p, n in zip(prompts, room, strict=True)))
    training = model.training
    model.eval()
    try:
        drawn = None
        for step in range(max(room)):
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                logits = (cache.prefill() if drawn is None else cache.step(drawn))[:, :vocab]
                if never is not None:
                    logits[:, never] = -torch.inf
                drawn = sampling.draw(logits, numbers[:, step])
            if dist.is_initialized():
                dist.broadcast(drawn, 0)  # ranks on unlike hardware may disagree in the last digit
            for text, token, most in zip(texts, drawn.tolist(), room, strict=True):
                if text.ended:
                    continue
                if token == end:
                    text.ended = "separator"
                    continue
                text.ids.append(token)
                if len(text.ids) == most:
                    text.ended = "tokens" if most == tokens else "context"
            yield texts
            if all(text.ended for text in texts):
                return
    finally:
        model.train(training)


def _check(model: Decoder, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    if tokens < 1:
        raise ValueError(f"generate: {tokens} tokens; ask for at least 1")
    if not all(prompts):
        raise ValueError("generate: the prompt is empty, and the data has no separator to begin with; write one")
    if (longest := max(map(len, prompts))) >= model.sequence:
        raise ValueError(
            f"generate: the prompt has {longest} tokens, and the model knows texts of {model.sequence} (data.sequence "
            "of its run); shorten the prompt"
        )


_INCOMPLETE = "\ufffd"  # what a decoder makes of the first bytes of a character


class TextStream:
    """Text of tokens as they come. A character whose bytes are in several tokens appears with the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._shown = 0  # a decoder may need a token before those to show: for the space between words

    def add(self, ids: list[int]) -> str:
        """Take tokens; what they add to the text, as far as it is complete."""
        self._ids += ids
        new = self.rest()
        if not new or new.endswith(_INCOMPLETE):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return new

    def rest(self) -> str:
        """What has not been shown: at the end of a text, an incomplete character."""
        before, now = self._ids[self._begin : self._shown], self._ids[self._begin :]
        return self._tokenizer.decode(now)[len(self._tokenizer.decode(before)) :]


def continue_text(model: Decoder, tokenizer: Tokenizer, separator: int, prompt: str, *, tokens: int) -> str:
    """The prompt, as the beginning of a document, and what the model makes of it. Every rank has to call this."""
    known = tokenizer.encode(prompt, add_special_tokens=False).ids
    known = known[-max(model.sequence - tokens - 1, 1) :]  # of a long one the end: this is no place for an error
    prompts, vocab = [[separator, *known]], tokenizer.get_vocab_size()
    *_, (text,) = generate(model, prompts, tokens=tokens, sampling=Sampling(), end=separator, vocab=vocab)
    return tokenizer.decode(known + text.ids)
