"""What ranks do together succeeds on all of them or fails on all of them.

A rank that fails alone leaves the others waiting for it in their next collective, until a time-out that names nobody.
So each call ends with one exchange, in which a rank brings its result or its error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # imported when there are ranks: commands that only look at checkpoints do without
    import torch.distributed as dist
    from torch import Tensor

T = TypeVar("T")


class RanksFailed(Exception):
    """Work failed on these ranks, for these reasons; the same on every rank."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(failures.items())))
        self.failures = failures


class Reason(Exception):
    """Another error's text, which can be sent to any rank; not every error can."""


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's rank; None is a group of this process alone."""
    return 0 if group is None else group.rank()


def on_all(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """The results of work() on all ranks, in their order; RanksFailed, on every rank, if it failed on any."""
    result: T | None = None
    failures: dict[int, str] = {}
    try:
        result = work()
    except Exception as error:
        failures = {rank_in(group): text_of(error)}
    except BaseException as error:
        failures = _failures_of(error)
    everyone = _exchange(group, (result, failures))
    failures = {rank: cause for _, theirs in everyone for rank, cause in theirs.items()}
    if failures:
        raise RanksFailed(failures)
    return [result for result, _ in everyone]


def on_main(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """The result of work() on rank 0, on all ranks."""
    result = on_all(group, lambda: work() if rank_in(group) == 0 else None)[0]
    return result  # type: ignore[return-value]


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """In place; the host does not wait for a device."""
    import torch.distributed as dist

    if group.size() > 1:
        dist.all_reduce(tensor, group=group)


def text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, Reason) else f"{type(error).__name__}: {error}"


def _failures_of(error: BaseException) -> dict[int, str]:
    """Of torch's CheckpointException, which is no Exception and which every rank gets, with the errors of all."""
    from torch.distributed.checkpoint.api import CheckpointException

    if not isinstance(error, CheckpointException):
        raise error
    for cause, _ in error.failures.values():
        if isinstance(cause, KeyboardInterrupt | SystemExit):  # Ctrl-C is no corruption
            raise cause from None
    return {rank: text_of(cause) for rank, (cause, _) in error.failures.items()}


def _exchange(group: dist.ProcessGroup | None, mine: Any) -> list[Any]:
    if group is None:
        return [mine]
    import torch.distributed as dist

    everyone = [None] * group.size()
    try:
        dist.all_gather_object(everyone, mine, group=group)
    except Exception as error:
        own = mine[1].get(group.rank())
        raise RanksFailed({group.rank(): own or f"no answer from another rank ({text_of(error)})"}) from error
    return everyone
