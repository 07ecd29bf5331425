"""What is wrong with a token stream, before a model learns it. docs/lint.md explains every check."""

from fasttrain.data.lint.checks import lint
from fasttrain.data.lint.findings import Example, LintFinding, LintReport, Profile

__all__ = ["Example", "LintFinding", "LintReport", "Profile", "lint"]
