"""python -m tests.kernels.numbers.table [--seeds N] [--case TEXT]: the measured errors, in units of eager's."""

import argparse
import time

from fasttrain_kernels.testing import compare_over_seeds, interpret
from tests.kernels.numbers.cases import CASES, DTYPES

parser = argparse.ArgumentParser()
parser.add_argument("--seeds", type=int)
parser.add_argument("--case", default="")
options = parser.parse_args()
print(
    "Root mean square and geometric mean; 2 is the limit. Alone: seeds out of tolerance by themselves, and the worst."
)
for name, case in CASES.items():
    if options.case not in name:
        continue
    for label, dtype in DTYPES.items():
        start = time.process_time()
        with interpret():
            arguments = case.arguments(dtype)
            if options.seeds:
                arguments["seeds"] = range(options.seeds)
            found = compare_over_seeds(case.op, **arguments)
        ratios = " ".join(f"{c.name.replace('output ', 'out')} {c.ratio:.2f} {c.typical:.2f}" for c in found)
        alone = (
            f"alone {max(c.failed_seeds for c in found)} of {found[0].seeds} ({max(c.worst_seed for c in found):.2g})"
        )
        wrong = "" if all(c.ok for c in found) else "  FAILED"
        print(f"{name}, {label}: {ratios}; {alone}; {time.process_time() - start:.1f} s{wrong}", flush=True)
