"""What is asked of nvidia-smi, by one that the test writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.host import hardware
from trainer.host.hardware import Gpu

NAMES = "NVIDIA H200, 9.0\nTesla, the second one, 7.5\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that answers for nvidia-smi: names to one question, loads to the other."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncase $1 in *compute_cap) printf '{NAMES}';; *) cat {tmp_path}/loads;; esac\n")
    program.chmod(0o755)
    (tmp_path / "loads").write_text("37, 1024\n0, 3\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware.gpus.cache_clear()
    yield tmp_path
    hardware.gpus.cache_clear()


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("1", 1), ("0,1", 2), ("", 0), ("-1", 0)])
def test_the_gpus_are_those_that_cuda_shows(
    smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.gpus() == (Gpu("NVIDIA H200", (9, 0)), Gpu("Tesla, the second one", (7, 5)))[:count]
    assert hardware.gpu_loads() == ([(37.0, 1024.0), (0.0, 3.0)] if count else [])


def test_a_card_that_does_not_tell_its_load_has_none(smi: Path) -> None:
    (smi / "loads").write_text("[N/A], 1024\n")
    assert len(hardware.gpus()) == 2 and hardware.gpu_loads() == []


def test_a_driver_that_does_not_answer_shows_no_gpu(smi: Path) -> None:
    (smi / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert hardware.gpus() == () and hardware.gpu_loads() == []
