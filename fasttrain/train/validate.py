"""Validation between two steps: every set is scored, and the model continues a text."""

from collections.abc import Iterator

from fasttrain.events import Event, EventKind
from fasttrain.metrics.record import News, ValidationRecord
from fasttrain.tools.generate import continue_text
from fasttrain.tools.validation import HELD_OUT, Score, ValidationSet, mean_score
from fasttrain.train.state import TrainState


def validate(state: TrainState, sets: dict[str, ValidationSet], news: list[News]) -> float | None:
    """Score every set; the loss on the held-out documents, if there are some."""
    step, vocab = state.progress.step, state.data.first.vocab
    scores = {name: samples.score(state.model) for name, samples in sets.items()}
    if mean := mean_score(scores, state.data.weights):
        scores[HELD_OUT] = mean
    for name, score in scores.items():
        news += _about(step, name, score, vocab)
    if HELD_OUT not in scores:
        return None
    state.progress = state.progress.after_validation(scores[HELD_OUT].loss)
    return scores[HELD_OUT].loss


def sample(state: TrainState) -> list[News]:
    """What the model writes, if it is asked to and knows how. All ranks call it."""
    settings, tokenizer, separator = state.settings.validation, state.tokenizer, state.data.first.separator
    if tokenizer is None or separator is None:
        return []
    text = continue_text(state.model, tokenizer, separator, settings.sample, tokens=settings.sample_tokens)
    return [Event(step=state.progress.step, kind=EventKind.SAMPLE, text=text)]


def _about(step: int, name: str, score: Score, vocab: int) -> Iterator[News]:
    figures = dict(loss=score.loss, perplexity=score.perplexity)
    if score.bits_per_byte is not None:
        figures["bits_per_byte"] = score.bits_per_byte
    yield ValidationRecord(step, name, figures | dict(accuracy=score.accuracy))
    if suspicion := score.suspicion(vocab):
        yield Event(step=step, kind=EventKind.VALIDATION, text=f"{name}: {suspicion}", evidence=figures)
