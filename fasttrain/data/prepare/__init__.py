"""Files of text become a dataset. docs/prepare.md explains what is read, what is dropped, and what is written."""

from fasttrain.data.prepare.preparation import PreparationProgress, Prepared, prepare

__all__ = ["PreparationProgress", "Prepared", "prepare"]
