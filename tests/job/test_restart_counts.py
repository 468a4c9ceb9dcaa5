"""What a run tells of restarts and of updates that were lost, however it ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.errors import Died, Interrupted, NotFinite, RunFailed
from trainer.job import restarts
from trainer.job.restarts import start_and_restart
from trainer.job.result import Result
from trainer.planning.launcher import Assignment, Supervision


def ready(folder: Path, most: int = 3) -> Any:
    config, plan = (
        SimpleNamespace(on_nonfinite="rewind", max_rewinds=3),
        SimpleNamespace(topology=SimpleNamespace(restarts=most), paths=SimpleNamespace(run_dir=str(folder))),
    )
    assignment = Assignment(None, plan)  # type: ignore[arg-type]
    return SimpleNamespace(plan=plan, assignment=assignment, checked=SimpleNamespace(config=config))


@pytest.mark.parametrize(
    "error",
    [
        None,
        RunFailed("a full disk"),
        Interrupted("got SIGTERM"),
        NotFinite("the loss is NaN", 9, 0, 8),
        Died("worker 0 died", "worker 0"),
    ],
)
def test_who_came_back_is_told_however_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    goes_on = isinstance(error, (NotFinite, Died))
    again = Assignment(None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(restarts, "_again", lambda *told: again)
    lives = []

    def start(assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
        deaths = supervision.deaths
        assert deaths is not None
        lives.append(deaths.count())
        deaths.returned.append(f"worker 1 died, {len(lives)}")
        if error is not None and len(lives) == 1:
            raise error
        return {"steps": 9}

    result = Result("failed", str(tmp_path))
    if error is None or goes_on:
        assert start_and_restart(start, ready(tmp_path), result, None) == {"steps": 9}
    else:
        with pytest.raises(type(error)):
            start_and_restart(start, ready(tmp_path), result, None)
    assert result.returned == [f"worker 1 died, {n + 1}" for n in range(len(lives))]
    assert result.restarts == len(lives) + isinstance(error, Died)


def test_a_process_that_died_too_often_is_told_with_those_that_came_back(tmp_path: Path) -> None:
    def start(assignment: Assignment, supervision: Supervision) -> dict[str, Any]:
        assert supervision.deaths is not None
        supervision.deaths.count()
        supervision.deaths.returned.append("worker 1 died")
        raise Died("server 0 died", "server 0")

    result = Result("failed", str(tmp_path))
    with pytest.raises(RunFailed, match="after 1 restart within an hour"):
        start_and_restart(start, ready(tmp_path, most=1), result, None)
    assert (result.restarts, result.returned) == (1, ["worker 1 died"])
