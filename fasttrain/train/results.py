"""Results of steps: read while the next step is already under way, so that the host never waits for the device."""

from collections.abc import Mapping

from fasttrain.flops import flops_per_token
from fasttrain.metrics.hardware import GpuSensors, used_memory
from fasttrain.metrics.record import StepRecord
from fasttrain.metrics.step_timer import PhaseTimes
from fasttrain.train.state import TrainState
from fasttrain.train.step import StepResult

BESIDE = ("validation", "checkpoint", "profile")  # phases that do not count as the step


class Results:
    """push() every step. Every rank reads the results, and therefore knows the same at the same step."""

    def __init__(self, state: TrainState, *, peak: float) -> None:
        """peak: FLOP/s of a device."""
        settings, runtime, vocab = state.settings, state.runtime, state.model.embedding.num_embeddings
        self._pending: tuple[StepResult, PhaseTimes, Mapping[str, float]] | None = None
        self._start, self._device = state.progress, runtime.device
        self._tokens = settings.batch.sequences * settings.data.sequence  # of a step
        self._flops = flops_per_token(settings.model, vocab, settings.data.sequence)
        self._peak, self._world_size = peak, runtime.world_size
        self._sensors = GpuSensors(runtime.device)

    def push(
        self, result: StepResult, phases: PhaseTimes, values: Mapping[str, float], *, wait: bool
    ) -> list[StepRecord]:
        """Take the result of a step; the record of the step before, and with `wait` of this one too.

        values: what else is logged of it.
        """
        records = self.flush()
        self._pending = (result, phases, values)
        return records + self.flush() if wait else records

    def flush(self) -> list[StepRecord]:
        """The record of the last step, if it has not been read."""
        pending, self._pending = self._pending, None
        return [] if pending is None else [self._read(*pending)]

    def drop(self) -> None:
        """Forget the last step: the run has rolled back."""
        self._pending = None

    def _read(self, result: StepResult, times: PhaseTimes, others: Mapping[str, float]) -> StepRecord:
        loss, norm, valid, stops, failed_saves, failed_reads, *block_norms = result.read()
        phases, sensors, memory = times.seconds(), self._sensors.read(), used_memory(self._device)
        own = {phase: time for phase, time in phases.items() if phase not in BESIDE}
        seconds = sum(own.values())
        speed = self._tokens / seconds
        tokens = self._start.tokens + (result.step - self._start.step) * self._tokens
        mfu = speed * self._flops / (self._peak * self._world_size)
        values = {
            "loss": loss,
            "grad_norm": norm,
            "lr": result.lr,
            **others,
            "tokens": tokens,
            "valid_tokens": 0 if failed_reads else int(valid),
            "tokens_per_second": speed,
            "mfu": mfu,
            "memory": memory,
            "step_seconds": seconds,
            **{f"time/{phase}": time for phase, time in phases.items()},
            **{f"gpu/{name}": value for name, value in sensors.items()},
            **{f"block_norm/{block:02}": norm for block, norm in enumerate(block_norms)},
        }
        return StepRecord(
            step=result.step, tokens=tokens, loss=loss, grad_norm=norm, block_norms=block_norms,
            stop_requested=stops > 0, save_failed=failed_saves == self._world_size, read_failed=failed_reads > 0,
            phases=phases, step_phases=own, sensors=sensors, mfu=mfu, memory=memory, values=values,
        )  # fmt: skip
