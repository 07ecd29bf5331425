"""The training command, in which rank 1 is killed at step 7 when torchrun starts it for the first time."""

import os
import signal
import sys

from fasttrain import train

seed_step = train.seed_step


def die(seed: int, step: int, rank: int) -> None:
    if (rank, step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, 7, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    seed_step(seed, step, rank)


if __name__ == "__main__":
    train.seed_step = die
    sys.exit(train.main())
