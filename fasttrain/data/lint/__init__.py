"""What is wrong with a token stream, before a model learns it. docs/lint.md explains every check."""

from __future__ import annotations

from fasttrain.data.lint.findings import Example, Finding, Profile, Report
from fasttrain.data.lint.run import lint

__all__ = ["Example", "Finding", "Profile", "Report", "lint"]
