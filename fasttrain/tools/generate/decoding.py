"""One token after the other, for several texts at a time.

A text ends with the separator that would begin the next document, after as many tokens as were asked for, or where the
model's context ends: it has never seen a later position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fasttrain.model import Decoder
from fasttrain.tools.generate.cache import Cache
from fasttrain.tools.generate.sampling import Sampling


@dataclass(kw_only=True)
class Continuation:
    """What a model makes of a prompt, so far. Whoever sets `ended` ends it."""

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
                _add(text, token, end=end, tokens=tokens, most=most)
            yield texts
            if all(text.ended for text in texts):
                return
    finally:
        model.train(training)


def _add(text: Continuation, token: int, *, end: int | None, tokens: int, most: int) -> None:
    if text.ended:
        return
    if token == end:
        text.ended = "separator"
        return
    text.ids.append(token)
    if len(text.ids) == most:
        text.ended = "tokens" if most == tokens else "context"


def _check(model: Decoder, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    if tokens < 1:
        raise ValueError(f"generate: {tokens} tokens; ask for at least 1")
    for prompt in prompts:
        if not prompt:
            raise ValueError("generate: the prompt is empty, and the data has no separator to begin with; write one")
        if len(prompt) >= model.sequence:
            raise ValueError(
                f"generate: the prompt has {len(prompt)} tokens, and the model knows texts of {model.sequence} "
                "(data.sequence of its run); shorten the prompt"
            )
