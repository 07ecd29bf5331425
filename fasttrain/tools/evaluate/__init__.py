"""How good a run is, on any data and by benchmark tasks. docs/eval.md explains the command and the figures."""

from fasttrain.tools.evaluate.record import record, set_line, task_lines
from fasttrain.tools.evaluate.sets import score_sets

__all__ = ["record", "score_sets", "set_line", "task_lines"]
