"""The training command, which forgets one average of its optimizer whenever it goes on from a checkpoint."""

import sys
from typing import Any

from torch import nn

from fasttrain import train
from fasttrain.train.loop import setup as run

restore = run.restore


def restore_badly(checkpoint: Any, model: nn.Module, optimizer: Any, *rest: Any, **options: Any) -> dict[str, Any]:
    facts = restore(checkpoint, model, optimizer, *rest, **options)
    optimizer.state[model.get_parameter("blocks.1.qkv.weight")]["exp_avg"].zero_()
    return facts


if __name__ == "__main__":
    run.restore = restore_badly
    sys.exit(train.main())
