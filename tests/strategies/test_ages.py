"""Old rows leave the servers when workers meet: what is left of an epoch in order is what its last batches have
touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategies.clicks import ROWS, clicks
from tests.strategies.launching import Case, hand_over, start
from tests.strategies.test_tables import BASE

BATCH, SAMPLES = 4, 40
EPOCH = (
    f"data.train_samples={SAMPLES}",
    f"data.global_batch_size={BATCH}",
    "sampler=sequential",
    "data.work=static",
    "data=timed_clicks",
    "optimizer=adagrad",
)
AGES = {
    "steps": ("strategy.evict_after=2",),
    "event_time": ("strategy.evict_by=event_time", "strategy.evict_after=550"),
    "never": (),
}
LAST = {"steps": 3, "event_time": 2, "never": SAMPLES // BATCH}
"""Batches that have touched rows within that age: one lasts a step; of the data's own time 400, and workers are 100
apart."""
MODES = {"pserver_sync": (2, ()), "pserver_async": (1, ()), "pserver_ssp": (2, ("strategy.staleness=0",))}


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_left_are_those_of_the_last_batches(mode: str, tmp_path: Path) -> None:
    workers, options = MODES[mode]
    cases = {by: Case("aged", (*EPOCH, *options, *age), base=BASE) for by, age in AGES.items()}
    handed = hand_over(mode, workers, cases)
    for by, one in zip(cases, handed, strict=True):
        one["payload"]["plan"]["paths"]["run_dir"] = str(tmp_path / by)
    first = start(handed, tmp_path)["worker"][0]["answers"]
    inputs, _ = clicks(SAMPLES, 1)
    for by, found in zip(cases, first, strict=True):
        ids, bag = (inputs[name][SAMPLES - LAST[by] * BATCH :] for name in ("ids", "bag"))
        made = set(ids.ravel().tolist()) | set(((ids[:, 0] + 7) % ROWS).tolist())
        everything = set(range(ROWS))  # torch's own tables come whole
        assert set(found["rows"]) == set(ids.ravel().tolist()), by
        assert set(found["plain"]) == (everything if by == "never" else made), by
        assert set(found["bag"]) == (everything if by == "never" else set(bag.ravel().tolist())), by
        assert by == "never" or len(found["bag"]) < ROWS
