"""``submit``, ``ps``, ``logs``, ``cancel``, ``resume`` and ``retry`` as a user types them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import trainer
from trainer.cli import queue_verbs
from trainer.errors import UserError
from trainer.service.queue import Queue, Slots

DIGITS = ("+recipe=digits_lenet", "epochs=1", "tracking=none")


def test_submit_is_a_launcher_that_does_not_wait() -> None:
    assert queue_verbs.submitted(["--priority", "3", "--key=k", *DIGITS]) == [
        *DIGITS,
        "launch=queue",
        "launch.wait=false",
        "launch.priority=3",
        "launch.once=k",
    ]
    with pytest.raises(UserError, match=r"launch=slurm.*queue"):
        queue_verbs.submitted([*DIGITS, "launch=slurm"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("cancel", "99-99999999999999999999"), "there is no such run in the queue"),
        (("show", "99"), "there is no such run in the queue. Type instead: python -m trainer ps --all"),
        (("runner", "--idle", "-1"), "-1: must be a number of at least 0"),
        (("serve", "--quota", "-1"), "-1: must be a whole number of at least 0"),
        (
            ("serve", "--port", "abc"),
            "abc: must be a whole number of at least 0 and at most 65535. Type instead: python",
        ),
        (("serve", "--port", "abc"), "[--config-dir FOLDER] [--quota N]"),
        (("logs",), "the following arguments are required"),
        (("submit", "+recipe=digits_lenett"), "Type instead: +recipe=digits_lenet"),
        (("submit", *DIGITS, "launch.nnodes=2"), "the queue has one host"),
        (("submit", *DIGITS, "data.batch_size=0"), "data.batch_size=0"),
    ],
)
def test_what_cannot_be_is_a_sentence_and_leaves_nothing(
    words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_HOME", str(tmp_path / "home"))
    done = trainer(*words, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "no runs" in trainer("ps", cwd=tmp_path).stdout
    assert not (tmp_path / "outputs").exists()


def test_a_run_is_submitted_looked_at_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_HOME", str(tmp_path / "home"))
    done = trainer("submit", *DIGITS, "hydra.run.dir=run", "--key", "mine", cwd=tmp_path)
    assert done.returncode == 0 and "logs -f 1" in done.stdout, done.stdout + done.stderr
    again = trainer("submit", *DIGITS, "hydra.run.dir=other", "--key", "mine", cwd=tmp_path)
    assert "key mine is run 1 already" in again.stdout and not (tmp_path / "other").exists()
    lines = trainer("logs", "-f", "mine", cwd=tmp_path, timeout=120)
    assert lines.returncode == 0 and "[Epoch 0] validation loss" in lines.stdout
    assert re.search(r"^ +1  done ", trainer("ps", cwd=tmp_path).stdout, re.MULTILINE)
    shown = trainer("show", "run", cwd=tmp_path).stdout
    assert "exit code   0" in shown and "lives       1" in shown
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"
    assert trainer("cancel", "1", cwd=tmp_path).returncode == 2
    status = tmp_path / "run" / "status.json"
    status.write_text(status.read_text().replace('"done"', '"killed"'))  # as a run that was cancelled
    assert "queued again" in trainer("retry", "1", cwd=tmp_path).stdout
    lines = trainer("logs", "-f", "1", cwd=tmp_path, timeout=120)
    assert lines.returncode == 0 and json.loads(status.read_text())["state"] == "done", lines.stdout
    again = trainer("runs", "reproduce", "run", cwd=tmp_path, timeout=180)
    assert again.returncode == 0 and "the difference is exactly 0" in again.stdout, again.stdout + again.stderr
    stop(tmp_path)


@pytest.mark.all
def test_a_sweep_runs_as_many_jobs_at_a_time_as_there_are_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_HOME", str(tmp_path / "home"))
    done = trainer(
        "-m",
        *DIGITS,
        "limit_train_batches=2",
        "seed=1,2",
        "launch=queue",
        "hydra.sweep.dir=sweep",
        cwd=tmp_path,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (tmp_path / "sweep" / "sweep.csv").read_text().splitlines()
    assert len(rows) == 3 and all(",done," in row for row in rows[1:])
    stop(tmp_path)


@pytest.mark.all
def test_the_command_of_a_submitted_sweep_follows_it_and_later_shows_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_HOME", str(tmp_path / "home"))
    words = ["-m", *DIGITS, "limit_train_batches=2", "seed=1,2", "hydra.sweep.dir=sweep"]
    begun = trainer("submit", *words, cwd=tmp_path)
    follow = re.search(r"^follow +python -m trainer (.*)$", begun.stdout, re.MULTILINE)
    assert begun.returncode == 0 and follow, begun.stdout + begun.stderr
    again = trainer("submit", *words, cwd=tmp_path)  # whether they live or are done by now
    assert again.returncode == 0 and "runs 1-2" in again.stdout, again.stdout + again.stderr
    for _ in ("lives", "done"):
        shown = trainer(*shlex.split(follow[1]), cwd=tmp_path, timeout=180)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        rows = (tmp_path / "sweep" / "sweep.csv").read_text().splitlines()
        assert len(rows) == 3 and all(",done," in row for row in rows[1:])
    assert "It has ended, and is not run again" in shown.stdout
    assert [run.life for run in Queue(tmp_path / "home").newest(9)] == [1, 1], "nothing is trained twice"
    other = trainer(*words, "launch=queue", "data.batch_size=32", cwd=tmp_path)  # as a sweep here: it trains anew
    assert other.returncode == 0 and len(Queue(tmp_path / "home").newest(9)) == 4, other.stdout + other.stderr
    stop(tmp_path)


def stop(folder: Path) -> None:
    """End the runner that the submission has started."""
    import psutil

    home = str(folder / "home")
    runners = [p for p in psutil.process_iter(["cmdline", "cwd"]) if p.info["cwd"] == home]
    assert runners, "the submission starts a runner"
    for runner in runners:
        runner.terminate()
    psutil.wait_procs(runners, 20)


def test_of_several_runs_those_that_can_be_cancelled_are(
    queue: Queue, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINER_HOME", str(queue.folder))
    monkeypatch.setattr("trainer.service.engine.start_runner", lambda folder: None)
    numbers = [add("work", 1) for _ in range(3)]
    queue.set(numbers[0], state="done")
    with pytest.raises(UserError, match=f"cancel {numbers[0]}: it is done"):
        queue_verbs.answer("cancel", [f"{numbers[0]}-{numbers[2]}"])
    assert [run.asked for run in queue.newest(3)] == ["", "cancel", "cancel"]
    assert capsys.readouterr().out.splitlines() == [f"run {number} is asked to end" for number in numbers[1:]]


def test_ps_says_that_no_runner_is_there(
    queue: Queue, add: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINER_HOME", str(queue.folder))
    queue.set(add("work", 1), submitted=0.0)
    queue_verbs.answer("ps", [])
    assert "no runner: python -m trainer runner" in capsys.readouterr().out
    queue.beat("localhost", Slots((0,), (), 1 << 30))
    queue_verbs.answer("ps", [])
    assert "no runner" not in capsys.readouterr().out
