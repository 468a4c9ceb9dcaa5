"""The speed of a disk is that of a synced write, and measuring it leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.host import disk_speed

MIB = 1 << 20


class Disk:
    """Takes so many bytes per second, and each sync a while besides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: float, sync_s: float = 0.0) -> None:
        self.rate, self.sync_s, self.now, self.synced = rate, sync_s, 0.0, list[int]()
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size - sum(self.synced)
        self.synced.append(size)
        self.now += size / self.rate + self.sync_s

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("rate", "size", "tried"),
    [
        (10e6, 10**9, [MIB]),  # slow: one try has told it
        (100e6, 10**9, [MIB, 4 * MIB]),
        (2e9, 10**9, [MIB, 4 * MIB, 16 * MIB]),
        (2e9, 2 * MIB, [MIB, 2 * MIB]),  # never more than is to be written
        (2e9, 1000, [1000]),
    ],
)
def test_the_rate_is_the_disks_and_few_bytes_tell_it(
    rate: float, size: int, tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, rate)
    found = disk_speed.rate(tmp_path / "not" / "there", size, disk.clock)
    assert disk.synced == tried and found == pytest.approx(min(rate, tried[-1] / 1e-6))
    assert not list(tmp_path.iterdir())


def test_what_a_sync_costs_hardly_counts_where_much_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, 2e9, sync_s=0.002)
    assert disk_speed.rate(tmp_path, 10**9, disk.clock) == pytest.approx(2e9, rel=0.25)
