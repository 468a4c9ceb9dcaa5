"""How busy a host was: every measurement is over a time, the first one too."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trainer.worker import host_monitor


def test_the_first_measurement_of_the_processor_has_something_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[int] = set()

    def cpu_percent() -> float:
        """As psutil does: the first call of each thread answers 0."""
        before = threading.get_ident() in called
        called.add(threading.get_ident())
        return 50.0 if before else 0.0

    told: list[dict[str, float]] = []
    enough = threading.Event()

    class Report:
        def system(self, node: int, time_ms: int, metrics: dict[str, float]) -> None:
            told.append(metrics)
            if len(told) >= 3:
                enough.set()

    monkeypatch.setattr(host_monitor.psutil, "cpu_percent", cpu_percent)
    report: Any = Report()
    with host_monitor.watched(0, 1, None, report, 0.001):
        assert enough.wait(60)
    assert len(told) >= 3 and {metrics["cpu_percent"] for metrics in told} == {50.0}
