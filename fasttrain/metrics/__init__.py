"""What a run measures, records and shows. docs/metrics.md explains the files and every figure."""

from fasttrain.metrics.display import Display
from fasttrain.metrics.hardware import device_memory, device_name, measured_flops, peak_flops, used_memory
from fasttrain.metrics.jsonl import Event, last_step, read_evaluations, read_incidents, read_metrics, read_validations
from fasttrain.metrics.logger import Recorder
from fasttrain.metrics.sensors import GpuSensors
from fasttrain.metrics.step_timer import Lap, Stopwatch

__all__ = [
    "Display",
    "Event",
    "GpuSensors",
    "Lap",
    "Recorder",
    "Stopwatch",
    "device_memory",
    "device_name",
    "last_step",
    "measured_flops",
    "peak_flops",
    "read_evaluations",
    "read_incidents",
    "read_metrics",
    "read_validations",
    "used_memory",
]
