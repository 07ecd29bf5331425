"""The training command for torchrun, in which rank 1 comes to harm before step 8, when it is first started.

FAULT=kill: it is killed. FAULT=stop: it is stopped, and answers nobody any more.
"""

import os
import signal
import sys

from fasttrain.train import main
from fasttrain.train import step as step_module

seed_step = step_module.seed_step


def come_to_harm(seed: int, step: int, dp_rank: int) -> None:
    if (dp_rank, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, 7, "0"):
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[os.environ["FAULT"]])
    seed_step(seed, step, dp_rank)


if __name__ == "__main__":
    step_module.seed_step = come_to_harm
    sys.exit(main())
