"""Loss on data that is not trained on: the mean over tokens, not over batches, and never an average of perplexities.

Every validation of a set sees the same samples, whatever the number of ranks: the first of a shuffled epoch. Ranks run
micro-batches of one shape, and what is missing in the last ones is filled with samples that do not count.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from fasttrain import config
from fasttrain.data.batches import IGNORED, Batch, Batches
from fasttrain.data.datasets import AnyDataset, TrainingData, described_by, open_dataset, tokenizers_differ
from fasttrain.distributed.runtime import Runtime
from fasttrain.model import Decoder

HELD_OUT = "held-out"  # the name of the training data's own validation split


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score on one set."""

    loss: float  # nats per token
    accuracy: float  # share of tokens that were the most likely one
    tokens: int
    bytes_per_token: float | None  # of text; None: nobody knows

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers."""
        return self.loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None

    @property
    def perplexity(self) -> float:
        """exp of the mean loss; infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def suspicion(self, vocab: int) -> str:
        """Say what is wrong with a loss that knowing nothing would beat; empty if nothing is."""
        if self.loss <= 1.05 * math.log(vocab):
            return ""
        return (
            f"a loss of {self.loss:.2f} is worse than guessing among {vocab} tokens ({math.log(vocab):.2f}): suspect "
            "the data (another tokenizer?), a diverged model or the metric, not over-fitting"
        )


class ValidationSet:
    """Samples to score a model on."""

    def __init__(self, dataset: AnyDataset, settings: config.Config, runtime: Runtime) -> None:
        split = "validation" if "validation" in dataset.splits else "train"
        stream = dataset.split(split)
        micro, T = settings.batch.micro, settings.data.sequence
        # A micro-batch of each rank: a set of any size is read a little at a time
        self._batches = Batches(
            stream,
            sequence=T,
            sequences=micro * runtime.dp_size,
            seed=0,
            document_mask=settings.data.document_mask,
            dp_rank=runtime.dp_rank,
            dp_size=runtime.dp_size,
        )
        self._samples = min(settings.validation.sequences, (len(stream) - 1) // T)
        self._micro, self._runtime = micro, runtime
        self._bytes_per_token = dataset.bytes_per_token(split)

    def score(self, model: Decoder) -> Score:
        """The same on every rank; OSError, on every rank too, if data cannot be read."""
        totals = torch.zeros(4, dtype=torch.float64, device=self._runtime.device)  # loss, hits, tokens, errors
        training, errors = model.training, list[str]()
        model.eval()
        # Without gradients a block would be another graph to compile, which a validation seldom pays for.
        with torch.compiler.set_stance("force_eager"):
            for batch in self._micro_batches():
                stats = model.stats(*batch.inputs())
                sums = [x.double().sum() for x in (stats.loss, stats.correct, batch.targets != IGNORED)]
                totals[:3] += torch.stack(sums)
                errors += [batch.error] if batch.error else []
        model.train(training)
        totals[3] = len(errors)
        dist.all_reduce(totals, group=self._runtime.dp_group)
        loss_sum, hits, tokens, unread = totals.tolist()
        if unread:  # on whatever rank: all of them come here
            raise OSError([*errors, "validation data cannot be read on another rank"][0])
        loss, accuracy = loss_sum / tokens if tokens else math.nan, hits / max(tokens, 1)
        return Score(loss=loss, accuracy=accuracy, tokens=int(tokens), bytes_per_token=self._bytes_per_token)

    def _micro_batches(self) -> Iterator[Batch]:
        together = self._micro * self._runtime.dp_size
        for step in range(-(-self._samples // together)):
            batch = self._batches.at_or_blank(step)
            first = step * together + self._runtime.dp_rank * self._micro  # place of this rank's first sample
            targets = batch.targets.clone()
            targets[max(self._samples - first, 0) :] = IGNORED
            yield replace(batch, targets=targets).to(self._runtime.device)


def validation_sets(data: TrainingData, settings: config.Config, runtime: Runtime) -> dict[str, ValidationSet]:
    """The held-out documents of the training data, those of each component apart, and the sets of the configuration."""
    own = {name or HELD_OUT: dataset for name, dataset in data.datasets.items() if "validation" in dataset.splits}
    sets = {name: ValidationSet(dataset, settings, runtime) for name, dataset in own.items()}
    for name, path in settings.validation.sets.items():
        if name in {HELD_OUT, *data.datasets}:
            raise ValueError(
                f"validation.sets: {name!r} is the name of the training data's own held-out documents; choose another"
            )
        other = open_dataset(path, described_by(data.first))
        if difference := tokenizers_differ(data.first, other):
            raise ValueError(
                f"validation.sets: {name} ({path}) was prepared with another tokenizer than the training data "
                f"({data.first.path}): {difference}; prepare it again with {data.first.tokenizer_path or 'that one'}"
            )
        sets[name] = ValidationSet(other, settings, runtime)
    return sets


def mean_score(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score | None:
    """The mean over the components of a mixture, by their weights; None: none of them has a score."""
    found = {name: weight for name, weight in weights.items() if name in scores}
    if not found:
        return None

    def mean(figures: Sequence[float]) -> float:
        return sum(w * figure for w, figure in zip(found.values(), figures, strict=True)) / sum(found.values())

    parts = [scores[name] for name in found]
    lengths = [part.bytes_per_token for part in parts if part.bytes_per_token is not None]
    return Score(
        loss=mean([part.loss for part in parts]),
        accuracy=mean([part.accuracy for part in parts]),
        tokens=sum(part.tokens for part in parts),
        bytes_per_token=mean(lengths) if len(lengths) == len(parts) else None,
    )
