"""Bounded staleness: a trace of real processes never shows a worker further ahead than it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategies.launching import Case, launched

STEPS = 30


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[tuple[str, float, int]]]]:
    """By bound, each of three workers' events; one of the workers is slow."""
    bounds = (0, 1, 4)
    overrides = (
        f"data.train_samples={12 * STEPS}",
        "data.global_batch_size=12",
        "data.work=static",
        "epochs=1",
        "max_steps=null",
        "scheduler.warmup_steps=0",
        "optimizer=sgd",
    )
    cases = {str(b): Case("traced", (*overrides, f"strategy.staleness={b}")) for b in bounds}
    results = launched("pserver_ssp", 3, cases, Path(tmp_path_factory.mktemp("ssp")))
    workers = [results["worker"][rank]["answers"] for rank in range(3)]
    return {b: [answers[number] for answers in workers] for number, b in enumerate(bounds)}


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_no_worker_is_further_ahead_than_the_bound_and_the_fast_ones_reach_it(traces: dict, bound: int) -> None:
    workers = traces[bound]
    assert all(len(events) == 2 * STEPS for events in workers)
    leads = []
    for rank, events in enumerate(workers):
        for what, now, done in events:
            if what != "begin":
                continue
            for other, others in enumerate(workers):
                others_done = sum(w == "end" and at <= now for w, at, _ in others)
                if other != rank and others_done < STEPS:  # one that has finished holds nobody up
                    leads.append(done - others_done)
    assert max(leads) == bound
