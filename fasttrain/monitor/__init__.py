"""The monitor of a run: spikes, sanity, slow-downs, MFU. It takes records of steps and returns events; it decides
nothing. docs/monitor.md explains all of it.
"""

from fasttrain.monitor.diagnosis import Diagnosis, diagnose
from fasttrain.monitor.mfu import MfuContext, MfuMonitor
from fasttrain.monitor.monitor import Monitor, make_monitor
from fasttrain.monitor.slowdown import SpeedMonitor

__all__ = ["Diagnosis", "MfuContext", "MfuMonitor", "Monitor", "SpeedMonitor", "diagnose", "make_monitor"]
