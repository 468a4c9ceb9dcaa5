"""python -m tests.simulation --seeds FROM:TO [--mode M] [--mutation NAME] [--jobs N], or --seed N with its trace."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.seeds import many, one
from trainer.terminal import streams


def seeds(told: str) -> range:
    """FROM:TO."""
    first, last = map(int, told.split(":"))
    return range(first, last)


def main() -> int:
    """Play seeds; 1 if a promise was broken, 2 if what was asked for cannot be played."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=seeds, default="0:1000", help="FROM:TO, TO excluded")
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    parser.add_argument("--mode", choices=("sync", "async", "ssp", "geo"), help="instead of the drawn one")
    parser.add_argument("--mutation", help="with this defect put back; 'list' names them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--whole-trace", action="store_true")
    told = parser.parse_args()
    try:
        from tests.simulation.mutations import MUTATIONS
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed: make install-dev installs what the simulation needs")
    if told.mutation not in (None, "list", *MUTATIONS):
        parser.error(f"there is no mutation {told.mutation}: --mutation list names them")
    if told.mutation == "list":
        print(*MUTATIONS, sep="\n")
        return 0
    if told.seed is not None:
        lines, broken = one(told.seed, told.mode, told.mutation, told.whole_trace)
        print(*lines, sep="\n")
        return bool(broken)
    return many(told.seeds.start, told.seeds.stop, told.mode, told.mutation, told.jobs)


if __name__ == "__main__":
    with streams.guarded():  # a reader may leave, as head does
        code = main()
    sys.exit(code)
