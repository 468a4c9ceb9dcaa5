"""A server's part of a checkpoint is written by a copy of it while pushes go on; whatever becomes of the copy, the
checkpoint is whole or there is none, and it is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.faults.slow_disk import GO
from tests.faults.test_lost import member, screen
from tests.faults.test_returns import BASE, WORK, check_ledgers
from tests.pace import wait_for
from tests.runs import alive, family, kill, read, start, trainer
from tests.zygote import Started
from trainer.checkpoint import store

MODES = {
    "async": ("strategy=pserver_async", "strategy._target_=tests.faults.slow_disk.Async", "data.lease_batches=4"),
    "geo": (
        "strategy=pserver_geo",
        "strategy._target_=tests.faults.slow_disk.Geo",
        "strategy.k_steps=3",
        "data.lease_batches=4",
    ),
    "sync": ("strategy=pserver_sync", "strategy._target_=tests.faults.slow_disk.Sync"),
}


PAST = "callbacks=[{{_target_:tests.faults.gate.Gate,at:{},until:past,rank:0}}]"
"""The first worker waits after that update, and all the others for it at the end of their epoch."""


@contextmanager
def held(folder: Path, mode: str, *overrides: str) -> Iterator[tuple[Started, Path]]:
    """A run of which the copies of both servers are about to write their parts of the first checkpoint."""
    process, run = start(*BASE, *MODES[mode], *overrides, cwd=folder), folder / "run"
    everybody: list[psutil.Process] = []

    def waits() -> bool:
        assert process.poll() is None, screen(folder)
        return all(list(run.glob(f"held.{server}.*")) for server in range(2))

    try:
        wait_for(waits, 90, "the copies wait")
        everybody += family(process.pid)
        yield process, run
        process.wait(120)
        wait_for(lambda: not alive(everybody), 15, f"{alive(everybody)} end")
    finally:
        process.kill()
        kill(alive(everybody))


def copy_of(run: Path, server: int) -> psutil.Process:
    """The process that writes the part of a server."""
    [path] = run.glob(f"held.{server}.*")
    return psutil.Process(int(path.read_text()))


def applied(run: Path) -> int:
    """Pushes that server 0 has applied."""
    return len((run / "ledger.0.tsv").read_text().splitlines()) - 1


def whole(run: Path) -> list[str]:
    """Checkpoints."""
    return [folder.name for folder in store.found(run / "checkpoints") if store.is_whole(folder)]


@pytest.mark.all
@pytest.mark.parametrize("mode", ["async", pytest.param("geo", marks=pytest.mark.long), "sync"])
def test_pushes_go_on_while_the_parts_are_written_and_the_end_waits_for_them(mode: str, tmp_path: Path) -> None:
    every = 60 if mode == "sync" else 30  # of the first worker, which leases a third of the updates on a busy machine
    rhythm = (
        "checkpoint.every_epochs=null",
        "checkpoint.every_minutes=null",
        f"checkpoint.every_steps={every}",
        PAST.format(every + 1),
    )
    with held(tmp_path, mode, *rhythm, "checkpoint.keep_last=9") as (process, run):
        before = applied(run)
        (run / "past").touch()
        wait_for((run / "model.safetensors").exists, 60, "the training comes to its end meanwhile")
        assert applied(run) > before and whole(run) == [] and process.poll() is None
        (run / GO).touch()
    assert process.returncode == 0, screen(tmp_path)
    check_ledgers(run) if mode != "sync" else None
    [name] = whole(run)
    assert (run / "checkpoints" / "latest").read_text().strip() == name
    files = {path.name for path in (run / "checkpoints" / name).iterdir()}
    files -= {"best.safetensors"}  # which is there after a validation
    assert files == {
        "COMPLETE",
        "checkpoint.json",
        *(f"{role}-{n}.safetensors" for role in ("server", "worker") for n in range(2)),
    }


@pytest.mark.all
def test_a_copy_that_is_killed_is_told_and_the_next_checkpoint_is_written(tmp_path: Path) -> None:
    with held(tmp_path, "async") as (process, run):
        copy_of(run, 1).kill()
        wait_for(lambda: "no checkpoint at" in (run / "workerlog.0").read_text(), 60, "it is given up")
        (run / GO).touch()
    assert process.returncode == 0, screen(tmp_path)
    why = "server-1.safetensors cannot be written: the process that wrote it was killed by SIGKILL (out of memory?)"
    assert f"{why}; the one before stays, and it is tried again" in (run / "workerlog.0").read_text()
    assert why in (run / "serverlog.1").read_text()
    assert whole(run) and read(run / "result.json")["restarts"] == 0
    assert not list((run / "checkpoints").glob("*.partial"))
    check_ledgers(run)


@pytest.mark.all
def test_a_server_that_dies_while_its_copy_writes_takes_the_copy_with_it(tmp_path: Path) -> None:
    """There is no checkpoint before: all begin anew. The one that was half written is never taken."""
    with held(tmp_path, "async") as (process, run):
        copies, everybody = [copy_of(run, server) for server in range(2)], family(process.pid)
        servers = [p for p in everybody if p not in copies]
        member(run, "serverlog.1", servers).kill()
        wait_for(lambda: len(read(run / "lives.json")) == 2, 60, "the next life begins")  # type: ignore[arg-type]
        wait_for(lambda: not alive(copies), 20, "the copies end")
        (run / GO).touch()
    told = screen(tmp_path)
    assert process.returncode == 0, told
    assert "from the beginning: there is no checkpoint yet" in told
    check_ledgers(run)


@pytest.mark.all
def test_a_launcher_that_is_killed_takes_the_copies_with_it_and_the_run_goes_on(tmp_path: Path) -> None:
    with held(tmp_path, "async") as (process, run):
        copies = [copy_of(run, server) for server in range(2)]
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: not alive(copies), 20, "the copies end")
        assert whole(run) == []
        (run / GO).touch()
    ended = trainer(*BASE, *MODES["async"], "resume=auto", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert whole(run) and not list((run / "checkpoints").glob("*.partial"))
    check_ledgers(run)


@pytest.mark.all
def test_preemption_waits_for_the_copies(tmp_path: Path) -> None:
    gate = PAST.format(10)
    with held(tmp_path, "async", gate) as (process, run):
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: "got SIGTERM" in screen(tmp_path), 20, "it says so")
        (run / "past").touch()
        (run / GO).touch()
    assert process.returncode == 75, screen(tmp_path)
    assert whole(run)
    ended = trainer(*BASE, *MODES["async"], gate, "resume=auto", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for server in range(2):
        assert sum(1 for _ in (run / f"ledger.{server}.tsv").open()) > WORK // 2
    check_ledgers(run)
