"""The first failure is what the screen, result.json and MLflow say; what fails while a run is closed cannot replace
it."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich.console

from tests import composed
from tests.small_disk import small_disk
from trainer.errors import Died, Interrupted, RunFailed, RunPreempted
from trainer.host import files, in_use
from trainer.job import closing, curves, job
from trainer.job.closing import Closing
from trainer.job.result import Result
from trainer.metrics import validation_file
from trainer.run_folder import json_files, report
from trainer.terminal import status as status_file
from trainer.terminal.streams import _Tee
from trainer.tracking import follower
from trainer.tracking.client import Ended

CAUSE = "worker 1 broke: the first cause"


class Tracker:
    """Instead of the recorder: what it was told."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.status = ""

    def open(self, run_dir: Path, run: Any, secrets: list[str]) -> None:
        pass

    def trained(self, run_dir: Path) -> None:
        pass

    def go_back(self, run_dir: Path, points: int) -> None:
        pass

    def close(self, run_dir: Path, status: str, tags: dict[str, str], timeout_s: float) -> dict[str, Ended]:
        self.status, self.tags = status, tags
        return {"mlflow": Ended("abc")}


@pytest.fixture(scope="module")
def ready() -> job.Ready:
    """A checked run of the digits; its folder is set by each test."""
    return composed.ready("+recipe=digits_lenet", "tracking=none", run_dir="run")


Executed = tuple[type[BaseException] | None, str, Tracker, str]
Execute = Callable[..., Executed]


@pytest.fixture
def execute(ready: job.Ready, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Execute:
    """Run a job whose processes do what is given; returns what was raised and said, the tracker, and what was shown."""

    def execute(
        start: Callable[[Path], dict[str, Any]], folder: Path = tmp_path / "run", ready: job.Ready = ready
    ) -> Executed:
        folder.mkdir(exist_ok=True)
        mine = replace(ready.in_folder(folder), checked=copy.deepcopy(ready.checked))
        tracker, raised = Tracker(), None
        try:
            job.execute(mine, lambda given, _: start(Path(given.plan.paths.run_dir)), ["x"], tracker)  # type: ignore[arg-type]
        except BaseException as error:
            raised = error
        return type(raised) if raised else None, str(raised or ""), tracker, capsys.readouterr().out

    return execute


def fails(run_dir: Path) -> dict[str, Any]:
    raise RunFailed(CAUSE)


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "some.file")


def leaves_no(name: str) -> Callable[..., None]:
    """``json_files.leave`` that cannot write that file."""
    true = json_files.leave
    return lambda path, *rest, **more: full() if path.name == name else true(path, *rest, **more)


STEPS: dict[str, tuple[Any, str, Any]] = {
    "status.json": (json_files, "leave", leaves_no("status.json")),
    "result.json": (json_files, "leave", leaves_no("result.json")),
    "what it had come to": (status_file, "read_status", lambda folder: ["no mapping"]),
    "logs without secrets": (closing, "scrub", full),
    "curves.png": (curves, "draw", full),
    "servers.png": (curves, "draw_servers", full),
    "the pictures of the validation": (validation_file, "read", lambda *_: exit("a user's own class ends the process")),
    "the end of the MLflow run": (Tracker, "close", full),
    "the screen": (rich.console.Console, "print", full),
}


@pytest.mark.parametrize("step", [*STEPS, "all"])
@pytest.mark.parametrize("how", ["failed", "interrupted", "done"])
def test_a_closing_step_that_fails_hides_neither_the_cause_nor_the_other_steps(
    step: str, how: str, execute: Execute, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(run_dir: Path) -> dict[str, Any]:
        for name in STEPS if step == "all" else [step]:
            monkeypatch.setattr(*STEPS[name])
        if how == "failed":
            raise RunFailed(CAUSE)
        if how == "interrupted":
            raise KeyboardInterrupt(CAUSE)
        return {"steps": 3}

    kind, said, tracker, shown = execute(start)
    assert kind == {"failed": RunFailed, "interrupted": Interrupted, "done": None}[how]
    assert said == ("" if how == "done" else CAUSE)
    if step not in ("all", "the end of the MLflow run"):
        assert tracker.status == {"failed": "FAILED", "interrupted": "KILLED", "done": "FINISHED"}[how]
        assert tracker.tags.get("trainer.error") == (None if how == "done" else CAUSE)
    if step not in ("all", "result.json"):
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert (result["status"], result["error"]) == ({"interrupted": "killed"}.get(how, how), said)
    drawn = how == "interrupted" and step in ("curves.png", "servers.png", "the pictures of the validation")
    assert shown.count("could not be done at the end") == (0 if drawn or step in ("the screen", "all") else 1)
    if step in shown:
        assert "(OSError" in shown or "(SystemExit" in shown


def test_what_workers_and_copies_have_lost_is_in_the_tags(execute: Execute, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def uploading(ready: job.Ready, result: job.Result) -> Iterator[None]:
        yield
        result.not_copied = ["step-000000003", "step-000000002"]

    monkeypatch.setattr(job, "_uploading", uploading)
    lost = {"skipped": 2, "lost_updates": 4, "lost_workers": {"1": "worker 1 was killed"}}
    _, _, tracker, _ = execute(lambda run_dir: {"steps": 3, **lost})
    told = {name: told for name, told in tracker.tags.items() if name.removeprefix("trainer.") in (*lost, "not_copied")}
    assert told == {
        "trainer.skipped": "2",
        "trainer.lost_updates": "4",
        "trainer.lost_workers": "worker 1 was killed",
        "trainer.not_copied": "step-000000003, step-000000002",
    }


def test_a_run_holds_what_it_uses_of_the_cache_to_its_end(execute: Execute, tmp_path: Path) -> None:
    folder, aside = tmp_path / "folder", tmp_path / "aside"
    folder.mkdir()
    (folder / "mark").touch()

    def start(run_dir: Path) -> dict[str, Any]:
        assert in_use.HERE.hold(folder / "mark")
        in_use.remove_unused(folder, "mark", aside)
        assert folder.exists()
        return {"steps": 3}

    assert execute(start)[0] is None
    in_use.remove_unused(folder, "mark", aside)
    assert not folder.exists()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB."""
    with small_disk(tmp_path / "small", "300k") as place:
        yield place


def test_a_disk_that_fills_up_is_what_the_run_says(execute: Execute, small: Path) -> None:
    def start(run_dir: Path) -> dict[str, Any]:
        with (run_dir / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    kind, said, tracker, shown = execute(start, small)
    assert kind is RunFailed and said == "OSError: [Errno 28] No space left on device"
    assert tracker.status == "FAILED" and tracker.tags["trainer.error"] == said
    [line] = [line for line in shown.splitlines() if "could not be done" in line]
    assert "status.json, result.json" in line and "No space left" in line


def test_a_folder_that_is_removed_meanwhile_hides_nothing(execute: Execute, tmp_path: Path) -> None:
    def start(run_dir: Path) -> dict[str, Any]:
        shutil.rmtree(run_dir)
        raise RunFailed(CAUSE)

    kind, said, tracker, shown = execute(start)
    assert (kind, said, tracker.tags["trainer.error"]) == (RunFailed, CAUSE, CAUSE)
    assert "could not be done at the end" in shown and not (tmp_path / "run").exists()


def test_a_mistake_of_a_users_class_is_in_the_result_and_raised_as_it_is(execute: Execute, tmp_path: Path) -> None:
    def start(run_dir: Path) -> dict[str, Any]:
        raise ZeroDivisionError("of the user's own")

    kind, _, tracker, _ = execute(start)
    assert kind is ZeroDivisionError
    assert json.loads((tmp_path / "run" / "result.json").read_text())["error"] == "ZeroDivisionError: of the user's own"
    assert tracker.status == "FAILED"


def test_reasons_are_said_once_with_all_that_they_kept_from_being_done() -> None:
    lines: list[str] = []
    end = Closing(lines.append)
    for name in ("a", "b"):
        with end.step(name):
            full()
    with end.step("c"):
        raise ValueError("something else\nand more")
    with end.step("d"):
        pass
    end.tell()
    assert lines == [
        "could not be done at the end: a, b (OSError: [Errno 28] No space left on device: 'some.file')",
        "could not be done at the end: c (ValueError: something else)",
    ]


def test_a_log_on_a_full_disk_keeps_no_line_from_the_screen() -> None:
    class Full(io.StringIO):
        name = "workerlog.0"
        write = full

    screen = io.StringIO()
    with contextlib.closing(Full()) as log:
        tee = _Tee(screen, log)
        tee.write("first\n")
        tee.write("second\n")
        tee.flush()
    assert screen.getvalue() == "workerlog.0 is not written any more: No space left on device\nfirst\nsecond\n"


@pytest.mark.parametrize(("error", "said"), [(KeyboardInterrupt(), "got SIGINT"), (RunFailed(CAUSE), CAUSE)])
def test_a_broken_run_keeps_the_best_that_it_had_come_to(
    error: BaseException, said: str, execute: Execute, tmp_path: Path
) -> None:
    def start(run_dir: Path) -> dict[str, Any]:
        told = report.Report(run_dir, 10)
        for step, accuracy in ((1, 0.25), (2, 0.75), (3, 0.5)):
            told.progress(0, step)
            told.validation(0, step, {"val/acc1": accuracy, "val/loss": step})
        told.close()
        raise error

    _, message, _, _ = execute(start)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert message == result["error"] == said
    assert result["best"] == {"val/acc1": 0.75, "val/loss": 1} and result["best_step"] == 2
    assert result["metrics"] == {"val/acc1": 0.5, "val/loss": 3} and result["steps"] == 3


def test_the_status_of_a_run_that_is_done_tells_what_its_result_tells(execute: Execute, tmp_path: Path) -> None:
    """Also if a worker that was suspended has woken and written what it knew."""

    def start(run_dir: Path) -> dict[str, Any]:
        late, told = report.Report(run_dir, 3), report.Report(run_dir, 3)
        for step, accuracy in ((1, 0.25), (3, 0.75)):
            for one in (late, told) if step == 1 else (told,):
                one.progress(0, step)
                one.validation(0, step, {"val/acc1": accuracy})
        late.write_status("running", late.started + 1.0)
        for one in (late, told):
            one.close()
        return told.outcome()

    raised, message, _, _ = execute(start)
    assert raised is None, message
    status, result = (
        status_file.read_status(tmp_path / "run"),
        json.loads((tmp_path / "run" / "result.json").read_text()),
    )
    assert status["best"] == {"metric": "val/acc1", "value": 0.75, "step": 3} and result["best_step"] == 3
    assert status["bests"] == result["best"] == {"val/acc1": 0.75} and status["metrics"] == result["metrics"]


def test_a_worker_that_does_more_than_the_average_raises_the_total(tmp_path: Path) -> None:
    told = report.Report(tmp_path, 60)
    told.progress(0, 61)
    told.write_status("running", told.started + 1.0)
    told.close()
    status = status_file.read_status(tmp_path)
    assert (status["step"], status["total"], status["percent"], status["eta_s"]) == (61, 61, 100.0, 0.0)


@pytest.mark.parametrize("error", [*files.REFUSED, errno.EIO])
def test_a_folder_that_may_not_be_written_to_for_a_while_ends_no_run(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = report.Report(tmp_path, 60, own=tmp_path / "status.0.json")
    told.doing("compiles")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError(error, os.strerror(error))))
        with pytest.raises(OSError, match="error") if error == errno.EIO else contextlib.nullcontext():
            for step in (1, 2):
                told._next_status = 0.0
                told.progress(0, step)
    said = capsys.readouterr().out.count(f"cannot be written ({os.strerror(error)}); the training goes on")
    assert said == (0 if error == errno.EIO else 1) and status_file.read_status(tmp_path)["step"] == 0
    told._next_status = 0.0
    told.progress(0, 3)
    assert (
        status_file.read_status(tmp_path)["step"] == json.loads((tmp_path / "status.0.json").read_text())["step"] == 3
    )
    told.close()


@pytest.mark.parametrize("keeps", [True, False], ids=["checkpoints", "none"])
@pytest.mark.parametrize("before", ["the first life", "the second life", "a life on this host"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_scheduler_that_ends_a_run_while_nothing_is_trained_may_begin_it_again(
    number: signal.Signals,
    before: str,
    keeps: bool,
    ready: job.Ready,
    execute: Execute,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Exit code 75 for that, unless a host does not see what host 0 has: its training may have begun."""
    told = ready.checked.config.checkpoint
    if not keeps:
        monkeypatch.setattr(
            ready.checked.config, "checkpoint", replace(told, every_steps=None, every_minutes=None, every_epochs=None)
        )
    host = 1 if before == "a life on this host" else 0
    ready = ready.with_plan(topology={"node_rank": host, "nnodes": host + 1, "restarts": 1})
    lives = []

    def start(run_dir: Path) -> dict[str, Any]:
        lives.append(run_dir)
        if before == "the second life" and len(lives) == 1:
            raise Died("worker 0 was killed", "worker 0", 3)
        os.kill(os.getpid(), number)
        return {}

    kind, said, tracker, _ = execute(start, ready=ready)
    preempted = not host
    assert kind is (RunPreempted if preempted else Interrupted)
    assert said == (
        f"got {number.name} while nothing was trained: there is nothing new to save"
        if preempted
        else f"got {number.name}"
    )
    assert kind.exit_code == (75 if preempted else 130)
    for name, key in (("status.json", "state"), ("result.json", "status")):
        [left] = (tmp_path / "run").rglob(name)
        assert json.loads(left.read_text())[key] == ("preempted" if preempted else "killed")
    assert (tracker.status, tracker.tags.get("trainer.state")) == ("KILLED", "PREEMPTED" if preempted else None)
    assert len(lives) == (2 if before == "the second life" else 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_signal_while_the_run_is_closed_takes_nothing_from_what_it_leaves(
    number: signal.Signals, execute: Execute, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(closing, "scrub", lambda *told: os.kill(os.getpid(), number))
    kind, said, tracker, _ = execute(fails)
    assert (kind, said, tracker.status) == (RunFailed, CAUSE, "FAILED")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["error"] == CAUSE


def refused_by(port: int, timeout: float) -> Exception:
    """What MLflow itself raises."""
    from mlflow.utils.rest_utils import MlflowHostCreds, http_request

    try:
        http_request(
            MlflowHostCreds(f"http://me:secret@127.0.0.1:{port}"),
            "/api/2.0/mlflow/runs/log-batch",
            "POST",
            max_retries=0,
            timeout=timeout,
        )
    except Exception as error:
        return error
    raise AssertionError("it answered")


def test_of_a_server_that_is_gone_it_is_said_which_one_and_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert follower.said(refused_by(port, 0.2)) == f"127.0.0.1:{port}: read timed out"
    assert follower.said(refused_by(port, 5)) == f"127.0.0.1:{port}: connection refused"
    assert follower.said(ValueError("another\nmistake")) == "another"


def test_what_a_run_has_lost_is_in_its_tags(ready: job.Ready, tmp_path: Path) -> None:
    mine, tracker = ready.in_folder(tmp_path), Tracker()
    lost = {"1": "worker 1 was killed by SIGKILL", "3": "nothing was heard of it for 10 s"}
    result = Result("done", str(tmp_path), restarts=2, lost_updates=40, lost_workers=lost)
    closing._close_tracking(result, tmp_path, mine, [], tracker)  # type: ignore[arg-type]
    told = {name.removeprefix("trainer."): tag for name, tag in tracker.tags.items() if name.startswith("trainer.")}
    assert told == {"restarts": "2", "lost_updates": "40", "lost_workers": "; ".join(lost.values())}
    closing._close_tracking(Result("done", str(tmp_path)), tmp_path, mine, [], tracker)  # type: ignore[arg-type]
    assert not [name for name in tracker.tags if name.startswith("trainer.")], "of nothing nothing is told"


@pytest.mark.parametrize("well", [True, False])
def test_what_a_worker_left_that_was_ended_does_not_stay_in_a_run_that_is_done(
    execute: Execute, tmp_path: Path, well: bool
) -> None:
    """Of one that goes on later, it goes when it does."""
    kept = ("best.safetensors", "latest", "step-000000009", "persistables", "mine.partial", ".mine.12-0123abcd")
    left = """
        .best.safetensors.12-0123abcd latest.12.tmp persistables.by-0.partial step-000000019.partial
        step-000000019.0123456789abcdef.partial
    """.split()

    def start(run_dir: Path) -> dict[str, Any]:
        for name in (*kept, *left):
            path = run_dir / "checkpoints" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("") if "best" in name or "latest" in name or "mine" in name else path.mkdir()
        (run_dir / "checkpoints/step-000000009/COMPLETE").touch()
        return {"steps": 9} if well else fails(run_dir)

    execute(start)
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {*kept, *(() if well else left)}
