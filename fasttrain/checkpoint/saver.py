"""Saving while training continues.

    save():    wait for the former save, copy the state to host memory, return
    a thread:  free disk space, write under a hidden name, compare the disk with what was meant, write checkpoint.json,
               rename, prune
    poll():    the outcome

Each step of the thread ends with an exchange between the threads of all ranks (fasttrain.distributed.collectives), over
a process group that nothing else uses: collectives of two threads on one group would meet each other. Thus a save
succeeds on all ranks or fails on all, and nobody waits for a rank whose disk is full. A failed save deletes its own
directory. Apart from that, nothing is deleted before the new checkpoint is committed except what had to make space.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fasttrain import config
from fasttrain.checkpoint import retention
from fasttrain.checkpoint.committed import Checkpoint, committed_paths, directory_name, list_checkpoints
from fasttrain.checkpoint.disk_space import before_save, may_go
from fasttrain.checkpoint.state import captured, local, not_finite, scale_of
from fasttrain.checkpoint.writer import write
from fasttrain.distributed.collectives import RanksFailed, Reason, on_all, on_main, rank_in, text_of
from fasttrain.fs import is_in_place, sync
from fasttrain.rundir import RunDir


class Staging:
    """Buffers for one state. They are kept from save to save, since pinning memory takes longer than copying to it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state as it is now; valid until the next copy. Every tensor is copied once."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in state.items()}
        for name, tensor in state.items():
            local(self._buffers[name]).copy_(local(tensor), non_blocking=True)
        if any(tensor.device.type != "cpu" for tensor in state.values()):
            torch.accelerator.synchronize()  # the caller is about to change what is being copied
        return self._buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        former = self._buffers.get(name)
        if former is not None and _layout(former) == _layout(tensor):
            return former
        # Of a DTensor, this is a DTensor: the mesh may be one of GPUs while the shard is in host memory
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda", requires_grad=False)


def _layout(tensor: Any) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.dtype, local(tensor).shape, getattr(tensor, "placements", None)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint was committed."""

    step: int
    path: Path
    seconds: float  # from the call to the commit
    bytes: int
    trouble: str  # why an old checkpoint could not be deleted; empty: none
    pruned: tuple[str, ...] = ()  # names of those that had to go beforehand, to make disk space


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A save failed. The newest checkpoint that there was is still there, and all that retention keeps."""

    step: int
    error: str  # names the ranks and what happened to them
    is_final: bool = False  # no retry can succeed: weights are not finite
    pruned: tuple[str, ...] = ()  # as in Saved


Outcome = Saved | Failed


class Checkpoints:
    """The checkpoints of a running run. All ranks call every method alike, except poll.

    A directory has one Checkpoints at a time: the caller makes sure that no other process trains the same run, because
    what looks like the leftovers of a killed one is deleted here.
    """

    def __init__(
        self,
        directory: Path,
        settings: config.CheckpointConfig,
        *,
        group: dist.ProcessGroup,
        lock: Path | None = None,  # of the run, held by rank 0: a save fails once another file has its name
    ) -> None:
        self._directory, self._settings, self._group, self._lock = directory, settings, group, lock
        self._staging = Staging()
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # not a daemon: a process that ends first finishes its save
        self._running: Future[None] | None = None
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._ran_out = False  # the last save found no space where the file system had promised it
        on_main(group, self._prepare_directory)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        *,
        step: int,  # steps done
        metadata: dict[str, Any],  # whatever JSON can say; rank 0's are saved
        loss: float | None,  # of validation at this step
    ) -> None:
        """Save the state as it is at this moment. Errors of writing are an outcome; poll for it."""
        start = time.monotonic()
        self.wait()
        content = Checkpoint(
            path=self._directory,
            step=step,
            loss=loss,
            optimizer=type(optimizer).__name__,
            scaler=scale_of(scaler),
            metadata=json.loads(json.dumps(metadata)),  # as they are now; what JSON cannot say is an error here
            files=(),
        )
        state: Future[dict[str, Tensor]] = Future()
        try:
            own = captured(model, optimizer)
            state.set_result(self._staging.copy(own) if self._settings.background else own)
        except Exception as error:  # a rank that cannot copy its state has to tell the others, in the thread
            state.set_exception(error)
        if self._settings.background:
            self._running = self._thread.submit(self._save, content, state, start)
        else:
            self._save(content, state, start)

    def is_displaced(self) -> bool:
        """Whether the run's directory is no longer where it was. All ranks ask, while no save is running."""
        return on_main(self._group, lambda: self._lock is not None and not is_in_place(self._lock))

    def move(self) -> RunDir:
        """Save to a directory beside that of the run, where nothing is yet, from now on. All ranks call it."""
        moved = on_main(self._group, RunDir(self._directory.parent).free_sibling)
        self._directory, self._lock = moved.checkpoints, None
        return moved

    def poll(self) -> list[Outcome]:
        """What has become of saves since the last call. Ranks may be told at different steps, a moment apart."""
        return [self._outcomes.get() for _ in range(self._outcomes.qsize())]

    def wait(self) -> None:
        """Until no save is running: the group may then be used for newest_valid, restore and quarantine."""
        if self._running:
            self._running.result()
        self._running = None

    def close(self) -> list[Outcome]:
        """Wait for the last save; what poll has not told yet."""
        self.wait()
        self._thread.shutdown()
        self._staging = Staging()
        return self.poll()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        retention.clear_leftovers(self._directory)

    def _save(self, content: Checkpoint, state: Future[dict[str, Tensor]], start: float) -> None:
        """In the thread. Whatever happens becomes an outcome."""
        partial: Path | None = None
        pruned: tuple[str, ...] = ()
        bad: list[str] = []
        try:
            # A rank without a state says so now, before the others wait for its share of the writing
            found = on_all(self._group, lambda: not_finite(state.result()))
            bad = [name for names in found for name in names]
            if bad:
                raise Reason(
                    f"{bad[0]} has values that are not finite; resume from the last checkpoint, with a "
                    "lower optim.lr, or with monitor.spike rollback"
                )
            pruned = on_main(self._group, lambda: self._free_space(state.result(), content.step))
            partial = on_main(self._group, lambda: self._new_directory(content.step))
            written = on_all(self._group, lambda: write(state.result(), partial, self._group))
            files = tuple(file for theirs in written for file in theirs)
            content = replace(content, path=partial, files=files)
            path, trouble = on_main(self._group, lambda: self._commit(content))
        except BaseException as error:  # nobody looks at an exception in a thread
            if partial and rank_in(self._group) == 0:
                shutil.rmtree(partial, ignore_errors=True)
            text = str(error) if isinstance(error, RanksFailed) else text_of(error)
            no_space = any(f"[Errno {number}]" in text for number in (errno.ENOSPC, errno.EDQUOT))
            self._ran_out = no_space and partial is not None
            self._outcomes.put(Failed(step=content.step, error=text, is_final=bool(bad), pruned=pruned))
            return
        self._ran_out = False
        seconds = time.monotonic() - start
        self._outcomes.put(
            Saved(step=content.step, path=path, seconds=seconds, bytes=content.bytes, trouble=trouble, pruned=pruned)
        )

    def _free_space(self, state: dict[str, Tensor], step: int) -> tuple[str, ...]:
        """On rank 0: delete what may go, if there is no disk space otherwise; the names."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())  # of DTensors, the whole
        space = before_save(self._directory, self._settings, size=size, step=step)
        if space.state == "not enough":
            raise OSError(errno.ENOSPC, f"no disk space for the checkpoint: {space}")
        going = may_go(self._directory, self._settings, step=step) if self._ran_out else space.prune
        for path in going:
            retention.delete(path)
        return tuple(path.name for path in going)

    def _new_directory(self, step: int) -> Path:
        self._check_place()
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = retention.hidden(self._directory / f"step-{step:08}", retention.PARTIAL)
        partial.mkdir()
        return partial

    def _check_place(self) -> None:
        if self._lock and not is_in_place(self._lock):
            raise Reason(f"{self._lock.parent} is not the directory that the run was started in")

    def _commit(self, content: Checkpoint) -> tuple[Path, str]:
        """On rank 0. The rename is the moment from which the checkpoint exists."""
        for path in (content.path / file.name for file in content.files):
            if not path.exists():
                raise FileNotFoundError(
                    f"{path} was written by another rank, and rank 0 does not see it; a run's directory has to be on a "
                    "file system that all nodes share"
                )
        content.write()
        sync(content.path)
        self._check_place()
        path = self._directory / directory_name(content.step, committed_paths(self._directory))
        os.rename(content.path, path)
        sync(self._directory)
        return path, self._prune(path)

    def _prune(self, newest: Path) -> str:
        """What went wrong; the new checkpoint is committed all the same."""
        checkpoints = list_checkpoints(self._directory)
        checkpoints.sort(key=lambda checkpoint: checkpoint.path == newest)  # stable: the others stay by step
        if not checkpoints or checkpoints[-1].path != newest:
            return f"{newest} cannot be read again, so nothing was deleted"
        troubles = []
        for checkpoint in retention.expendable(checkpoints, self._settings):
            try:
                retention.delete(checkpoint.path)
            except OSError as error:
                troubles.append(f"{checkpoint.path} could not be deleted ({text_of(error)})")
        return "; ".join(troubles)
