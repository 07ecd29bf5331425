"""A run's curves on Weights & Biases. RUN/wandb.json holds the id, so that a resumed run continues there.

W&B's own steps only go up, and it drops what is logged for an earlier one. A resumed run goes back to its checkpoint.
So "step" is logged as a value like the others, and is the x axis of all of them.
"""

import importlib
import json
import tomllib
from collections.abc import Mapping
from typing import Any

from fasttrain.events import Event
from fasttrain.rundir import RunDir


class WeightsAndBiases:
    """The sink of a W&B project. WANDB_MODE=offline and the other variables of W&B work as ever."""

    def __init__(self, run: RunDir, project: str, *, config_toml: str) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ImportError(
                f"log.wandb is {project!r}, and wandb is not installed: pip install 'fasttrain[wandb]', "
                'or set log.wandb to ""'
            ) from error
        try:
            self._run: Any = wandb.init(
                project=project,
                name=run.path.name,
                dir=str(run.path),
                id=_stored_id(run, project),
                resume="allow",
                config=tomllib.loads(config_toml),
                allow_val_change=True,  # a run may be resumed with changed settings
            )
        except Exception as error:  # no key, no network, no such project: the user's to fix
            raise ValueError(
                f"log.wandb is {project!r}, and could not start W&B: {error}; wandb login, or WANDB_MODE=offline and "
                'wandb sync later, or set log.wandb to ""'
            ) from error
        run.wandb.write_text(json.dumps({"project": project, "id": self._run.id}) + "\n")
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def validation(self, step: int, name: str, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{f"validation/{name}/{key}": value for key, value in values.items()}})

    def event(self, event: Event) -> None:
        action = f"; {event.action}" if event.action else ""
        self._run.alert(title=f"{event.kind} at step {event.step}", text=f"{event.text}{action}")

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def _stored_id(run: RunDir, project: str) -> str | None:
    """None: a new id. That of another project means nothing in this one."""
    try:
        stored = json.loads(run.wandb.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return stored["id"] if stored["project"] == project else None
