"""A run as a model of lm-evaluation-harness.

Texts begin with the separator, as the documents of training did. Those that are scored together are packed one after
the other, as documents that do not see each other: nothing is padded, and no logits exist, only the loss of each token
and whether it was the likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fasttrain.data.batches import IGNORED
from fasttrain.grouping import grouped
from fasttrain.tools.generate import Sampling, generate
from fasttrain.tools.trained_model import TrainedModel

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        f"--tasks needs lm-evaluation-harness ({error}); install it: pip install 'fasttrain[eval]'"
    ) from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Pair = tuple[list[int], list[int]]  # context, not empty, and continuation


class Harness(TemplateLM):
    """The model that tasks ask."""

    def __init__(self, loaded: TrainedModel, *, batch: int) -> None:
        super().__init__()
        if loaded.separator is None:
            raise ValueError(
                f"--tasks: {loaded.data.first.path} has no separator, with which texts begin; train on data that does"
            )
        self._model, self._separator, self._batch = loaded.model, loaded.separator, batch
        self._words = loaded.tokenizer()
        self._vocab = self._words.get_vocab_size()

    @property
    def eot_token_id(self) -> int:
        return self._separator

    @property
    def max_gen_toks(self) -> int:
        """Where a task does not say."""
        return max(self._model.sequence // 2, 1)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._words.encode(string, add_special_tokens=False).ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        begin = self._separator
        pairs = [(ids if ids[:1] == [begin] else [begin, *ids], continuation) for _, ids, continuation in requests]
        return self._scores(pairs)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[list[Pair]] = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self._separator, self._model.sequence, 1)
            windows.append([*map(make_disjoint_window, rolling)])
        scores = iter(self._scores([*chain(*windows)]))
        return [math.fsum(next(scores)[0] for _ in pairs) for pairs in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        made: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)  # of the same options
        for numbers in groups.values():
            for first in range(0, len(numbers), self._batch):
                some = numbers[first : first + self._batch]
                texts = self._continued([requests[i].args[0] for i in some], requests[some[0]].args[1])
                made.update(zip(some, texts, strict=True))
        return [made[number] for number in range(len(requests))]

    def _continued(self, contexts: Sequence[str], asked: dict[str, Any]) -> list[str]:
        options = normalize_gen_kwargs(asked, self.max_gen_toks)
        tokens = min(options["max_gen_toks"], self._model.sequence - 2)
        room = self._model.sequence - tokens - 1  # of a long context the end
        prompts = [[self._separator, *self.tok_encode(context)[-room:]] for context in contexts]
        sampling = Sampling(
            temperature=options.get("temperature", 0.0), top_k=options.get("top_k", 0), top_p=options.get("top_p", 1.0)
        )
        stops = [stop for stop in options["until"] if stop]
        for texts in generate(
            self._model, prompts, tokens=tokens, sampling=sampling, end=self._separator, vocab=self._vocab
        ):
            for text in texts:
                if not text.ended and any(stop in self._words.decode(text.ids) for stop in stops):
                    text.ended = "stop"
        made = [self._words.decode(text.ids) for text in texts]
        return [min((text.split(stop)[0] for stop in stops), key=len, default=text) for text in made]

    def _scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it would be the greedy one."""
        T = self._model.sequence
        # The end of what is too long for the model; of a continuation that is, too
        short = [(ids, continuation[-T:]) for ids, continuation in pairs]
        fitting = [(ids[-(T + 1 - len(continuation)) :], continuation) for ids, continuation in short]
        return [score for pack in grouped(fitting, _inputs_of, self._batch * T) for score in self._pack_scores(pack)]

    def _pack_scores(self, pack: Sequence[Pair]) -> Iterator[tuple[float, bool]]:
        inputs = [(context + continuation)[:-1] for context, continuation in pack]
        targets = [[IGNORED] * (len(context) - 1) + continuation for context, continuation in pack]
        lengths = [len(ids) for ids in inputs]
        tensors = (
            torch.tensor([[*chain(*inputs)]]),
            torch.tensor([[*chain(*targets)]]),
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            torch.cat([torch.arange(length) for length in lengths])[None],
        )
        tokens, answers, cu_seqlens, positions = (x.to(self._model.cos.device) for x in tensors)
        stats = self._model.stats(tokens, answers, cu_seqlens, positions, max(lengths))
        losses, hits = (x[0].double().cpu().split(lengths) for x in (stats.loss, stats.correct))
        for (context, _), loss, hit in zip(pack, losses, hits, strict=True):
            scored = slice(len(context) - 1, None)
            yield -float(loss[scored].sum()), bool(hit[scored].all())


def run_tasks(
    harness: Harness,
    tasks: Sequence[str],
    *,
    fewshot: int | None,  # examples before each question; None: as the task has it
    limit: int | None,  # questions of each task; None: all
    include: Path | None,  # a directory with tasks of one's own
) -> dict[str, Any]:
    """The results of lm-evaluation-harness."""
    options = dict(num_fewshot=fewshot, limit=limit, log_samples=False)
    results = lm_eval.simple_evaluate(harness, tasks=list(tasks), task_manager=_manager(tasks, include), **options)
    assert results is not None  # on the first rank
    return dict(results)


def _manager(tasks: Sequence[str], include: Path | None) -> TaskManager:
    """A manager of the tasks in a directory if it has all; otherwise of the thousands of the harness too."""
    for include_defaults in (False, True) if include else (True,):
        manager = TaskManager(include_path=include and str(include), include_defaults=include_defaults)
        unknown = [task for task in tasks if not manager.match_tasks([task])]
        if not unknown:
            return manager
    raise ValueError(
        f"--tasks: lm-evaluation-harness {lm_eval.__version__} has no {', '.join(unknown)}; lm-eval ls tasks lists "
        "what it has, --include-path adds a directory of your own"
    )


def _inputs_of(pair: Pair) -> int:
    """Tokens that the model reads of it."""
    return len(pair[0]) + len(pair[1]) - 1
