import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_every_rule_is_tested_by_hand_written_ptx():
    written = [str(path) for path in sorted(HERE.glob("test_*.py")) if path.stem not in ("test_context", "test_rules")]
    plugins = ["-p", "no:xdist", "-p", "no:cacheprovider", "-p", "tests.kernels.testing.executed.used_rules"]
    command = [sys.executable, "-m", "pytest", *plugins, *written]
    result = subprocess.run(command, cwd=HERE.parents[3], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "unused rule" not in result.stdout, result.stdout
