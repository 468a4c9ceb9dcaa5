"""The simulator breaks no promise of the protocol, finds every defect that is put back, and plays a seed twice alike."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.run import simulate
from tests.simulation.scenario import FAULTS, MODES, Scenario
from tests.simulation.seeds import found_by, many, part

SEEDS = 500
PARTS = 6
MOST = 20_000
"""Seeds within which a defect has to be found."""
FOUND_AT: dict[str, int] = {}
"""A seed that finds it: tried first. If scenarios are drawn otherwise one day, the search begins at 0."""


@pytest.mark.parametrize("first", range(0, SEEDS * PARTS, SEEDS))
def test_no_promise_is_broken(first: int) -> None:
    _, injected, ends, broken = part(range(first, first + SEEDS), None, None)
    assert not broken, f"replay: python -m tests.simulation --seed {broken[0][0]}"
    assert {end.split()[0] for end in ends} == set(MODES)
    assert {*FAULTS} - {"kill server"} < {*injected}, "some faults were never injected"


@pytest.mark.parametrize("defect", MUTATIONS)
def test_defect_that_is_put_back_is_found(defect: str) -> None:
    known = FOUND_AT.get(defect)
    if known is None or not found_by(defect, range(known, known + 1)):
        assert found_by(defect, range(MOST)), f"{MOST} seeds do not find it"


def test_seed_is_played_twice_alike() -> None:
    for seed in range(20):
        one, other = (simulate(Scenario.drawn(seed), tracing=True) for _ in range(2))
        assert one.trace == other.trace and one.trace


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
def test_no_promise_is_broken_in_a_million_runs() -> None:
    assert many(0, 1_000_000, None, None, jobs=2) == 0
