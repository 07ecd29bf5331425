"""1,000 SIGKILLs (make test-kills): runs that are killed up to 50 times at random moments, bitwise as without a kill.

    python -m tests.faults.many_kills [--kills 1000] [--out .kills]

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
    parser.add_argument("--kills", type=int, default=1000, help="at least so many, over runs of up to 50 each")
    parser.add_argument("--out", type=Path, default=Path(".kills"), help="continued if it is there")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rounds = [Round(**json.loads(file.read_text())) for file in sorted(asked.out.glob("round-*.json"))]
    while sum(done.kills for done in rounds) < asked.kills:
        name = f"round-{len(rounds):03}"
        rounds.append(_round(len(rounds), asked.out / name))
        (asked.out / f"{name}.json").write_text(json.dumps(dataclasses.asdict(rounds[-1])))
        print(_summary(rounds), flush=True)


def _round(seed: int, directory: Path) -> Round:
    shutil.rmtree(directory, ignore_errors=True)  # of a round that was itself interrupted
    directory.mkdir()
    begin = time.monotonic()
    done = kill_again_and_again(directory, seed, *OPTIONS[seed % len(OPTIONS)])
    print(f"round {seed}: {time.monotonic() - begin:.0f} s", flush=True)
    shutil.rmtree(directory)
    return done


def _summary(rounds: list[Round]) -> str:
    lost = [steps for done in rounds for steps in done.lost]
    in_a_save = sum(done.in_a_save for done in rounds)
    return (
        f"{len(lost):,} kills, {in_a_save:,} in a save: {len(rounds)} runs bitwise equal, all checkpoints valid, "
        f"lost at most {max(lost)} steps, {sum(lost) / len(lost):.1f} on average (a checkpoint every {EVERY})"
    )


if __name__ == "__main__":
    main()
