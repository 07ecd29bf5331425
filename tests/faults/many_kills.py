"""1,000 SIGKILLs (make test-kills): twenty runs, each killed 50 times at random moments, bitwise as without a kill.

    python -m tests.faults.many_kills [--rounds 20] [--out .kills]

Takes about an hour. What was done stays in --out: started again, it continues with the next round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from pathlib import Path

from tests.faults.test_kills import EVERY, Round, kill_again_and_again

OPTIONS = (
    ["--optim.kind", "adamw"],
    ["--optim.kind", "muon"],
    ["--checkpoint.background", "False"],
    ["--optim.kind", "muon", "--data.document_mask", "False"],
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="of 50 kills each")
    parser.add_argument("--out", type=Path, default=Path(".kills"), help="continued if it is there")
    asked = parser.parse_args()
    for seed in range(asked.rounds):
        kept = asked.out / f"round-{seed:03}.json"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(dataclasses.asdict(_round(seed, asked.out / f"round-{seed:03}"))))
        print(f"{(seed + 1) * 50:,} kills: {_summary(asked.out)}", flush=True)


def _round(seed: int, directory: Path) -> Round:
    shutil.rmtree(directory, ignore_errors=True)  # of a round that was itself interrupted
    directory.mkdir()
    begin = time.monotonic()
    done = kill_again_and_again(directory, seed, *OPTIONS[seed % len(OPTIONS)])
    print(f"round {seed}: {time.monotonic() - begin:.0f} s", flush=True)
    shutil.rmtree(directory)
    return done


def _summary(out: Path) -> str:
    rounds = [Round(**json.loads(file.read_text())) for file in sorted(out.glob("round-*.json"))]
    lost = [steps for done in rounds for steps in done.lost]
    in_a_save = sum(done.in_a_save for done in rounds)
    return (
        f"{len(rounds)} runs bitwise equal, all checkpoints valid, {in_a_save} of {len(lost):,} kills in a save, "
        f"lost at most {max(lost)} steps, {sum(lost) / len(lost):.1f} on average (a checkpoint every {EVERY})"
    )


if __name__ == "__main__":
    main()
