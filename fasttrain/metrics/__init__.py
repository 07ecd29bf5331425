"""What a run measures, records and shows. docs/metrics.md explains the files and every figure."""

from fasttrain.metrics.display import Display
from fasttrain.metrics.hardware import peak_flops, used_memory
from fasttrain.metrics.jsonl import read_metrics, read_validations
from fasttrain.metrics.record import Recorder
from fasttrain.metrics.sensors import GpuSensors
from fasttrain.metrics.stopwatch import Lap, Stopwatch

__all__ = [
    "Display",
    "GpuSensors",
    "Lap",
    "Recorder",
    "Stopwatch",
    "peak_flops",
    "read_metrics",
    "read_validations",
    "used_memory",
]
