"""python -m tests.simulation --seeds FROM:TO [--mode M] [--mutation NAME] [--jobs N], or --seed N with its trace."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.seeds import many, one


def main() -> int:
    """Play seeds; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:1000", help="FROM:TO, TO excluded")
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    parser.add_argument("--mode", choices=("sync", "async", "ssp", "geo"), help="instead of the drawn one")
    parser.add_argument("--mutation", help="with this defect put back; 'list' names them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--whole-trace", action="store_true")
    told = parser.parse_args()
    from tests.simulation.mutations import MUTATIONS

    if told.mutation == "list":
        print(*MUTATIONS, sep="\n")
        return 0
    if told.seed is not None:
        lines, broken = one(told.seed, told.mode, told.mutation, told.whole_trace)
        print(*lines, sep="\n")
        return bool(broken)
    first, last = (int(n) for n in told.seeds.split(":"))
    return many(first, last, told.mode, told.mutation, told.jobs)


if __name__ == "__main__":
    sys.exit(main())
