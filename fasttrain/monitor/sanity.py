"""Is this training at all? What the first loss has to be, and in what range later ones; blocks that do not learn.

An untrained model knows nothing, so its loss is that of a guess among the vocabulary. Its logits are not quite equal,
though: the last norm makes inputs of mean square 1, so that the logits have the variance init_std^2 * hidden, and the
loss is ln(vocab) + half of it. With a tied head, the logit of the token just read stands out, by at most hidden *
init_std, the less the more blocks add to the embedding: the loss is higher where another token follows, and lower where
the same one does, as in runs of spaces. Anything else is a defect of loss, data or initial weights.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fasttrain import config
from fasttrain.events import EventKind

FIRST_LOSS = 0.05  # of ln(vocab): how far the first loss may be from what is expected
MOST_REPEATED = 0.5  # share of tokens that follow themselves up to which data is a text, and not a defect


# settings that make a run diverge or learn nothing: the highest value that anybody uses, and one to begin with
USUAL = {
    "optim.lr": (0.05, 3e-4), "optim.muon_lr": (0.5, 0.02), "optim.weight_decay": (1.0, 0.1), "optim.eps": (1e-3, 1e-8),
    "optim.z_loss": (0.05, 1e-4), "model.init_std": (0.2, 0.02), "model.norm_eps": (1e-2, 1e-6),
}  # fmt: skip


def unusual_settings(settings: config.Config) -> list[str]:
    """Settings beyond what anybody uses, each with a value to begin with."""
    sections = {"optim": settings.optim, "model": settings.model}
    values = {name: float(getattr(sections[name.split(".")[0]], name.split(".")[1])) for name in USUAL}
    return [
        f"{name} is {values[name]:g}, and more than {highest:g} is unusual; begin with {start:g}"
        for name, (highest, start) in USUAL.items()
        if values[name] > highest
    ]


def first_loss(
    model: config.ModelConfig, vocab: int, z_loss: float = 0.0, repeated: float = 0.0
) -> tuple[float, float]:
    """Between what and what the loss of step 0 is expected to be, its z-loss included; repeated: as in Monitor."""
    variance = model.init_std**2 * model.hidden
    lowest = highest = math.log(vocab) + variance / 2
    if model.tied_head:
        # Feed-forward layers add ffn * variance^2 / 8 times the embedding's square: silu(x) is x / 2 for small x
        own = model.hidden * model.init_std / math.sqrt(1 + model.ffn * variance**2 / 8)
        highest += math.log1p(math.exp(own - highest))
        lowest -= min(repeated, MOST_REPEATED) * own
    return lowest + z_loss * lowest**2, highest + z_loss * highest**2


def first_loss_suspicion(loss: float, settings: config.Config, vocab: int, repeated: float = 0.0) -> str:
    """What is wrong with the first loss of a run, of untrained weights or of pretrained ones; empty if nothing is."""
    guess, tolerance = math.log(vocab), FIRST_LOSS * math.log(vocab)
    if settings.from_hf is not None:
        if loss <= guess + tolerance:
            return ""
        return (
            f"the first loss is {loss:.3f}, and a guess among {vocab} tokens has {guess:.3f}: the weights of "
            f"{settings.from_hf} know nothing about this data; was it prepared with their tokenizer?"
        )
    low, high = first_loss(settings.model, vocab, settings.optim.z_loss, repeated)
    if low - tolerance <= loss <= high + tolerance:
        return ""
    causes = "initial weights are too large, or targets are not of this vocabulary: look at model.init_std and the data"
    if loss < guess:
        causes = "the targets are in the inputs, or most tokens are the same: look at the data (fasttrain data lint)"
    return (
        f"the first loss is {loss:.3f}, and untrained weights with a vocabulary of {vocab} have {low:.3f} to "
        f"{high:.3f}, +- {tolerance:.2f}: {causes}"
    )


class Finding(NamedTuple):
    """What an event is made of."""

    kind: EventKind
    text: str
    evidence: dict[str, float]


class Envelope:
    """A range of losses along the run, from a table of (tokens, lowest, highest); alarms after `patience` steps."""

    def __init__(self, table: Sequence[tuple[float, float, float]], patience: int = 20) -> None:
        self._table, self._patience, self._outside = [tuple(map(float, row)) for row in table], patience, 0
        for row in self._table:
            if len(row) != 3 or not row[1] < row[2]:
                raise ValueError(f"envelope: {row} must be (tokens, lowest loss, highest loss), the lowest first")
        for (before, *_), (after, *_) in pairwise(self._table):
            if before >= after:
                raise ValueError(f"envelope: {after:g} tokens come after {before:g}; list them in rising order")

    def range(self, tokens: float) -> tuple[float, float]:
        """Between rows linear in the logarithm of tokens, as losses are; nothing is expected outside of the table."""
        if not self._table or not self._table[0][0] <= tokens <= self._table[-1][0]:
            return -math.inf, math.inf
        counts, lows, highs = zip(*self._table, strict=True)
        place, places = np.log(np.maximum(tokens, 1.0)), np.log(np.maximum(counts, 1.0))
        return float(np.interp(place, places, lows)), float(np.interp(place, places, highs))

    def observe(self, tokens: float, loss: float) -> list[Finding]:
        """An alarm, once per stay outside."""
        low, high = self.range(tokens)
        self._outside = 0 if low <= loss <= high else self._outside + 1
        if self._outside != self._patience:
            return []
        side, evidence = "above" if loss > high else "below", dict(loss=loss, low=low, high=high, steps=self._outside)
        text = f"for {self._outside} steps the loss has been {side} what is expected here: {loss:.3f}, not in "
        return [Finding(EventKind.ENVELOPE, f"{text}{low:.3f} to {high:.3f}", evidence)]


_LIMITS = {EventKind.DEAD_BLOCK: 50, EventKind.EXPLODING_BLOCK: 5}  # observations in a row


class Blocks:
    """Gradient norms of blocks against each other. Those of healthy ones may differ tenfold, but they keep doing so."""

    DEAD = 1e-4  # of the median block
    EXPLODING = 30.0  # times what the block usually has, of the median block
    _USUAL = 0.02  # weight of an observation in the usual ratio
    _FIRST = 50  # observations before a block can explode

    def __init__(self) -> None:
        self._seen = 0
        self._usual: list[float] = []  # log of norm / median
        self._counts: Counter[tuple[EventKind, int]] = Counter()  # observations in a row

    def observe(self, norms: Sequence[float]) -> list[Finding]:
        """What is new; `norms` by block."""
        middle = sorted(norms)[len(norms) // 2] if len(norms) > 1 else 0.0  # one has nothing to compare with
        if not math.isfinite(sum(norms)) or middle == 0:  # not a matter of single blocks
            return []
        logs = [math.log(max(norm / middle, 1e-12)) for norm in norms]
        self._seen += 1
        self._usual = self._usual or logs
        found = []
        for block, (norm, log) in enumerate(zip(norms, logs, strict=True)):
            exploding = self._seen > self._FIRST and log > self._usual[block] + math.log(self.EXPLODING)
            dead = norm <= self.DEAD * middle
            if not (exploding or dead):
                weight = max(self._USUAL, 1 / self._seen)
                self._usual[block] += weight * (log - self._usual[block])
            for kind, sick in ((EventKind.DEAD_BLOCK, dead), (EventKind.EXPLODING_BLOCK, exploding)):
                count = self._counts[kind, block] = self._counts[kind, block] + 1 if sick else 0
                if count == _LIMITS[kind]:
                    text = (
                        f"block {block} is {kind.split()[0]}: its gradient norm has been {norm:.3g} and that of the "
                        f"median block {middle:.3g}, {count} times in a row"
                    )
                    found.append(Finding(kind, text, dict(block=block, norm=norm, others=middle, observations=count)))
        return found
