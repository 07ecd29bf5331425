"""Checkpoints: the state of a run on disk, verified before it counts. docs/checkpoints.md explains files and calls."""
