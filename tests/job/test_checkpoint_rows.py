"""What the plan tells of checkpoints: their size, and how long it takes to write one."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import trainer
from tests import runs
from trainer.host import disk_speed

DIGITS = """
    +recipe=digits_lenet tracking=none execution.threads=1 epochs=1 limit_train_batches=2 limit_val_batches=1
    checkpoint.every_steps=1 checkpoint.background=false checkpoint.keep_last=9
""".split()
UNITS = {"kB": 1e3, "MB": 1e6}


def shown(told: str) -> str:
    return " ".join(told.split())


@pytest.mark.parametrize(
    "other",
    [
        ("optimizer=adamw", "ema.decay=0.9", "precision=fp64"),
        pytest.param(("optimizer=sgd", "optimizer.lr_factors={features: 0}"), marks=pytest.mark.long),
        ("strategy=local_sgd", "launch.nproc=2"),
        ("strategy=pserver_sync", "launch.workers=2", "launch.servers=1", "precision=fp64"),
        ("strategy=pserver_async", "launch.workers=3", "launch.servers=2", "optimizer=adamw"),
        pytest.param(("strategy=pserver_geo", "launch.workers=2", "launch.servers=1"), marks=pytest.mark.long),
    ],
)
def test_the_first_checkpoint_is_as_large_as_the_plan_tells(other: tuple[str, ...], tmp_path: Path) -> None:
    done = runs.trainer(*DIGITS, *other, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"about ([\d.]+) (kB|MB) each", shown(done.stdout))
    assert told, done.stdout
    first = min((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert not (first / "best.safetensors").exists(), "no validation came before"
    written = sum(path.stat().st_size for path in first.iterdir())
    assert float(told[1]) * UNITS.get(told[2], 0) == pytest.approx(written, rel=0.3)
    log = re.search(rf"checkpoint {first.name}: ([\d.]+) MB", (tmp_path / "run" / "workerlog.0").read_text())
    assert log and float(log[1]) * 1e6 == pytest.approx(written, abs=0.051e6), "of all workers and servers"


@pytest.mark.parametrize(
    ("rate", "told", "other"),
    [
        (50e3, "about 2 s behind the training, at 50.0 kB a second (measured now)", ()),
        (
            500.0,
            "about 4 min while the training waits, at 500 B a second (measured now)",
            ("checkpoint.background=false",),
        ),
        (5e8, "less than 1 s behind the training, at 500.0 MB a second (measured now)", ()),
    ],
)
def test_the_plan_tells_how_long_a_write_takes(
    rate: float,
    told: str,
    other: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(disk_speed, "rate", lambda folder, size: rate)
    trainer.run(
        [
            *"+recipe=digits_lenet tracking=none plan=true verbosity=debug".split(),
            f"hydra.run.dir={tmp_path}/run",
            *other,
        ]
    )
    assert f"written in {told}" in shown(capsys.readouterr().out)


def test_where_nothing_can_be_measured_the_plan_tells_why_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    trainer.run(["+recipe=digits_lenet", "tracking=none", "plan=true", f"hydra.run.dir={tmp_path}/run"])
    assert "written in an unknown time: No space left on device" in shown(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("free", "said"), [(10**9, False), (250_000, True)])
def test_the_plan_says_when_the_disk_will_not_take_the_checkpoints(
    free: int, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    trainer.run(["+recipe=digits_lenet", "tracking=none", "plan=true", f"hydra.run.dir={tmp_path}/run"])
    told = re.search(r"too little room 250.0 kB are free, ([\d.]+) kB are needed", shown(capsys.readouterr().out))
    assert (told is not None) == said
    assert told is None or float(told[1]) > 3 * 4 * 11.350, "three times the parameters alone"
