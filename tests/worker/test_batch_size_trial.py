"""A trial of data.batch_size=auto tells why memory was not enough."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.worker import batch_size_trial
from trainer.worker.batch_size_trial import TrialLimits, trial


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_why_memory_is_not_enough_is_told_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TrialLimits(None, 0, [], 1).leave(tmp_path)
    seat: Any = SimpleNamespace(device="cpu", rank=0)
    assignment: Any = SimpleNamespace(plan=SimpleNamespace(paths=SimpleNamespace(run_dir=str(tmp_path))))

    def not_enough(told: TrialLimits) -> None:
        raise MemoryError("no room for 3 tables")

    def cut(path: Path, text: str, **given: Any) -> None:
        path.touch()
        raise Killed

    monkeypatch.setattr(batch_size_trial, "_limited_host", not_enough)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut)
        with pytest.raises(Killed):
            trial(seat, assignment)
    assert not list(tmp_path.glob(batch_size_trial.TOO_LARGE.format("*")))
    with pytest.raises(MemoryError):
        trial(seat, assignment)
    [told] = tmp_path.glob(batch_size_trial.TOO_LARGE.format("*"))
    assert told.read_text() == "no room for 3 tables"
