"""What another user of the machine does while a run starts, works and fails."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.faults.gate import WAITS
from tests.faults.stranger import folder_for_all, said_by_nobody
from tests.launch.test_roles import commands
from tests.pace import patient, wait_for
from tests.runs import ROOT, alive, environment, family, listening, read, start, trainer
from trainer.host.notes_board import FolderBoard

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def common() -> Iterator[Path]:
    """A temporary folder as all users share it, reachable by all of them."""
    with folder_for_all(0o1777) as folder:
        yield folder


@pytest.mark.all
@needs_root
def test_names_that_a_stranger_takes_in_the_common_temporary_folder_mean_nothing(common: Path, tmp_path: Path) -> None:
    (common / "mark").mkdir()
    (common / "mark").chmod(0o777)
    marker = common / "mark" / "taken"
    watch = [sys.executable, "-m", "tests.faults.stranger", str(common), str(marker)]
    stranger = subprocess.Popen(
        watch, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
    )
    assert stranger.stdin is not None and stranger.stdout is not None
    try:
        assert stranger.stdout.readline() == "ready\n"
        launched = trainer(str(tmp_path), cwd=tmp_path, module="tests.launch.failing", spares=0, TMPDIR=str(common))
    finally:
        stranger.stdin.close()
        seen = stranger.stdout.read().split()
        stranger.wait(10)
    assert "worker 1 ended with exit code 7" in launched.stdout, launched.stdout + launched.stderr
    assert "a secret of the model" in launched.stdout
    assert not marker.exists(), f"code of another user ran as {marker.read_text()}"
    assert seen, "it has watched"
    assert [name for name in seen if "pickle" in name] == []
    left = [path for path in common.rglob("*") if path.is_file() and path.stat().st_uid == 0]
    assert left == [], "nothing of ours stays there"


@needs_root
def test_what_a_launch_leaves_open_in_the_temporary_folder_is_for_its_user_alone(common: Path, tmp_path: Path) -> None:
    done = trainer(str(tmp_path), "looks", cwd=tmp_path, module="tests.launch.failing", spares=0, TMPDIR=str(common))
    [modes] = [line for line in done.stdout.splitlines() if line.startswith("modes ")]
    assert modes.split()[1:] and set(modes.split()[1:]) == {"0o40700"}, done.stdout + done.stderr
    own = [line for line in done.stdout.splitlines() if line.startswith("own ")]
    assert own and all(line.split()[1] != str(common) for line in own), (
        "temporary files of workers lie in the run's folder"
    )


SERVED = (
    "+recipe=digits_lenet",
    "tracking=none",
    "device=cpu",
    "strategy=pserver_async",
    "launch.servers=1",
    "launch.workers=2",
    "data.global_batch_size=64",
    "execution.threads=1",
    "hydra.run.dir=run",
)
NOTES = {
    "endpoint/server/0": "tcp://127.0.0.1:1",
    "lost/worker/0": "its process ended",
    "lost/worker/1": "its process ended",
    "fenced/worker/0": "because",
    "fenced/worker/1": "because",
    "done/worker/0": "",
    "hosts/why not": "because",
}
"""What another user would like the processes of a run to believe."""
GATE = "callbacks=[{_target_:tests.faults.gate.Gate,at:4,until:go}]"


def ports_of(pid: int) -> list[int]:
    """Where a command line and all that it has started listen."""
    with suppress(psutil.NoSuchProcess):
        return sorted(listening(family(pid)))
    return []


def lies(ports: list[int], common: Path) -> str:
    """Write all notes wherever this process can reach; returns where it could."""
    reached = []
    for port in ports:
        with suppress(RuntimeError):
            patience = datetime.timedelta(seconds=2)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=patience)
            for key, note in NOTES.items():
                for where in ("", "board/"):  # where launchers between hosts keep their notes
                    store.set(where + key, note)
            reached.append(f"port {port}")
    for folder in common.rglob("*"):
        if folder.is_dir():
            with suppress(OSError):
                list(folder.iterdir())
                reached.append(str(folder))
            with suppress(OSError):
                (folder / "lie").write_text("lie")
                reached.append(str(folder))
    return " ".join(reached)


@pytest.mark.all
@needs_root
def test_stranger_who_writes_whatever_can_be_reached_from_start_to_end_changes_nothing(
    common: Path, tmp_path: Path
) -> None:
    run = start(*SERVED, "max_steps=60", cwd=tmp_path, TMPDIR=str(common))
    tried, reached = 0, ""
    try:
        while run.poll() is None:
            ports = ports_of(run.pid)
            reached += said_by_nobody(lambda ports=ports: lies(ports, common))  # type: ignore[misc]
            tried += (tmp_path / "run" / "workerlog.1").exists()
    finally:
        run.kill()
    assert tried, "while there were workers"
    result = read(tmp_path / "run" / "result.json")
    assert result.get("status") == "done", (tmp_path / "screen.txt").read_text()
    assert not result["lost_workers"]
    assert reached == ""


@pytest.mark.all
@needs_root
def test_stranger_who_writes_into_the_store_of_commands_on_one_machine_changes_nothing(
    common: Path, tmp_path: Path
) -> None:
    """They meet at a port of this machine, which every user of it reaches; the secret by which they know each other is
    in a folder of their user."""
    mine, reached = commands(tmp_path, 2, 1), ""
    port = int(mine.workers[0].rpartition(":")[2])
    try:
        for who in ("worker 0", "worker 1", "server 0"):
            mine.start(who, "strategy=pserver_async", "max_steps=20", GATE, TMPDIR=str(common))
        logs = [mine.run / f"workerlog.{rank}" for rank in range(2)]
        wait_for(lambda: all(log.exists() and WAITS in log.read_text() for log in logs), 600, "they train")
        while None in [process.poll() for process in mine.started.values()]:
            reached += said_by_nobody(lambda: lies([port], common))
            (mine.run / "go").touch()
    finally:
        for process in mine.started.values():
            process.kill()
    assert set(mine.ended().values()) == {0}, mine.screens()
    assert f"port {port}" in reached and str(common) not in reached
    result = read(mine.run / "result.json")
    assert result["status"] == "done" and not result["lost_workers"]
    said = mine.screens() + "".join(path.read_text() for path in mine.run.glob("*log.?"))
    assert "lost/worker/1 in the launcher's store is not of this run and is ignored" in said


@pytest.mark.all
def test_launcher_of_workers_that_are_all_called_lost_ends_soon(common: Path, tmp_path: Path) -> None:
    """Where processes may be started again, they would be."""
    run = start(
        *SERVED, "epochs=100000", "execution.val_every=0", "launch.max_restarts=0", cwd=tmp_path, TMPDIR=str(common)
    )
    try:
        wait_for(lambda: read(tmp_path / "run" / "status.json").get("step", 0) > 5, 600, "they train")
        everybody = family(run.pid)
        [board] = common.glob("trainer-*/board")
        for key in ("lost/worker/0", "lost/worker/1"):
            FolderBoard(board).set(key, "its process ended")
        assert run.wait(patient(30)) == 1
    finally:
        run.kill()
    # of the worker whose note was seen first, if the server has not seen both at once
    assert re.search(
        r"worker [01]\b.* its process ended|worker [01] was declared lost \(its process ended\)",
        (tmp_path / "screen.txt").read_text(),
    )
    wait_for(lambda: not alive(everybody), 30, "all processes end")
