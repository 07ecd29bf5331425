"""The training command, which forgets one moment of its optimizer whenever it resumes from a checkpoint."""

import sys
from typing import Any

from torch import nn

from fasttrain import train
from fasttrain.train import setup as run

restore = run.restore  # type: ignore[attr-defined]


def restore_badly(checkpoint: Any, model: nn.Module, optimizer: Any, *rest: Any, **options: Any) -> dict[str, Any]:
    metadata = restore(checkpoint, model, optimizer, *rest, **options)
    optimizer.state[model.get_parameter("blocks.1.qkv.weight")]["exp_avg"].zero_()
    return metadata


if __name__ == "__main__":
    run.restore = restore_badly  # type: ignore[assignment, attr-defined]
    sys.exit(train.main())
