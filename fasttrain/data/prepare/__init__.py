"""Files of text become a dataset. docs/prepare.md explains what is read, what is left out, and what is written."""

from fasttrain.data.prepare.preparation import Prepared, Progress, prepare
from fasttrain.data.prepare.settings import Settings

__all__ = ["Prepared", "Progress", "Settings", "prepare"]
