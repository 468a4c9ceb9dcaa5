"""Launchers that the config names: built-in ones, and one of a user's own that starts commands."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.pace import wait_for
from tests.runs import alive, family, points, read, start, start_afresh, trainer
from trainer.cli import commands
from trainer.cli.compose import compose, hydra_app
from trainer.errors import RunFailed, UserError
from trainer.job.check import get_ready
from trainer.launch.builtin import Forkserver, InProcess, Local
from trainer.launch.process_reports import VARIABLES, WHERE_SEVERAL
from trainer.launch.tasks import Commands, Task
from trainer.planning.launcher import Supervision, launcher_of, start_here

DIGITS = (
    "+recipe=digits_lenet",
    "tracking=none",
    "device=cpu",
    "execution.threads=1",
    "max_steps=12",
    "execution.log_every=1",
    "precision=fp64",
    "hydra.run.dir=run",
)
OWN = "launch._target_=tests.launch.launchers.Commands"
LONG = ("max_steps=null", "epochs=100000", "execution.val_every=0")


def ready(*overrides: str) -> object:
    with hydra_app() as app:
        config = commands.plain(compose(app, ["+recipe=digits_lenet", "tracking=none", "device=cpu", *overrides]))
    return launcher_of(get_ready(config, commands.typed_keys(overrides), "somewhere").checked.config)


@pytest.mark.parametrize(("option", "kind"), [("local", Local), ("in_process", InProcess), ("forkserver", Forkserver)])
def test_option_names_its_launcher(option: str, kind: type) -> None:
    assert type(ready(f"launch={option}")) is kind


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ("launch=in_process", "launch.nproc=2"),
            "launch.nproc=2: launch=in_process is one process, and the run has 2",
        ),
        (("launch=in_process", "strategy=pserver_async", "launch.servers=1"), "is one process, and the run has"),
        (("launch._target_=tests.launch.launchers.Refuses", "launch.nproc=3"), "launch.nproc=3: is too few"),
        (
            ("launch._target_=tests.launch.launchers.no_launcher",),
            "gave a str, not a trainer.planning.launcher.Launcher",
        ),
        (("launch._target_=tests.launch.launchers.Absent",), "launch._target_=tests.launch.launchers.Absent"),
    ],
)
def test_launcher_that_cannot_start_this_is_refused_in_a_sentence(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError) as caught:
        ready(*overrides)
    assert why in str(caught.value)


def test_launcher_of_commands_is_refused_where_torchrun_has_started_the_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(ready(OWN)).__name__ == "Commands"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="torchrun has started the processes already"):
        ready(OWN)
    assert type(ready("launch=local")) is Local


def test_servers_are_refused_where_torchrun_has_started_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        UserError, match="strategy=pserver_async: torchrun starts workers alone, and this strategy has servers"
    ):
        ready("strategy=pserver_async")
    assert ready("strategy=collective")


@pytest.mark.all
def test_launcher_of_ones_own_trains_as_the_forkserver_does(tmp_path: Path) -> None:
    losses = []
    for name, how in (("own", OWN), ("forkserver", "launch=forkserver")):
        (tmp_path / name).mkdir()
        done = trainer(*DIGITS, how, "launch.nproc=2", cwd=tmp_path / name, spares=2)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "[Epoch 0, batch" in done.stdout, "the first worker is seen on the screen"
        losses.append(points(tmp_path / name / "run", "train/loss"))
        assert (tmp_path / name / "run" / "workerlog.1").exists()
    assert losses[0] and losses[0] == losses[1]


@pytest.mark.all
def test_servers_of_ones_own_launcher_leave_what_they_did(tmp_path: Path) -> None:
    done = trainer(
        *DIGITS, OWN, "strategy=pserver_sync", "launch.servers=1", "launch.workers=2", cwd=tmp_path, spares=3
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "run" / "server.0.json")["pushes"] == 24
    plan = read(tmp_path / "run" / "plan.json")
    for role, size in (("worker", "2"), ("server", "1")):
        given, told = read(tmp_path / "run" / f"variables.{role}.0.json"), plan["topology"]["environment"][role]
        assert told == {name: given[name] for name in (*VARIABLES, *WHERE_SEVERAL)}
        assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"]) == (
            "0",
            "0",
            size,
            size,
        )


@pytest.mark.all
def test_worker_that_breaks_is_shown_with_its_error_and_the_others_end(tmp_path: Path) -> None:
    broken = ("model._target_=tests.e2e.own_models.Breaks", "~model.in_channels", "~model.image_size", "+model.rank=1")
    done = trainer(*DIGITS, *LONG, *broken, OWN, "launch.nproc=2", cwd=tmp_path, spares=2)
    assert done.returncode == 1 and "worker 1:" in done.stdout + done.stderr
    assert "the model broke on purpose" in done.stdout + done.stderr


@pytest.mark.all
def test_worker_that_is_killed_takes_all_others_along_and_nobody_sees_the_config(tmp_path: Path) -> None:
    run = start_afresh(
        *DIGITS,
        *LONG,
        OWN,
        "launch.nproc=2",
        "launch.max_restarts=0",
        "+tracking.tags.token=t0psecret-of-mine",
        cwd=tmp_path,
    )
    try:
        wait_for(lambda: read(tmp_path / "run" / "status.json").get("step", 0) > 5, 600, "they train")
        everybody = family(run.pid)
        workers = [p for p in everybody if "trainer.launch.task_process" in p.cmdline()]
        assert len(workers) == 2
        assert "t0psecret" not in json.dumps([p.cmdline() for p in psutil.Process(run.pid).children(recursive=True)])
        files = [Path(p.cmdline()[-1]) for p in workers]
        assert not any(file.exists() for file in files), "what they were told is gone"
        workers[1].kill()
        assert run.wait(600) == 1
    finally:
        run.kill()
    assert "was killed by SIGKILL" in (tmp_path / "screen.txt").read_text()
    assert not files[0].parent.exists()
    wait_for(lambda: not alive(everybody), 60, "all processes end")


@pytest.mark.all
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_launcher_that_is_ended_takes_its_commands_along(number: signal.Signals, code: int, tmp_path: Path) -> None:
    run = start(*DIGITS, *LONG, OWN, "launch.nproc=2", cwd=tmp_path, spares=2)
    try:
        wait_for(lambda: read(tmp_path / "run" / "status.json").get("step", 0) > 1, 600, "they train")
        plan = tmp_path / "run" / "plan.json"
        wait_for(
            lambda: all(one["pid"] for one in read(plan)["topology"]["processes"]), 60, "plan.json has their numbers"
        )
        workers = [psutil.Process(one["pid"]) for one in read(plan)["topology"]["processes"]]
        assert len({run.pid, *(p.pid for p in workers)}) == 3 and len(alive(workers)) == 2
        run.send_signal(number)
        assert run.wait(600) == code
    finally:
        run.kill()
    wait_for(lambda: not alive(workers), 60, "all processes end")


class Begun(subprocess.Popen[bytes]):
    """A program that has begun when the alarm comes, whatever the machine does: who is interrupted as it starts one
    cannot end it."""

    def __init__(self, *told: Any, **more: Any) -> None:
        self.alarm = signal.setitimer(signal.ITIMER_REAL, 0.0)
        super().__init__(*told, **more)

    def communicate(self, *told: Any, **more: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, *self.alarm)
        return super().communicate(*told, **more)


def waits(task: Task) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Begun)
        subprocess.run(["sleep", "1000"])


def tries_again(task: Task) -> None:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(1000)


@pytest.mark.parametrize("launch", [waits, tries_again])
def test_launch_that_does_not_return_ends_the_run_with_what_to_write(launch: Any, tmp_path: Path) -> None:
    task = Task("worker", 3, "cpu", ("true",), {}, tmp_path / "workerlog.3")
    before, handler = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    with pytest.raises(
        RunFailed,
        match=(
            r"^mine\.Own: launch of worker 3 has not returned within 0\.2 s \(launch\.timeout_s\)\. .* "
            r"subprocess\.Popen, not"
        ),
    ):
        Commands(launch, "mine.Own", 0.2)._launched(task)
    assert not [child for child in psutil.Process().children() if child.name() == "sleep"]
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == bool(before[0])
    assert signal.getsignal(signal.SIGALRM) is handler


def test_launcher_that_returns_no_outcome_is_told_what_to_return() -> None:
    with hydra_app() as app:
        silent = compose(app, [*DIGITS, "launch._target_=tests.launch.launchers.Silent"])
        ready = get_ready(commands.plain(silent), [], "somewhere")
    with pytest.raises(
        RunFailed, match=r"launchers\.Silent: start returned something of type NoneType\. Return the dict"
    ):
        start_here(ready.assignment, Supervision())
