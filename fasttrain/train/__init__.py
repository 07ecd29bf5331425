"""Training: `python -m fasttrain.train`, or the same under torchrun."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    from fasttrain.train import loop

    return loop.main(argv)
