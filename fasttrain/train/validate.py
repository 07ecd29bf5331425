"""Validation between two steps: every set is scored, and the model continues a text."""

from collections.abc import Iterator

from fasttrain.events import Event, EventKind
from fasttrain.metrics import News, ValidationRecord
from fasttrain.tools.generate import continue_text
from fasttrain.tools.validation import HELD_OUT, Score, ValidationSet, mean_score
from fasttrain.train.state import TrainState


def validate(state: TrainState, sets: dict[str, ValidationSet], news: list[News]) -> float | None:
    """Score every set, and let the model write; the loss on the held-out documents, if there are some."""
    step, settings, vocab = state.progress.step, state.settings.validation, state.data.first.vocab
    scores = {name: samples.score(state.model) for name, samples in sets.items()}
    if mean := mean_score(scores, state.data.weights):
        scores[HELD_OUT] = mean
    for name, score in scores.items():
        news += _about(step, name, score, vocab)
    tokenizer, separator = state.data.tokenizer(), state.data.first.separator
    if settings.sample and tokenizer is not None and separator is not None:
        text = continue_text(state.model, tokenizer, separator, settings.sample, tokens=settings.sample_tokens)
        news.append(Event(step=step, kind=EventKind.SAMPLE, text=text))
    if HELD_OUT not in scores:
        return None
    state.progress = state.progress.after_validation(scores[HELD_OUT].loss)
    return scores[HELD_OUT].loss


def _about(step: int, name: str, score: Score, vocab: int) -> Iterator[News]:
    figures = dict(loss=score.loss, perplexity=score.perplexity)
    if score.bits_per_byte is not None:
        figures["bits_per_byte"] = score.bits_per_byte
    yield ValidationRecord(step, name, figures | dict(accuracy=score.accuracy))
    if suspicion := score.suspicion(vocab):
        yield Event(step=step, kind=EventKind.VALIDATION, text=f"{name}: {suspicion}", evidence=figures)
