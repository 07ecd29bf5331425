"""What a run measures, writes and shows. docs/metrics.md explains the files and every figure."""

from fasttrain.metrics.hardware import GpuSensors, device_memory, device_name, measured_flops, peak_flops, used_memory
from fasttrain.metrics.jsonl import last_step, read_evaluations, read_events, read_metrics, read_validations
from fasttrain.metrics.logger import RunLogger
from fasttrain.metrics.record import Moved, News, Note, Rewind, StepRecord, ValidationRecord
from fasttrain.metrics.step_timer import PhaseTimes, StepTimer

__all__ = [
    "GpuSensors", "Moved", "News", "Note", "PhaseTimes", "Rewind", "RunLogger", "StepRecord", "StepTimer",
    "ValidationRecord", "device_memory", "device_name", "last_step", "measured_flops", "peak_flops",
    "read_evaluations", "read_events", "read_metrics", "read_validations", "used_memory",
]  # fmt: skip
