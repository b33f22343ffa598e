"""`python -m tests.fuzz`: many mutants, with what failed and how to see it again."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from tests.fuzz.fleet import Outcome, Tally, run_fleet
from tests.fuzz.mutants import make_mutant

_KEPT = Path("build/fuzz")


def main() -> int:
    """Runs what the command line asks for; 0 if there was no fault."""
    options = _parse()
    first = options.only if options.only is not None else options.first
    count = 1 if options.only is not None else options.num_mutants
    tally, start_s = Tally(), time.monotonic()
    jobs = min(options.jobs, count)
    for outcome in run_fleet(
        options.seed, range(first, first + count), jobs, options.native, max_faults=options.max_faults
    ):
        tally.add(outcome)
        if outcome.how == "fault" or options.only is not None:
            _report(options.seed, outcome)
    print(f"fuzz: seed {options.seed}, {tally}; {time.monotonic() - start_s:.0f} s")
    return 1 if tally.faults else 0


def _report(seed: int, outcome: Outcome) -> None:
    mutant = make_mutant(seed, outcome.number)
    folder = _KEPT / f"{seed}-{outcome.number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mutant.write(folder)
    print(f"fuzz: {outcome.how}: {mutant}".encode("utf-8", "backslashreplace").decode())
    print(f"    {outcome.fault}".encode("utf-8", "backslashreplace").decode())
    print(f"    files in {folder}; again with --seed {seed} --only {outcome.number}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test-fuzz", description=__doc__)
    parser.add_argument("--num-mutants", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--only", type=int, default=None, metavar="NUMBER", help="run this one and keep its files")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--max-faults", type=int, default=20, help="stop after so many")
    parser.add_argument("--native", default="", help="the compiled module to test instead of the installed one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
