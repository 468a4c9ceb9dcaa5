"""How busy a host was: every measurement is over a time, the first one too."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.host.pretended_driver import Card, Library, install, torch_shows
from trainer.host import ask_torch, hardware
from trainer.host.nvml import Load
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


def test_gpus_have_numbers_in_cudas_order_and_what_a_card_does_not_say_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "gpu_loads", lambda: [Load(None, 12.0), Load(37.0, 1024.0)])
    measured = host_monitor._measured()
    assert {name: value for name, value in measured.items() if name.startswith("gpu")} == {
        "gpu0_memory_used_mib": 12.0,
        "gpu1_percent": 37.0,
        "gpu1_memory_used_mib": 1024.0,
    }


def test_a_worker_on_a_gpu_counts_gpus_as_its_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    h100, v100 = Card("H100", "GPU-11"), Card("V100", "GPU-22", (7, 0), used=7, cores=99999)
    install(monkeypatch, Library([v100, h100]))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(ask_torch, "answer_here", lambda: torch_shows(h100, v100, kernels=["sm_70", "sm_90"]))
    report: Any = SimpleNamespace(system=lambda *more: None)
    with host_monitor.watched(0, 1, None, report, 60):
        assert [load.used for load in hardware.gpu_loads()] == [1024, 7]
