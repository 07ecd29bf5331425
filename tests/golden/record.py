"""Record the golden runs on this machine: python -m tests.golden.record

Only where bits are meant to change, in a commit that says so.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from fasttrain.metrics import hardware
from tests.golden.runs import RECORDED, RUNS, golden, key


def main() -> None:
    hardware._SECONDS = 0.0  # as in conftest.py
    recorded = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as directory:
            recorded[name] = golden(name, Path(directory))
    RECORDED.mkdir(exist_ok=True)
    path = RECORDED / f"{key()}.json"
    lines = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in recorded.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path)


if __name__ == "__main__":
    main()
