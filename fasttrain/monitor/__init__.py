"""The monitor of a run: spikes, sanity, slow-downs, MFU. It takes records of steps and returns events; it decides
nothing. docs/monitor.md explains all of it.
"""

from fasttrain.monitor.diagnosis import diagnose
from fasttrain.monitor.monitor import Monitor, make_monitor

__all__ = ["Monitor", "diagnose", "make_monitor"]
