"""What a run looks out for: spikes, slow-downs, defects. docs/watch.md explains all of it.

Everything here only judges. Each judge takes the figures of a step, says what is new, and leaves acting to the trainer:

judges = Judges(settings, vocab=vocab)
for incident in judges.observe(step, tokens, loss, norm):   # every step: the same on every rank
    ...
if judges.alarm:
    ...
"""

from fasttrain.monitor.exchange import EVERY, Exchange, Medians, probe, slowest
from fasttrain.monitor.mfu import LOW, Cause, Facts, Utilisation, explain
from fasttrain.monitor.monitor import Alarm, Incident, Judges
from fasttrain.monitor.sanity import Blocks, Envelope, Outside, SickBlock, first_loss_suspicion
from fasttrain.monitor.slowdown import WAIT, Slowdown, SlowdownDetector
from fasttrain.monitor.speed import Speed
from fasttrain.monitor.spikes import SpikeDetector, Verdict

__all__ = [
    "EVERY",
    "LOW",
    "WAIT",
    "Alarm",
    "Blocks",
    "Cause",
    "Envelope",
    "Exchange",
    "Facts",
    "Incident",
    "Judges",
    "Medians",
    "Outside",
    "SickBlock",
    "Slowdown",
    "SlowdownDetector",
    "Speed",
    "SpikeDetector",
    "Utilisation",
    "Verdict",
    "explain",
    "first_loss_suspicion",
    "probe",
    "slowest",
]
