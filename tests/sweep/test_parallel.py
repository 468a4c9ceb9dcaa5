"""Jobs side by side are those that would run one after the other; a death, a signal and a failure end no other job."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests import pace
from tests.runs import losses, start, trainer
from tests.small_disk import small_disk
from trainer.cli import sweep_table
from trainer.cli.sweep_objective import Followed, Objective, measured, objectives
from trainer.job.result import Result
from trainer.service.pool import shares
from trainer.service.queue import Slots

SMALL = ("-m", "+recipe=digits_lenet", "epochs=9", "execution.threads=1", "tracking=none", "hydra.sweep.dir=sweep")
BESIDE = "sweep.parallel=2"


def statuses(folder: Path) -> dict[str, str]:
    with (folder / "sweep" / "sweep.csv").open() as table:
        return {row["job"]: row["status"] for row in csv.DictReader(table)}


@pytest.mark.parametrize(
    ("cores", "gpus", "each", "parallel", "shared"),
    [
        (8, 0, (2, 0), None, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, 0, (1, 0), 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, 0, (4, 0), None, [()]),
        (2, 0, (1, 0), 3, [(), (), ()]),
    ],
)
def test_jobs_share_the_cores_evenly_or_have_none_of_their_own(
    cores: int, gpus: int, each: tuple[int, int], parallel: int | None, shared: list[tuple[int, ...]]
) -> None:
    host = Slots(tuple(range(cores)), tuple(map(str, range(gpus))))
    assert [one.cores for one in shares(host, *each, parallel)] == shared


def test_jobs_have_gpus_of_their_own_while_there_are_any() -> None:
    host = Slots(tuple(range(8)), ("a", "b", "c", "d"))
    assert [one.gpus for one in shares(host, 2, 2, None)] == [("a", "b"), ("c", "d")]
    assert [one.gpus for one in shares(host, 1, 1, 5)] == [("a",), ("b",), ("c",), ("d",), ("a",)]


def test_an_objective_has_a_direction_and_its_best_point(tmp_path: Path) -> None:
    assert objectives(None, "val/acc1", {}) == (Objective("val/acc1", False),)
    both = objectives(["val/loss", "max perf/samples_per_s"], "val/acc1", {})
    assert both == (Objective("val/loss", True), Objective("perf/samples_per_s", False))
    lines = [
        '{"epoch": 0, "metrics": {"val/loss": 0.5}}',
        '{"epoch": 1, "metrics": {"val/loss": NaN}}',
        '{"epoch": 2, "me',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert measured(tmp_path, both) == {"val/loss": 0.5}


def test_the_best_of_several_objectives_are_those_that_no_job_beats_in_all() -> None:
    both = objectives(["val/loss", "val/acc1"], "", {})
    rows = [
        sweep_table.Row((f"a={loss}",), Result("done", "x"), "val/loss", both, {"val/loss": loss, "val/acc1": right})
        for loss, right in ((0.3, 0.7), (0.2, 0.6), (0.4, 0.65), (0.5, 0.9))
    ]
    assert sweep_table.front(rows) == [0, 1, 3] and sweep_table.in_order(rows) == [1, 0, 2, 3]


def test_jobs_side_by_side_are_those_one_after_the_other(tmp_path: Path) -> None:
    for name, words in (("one", ()), ("beside", (BESIDE,))):
        (tmp_path / name).mkdir()
        done = trainer(*SMALL, "epochs=2", "optimizer.lr=0.1,1e9,0.01", *words, cwd=tmp_path / name)
        assert done.returncode == 1, done.stdout + done.stderr
        assert statuses(tmp_path / name) == {"0": "done", "1": "failed", "2": "done"}
    for job in "02":
        assert losses(tmp_path / "beside" / "sweep" / job) == losses(tmp_path / "one" / "sweep" / job) != []
    assert "job 1 failed: The loss is nan" in done.stdout and "*" in done.stdout.partition("Sweep\n")[2]
    again = trainer(*SMALL, "epochs=2", "optimizer.lr=0.1,1e9,0.01", BESIDE, "sweep.resume=true", cwd=tmp_path / name)
    assert "job 0" not in again.stdout.partition("Sweep\n")[0] and "job 1 failed" in again.stdout, again.stdout


@pytest.mark.all
def test_ctrl_c_leaves_a_table_and_a_killed_job_ends_alone(tmp_path: Path) -> None:
    sweep = start(*SMALL, "epochs=4000", "seed=1,2,3", BESIDE, cwd=tmp_path)
    screen = tmp_path / "screen.txt"

    def trains(job: int) -> bool:
        log = tmp_path / "sweep" / str(job) / "metrics.jsonl"
        return log.exists() and '"val/' in log.read_text()

    try:
        pace.wait_for(lambda: trains(0) and trains(1), 120, "two jobs train")
        slots = [
            one
            for one in psutil.Process(sweep.pid).children(recursive=True)
            if "trainer.cli.sweep_slot" in one.cmdline()
        ]
        assert len(slots) == 2
        slots[0].kill()
        pace.wait_for(lambda: trains(2), 120, "the third job has the place of the killed one")
        os.kill(sweep.pid, signal.SIGINT)
        assert sweep.wait(60) == 130
    finally:
        sweep.kill()
    said = screen.read_text()
    assert "failed: its process was killed by SIGKILL (out of memory?)" in said
    assert sorted(statuses(tmp_path).values()) == ["failed", "killed", "killed"]
    assert said.rstrip().splitlines()[-1].endswith("hydra.sweep.dir=sweep resume=auto")
    pace.wait_for(lambda: not any(one.is_running() and one.status() != "zombie" for one in slots), 20, "none is left")


@pytest.mark.all
def test_a_job_that_waited_at_a_rung_ends_as_one_that_did_not(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    words = ("sweep=optuna", "sweep.pruner=asha", "sweep.trials=3", "optimizer.lr=interval(0.01,0.1)")
    done = trainer(*SMALL, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = statuses(tmp_path)
    assert sorted(found.values()) == ["done", "pruned", "pruned"], done.stdout
    [best] = [job for job, status in found.items() if status == "done"]
    own = (tmp_path / "sweep" / best / ".hydra" / "overrides.yaml").read_text()
    rate = next(line for line in own.splitlines() if "optimizer.lr" in line).removeprefix("- ")
    assert f"job {best} waits" in done.stdout and f"job {best} of 3 goes on" in done.stdout
    whole = trainer(*(word for word in SMALL[1:-1]), rate, "hydra.run.dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "sweep" / best) == losses(tmp_path / "whole") != []


def test_a_refused_point_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    words = ("optimizer.lr=0.1,0.2", "model.image_size=8,-1", BESIDE, "tracking=mlflow")
    sweep = start(*SMALL, *words, cwd=tmp_path)
    found: dict[int, psutil.Process] = {}

    def is_over() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update({one.pid: one for one in psutil.Process(sweep.pid).children(recursive=True)})
        return sweep.poll() is not None

    try:
        pace.wait_for(is_over, 120, "the sweep is refused")
    finally:
        sweep.kill()
    assert sweep.returncode == 2 and found, "the imports of its processes run beside the checks"
    pace.wait_for(lambda: not any(one.is_running() for one in found.values()), 20, "its processes have ended")
    assert [one.name for one in tmp_path.iterdir()] == ["screen.txt"]


@pytest.mark.all
def test_jobs_side_by_side_are_in_the_folder_of_a_sweep_that_is_named_by_the_time(tmp_path: Path) -> None:
    words = ("seed=1,2", "epochs=1", BESIDE, "hydra.sweep.subdir=${seed}_${now:%f}")
    done = trainer(*SMALL[:-1], *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [table] = tmp_path.rglob("sweep.csv")
    jobs = [path.parent for path in sorted(tmp_path.rglob("result.json"))]
    assert len(jobs) == 2 and {job.parent for job in jobs} == {table.parent}
    with table.open() as rows:
        assert all(float(row["val/loss"]) > 0 for row in csv.DictReader(rows))


def test_only_what_is_appended_to_a_jobs_points_is_read(tmp_path: Path) -> None:
    file, followed = tmp_path / "metrics.jsonl", Followed(tmp_path, "val/loss")
    lines = [f'{{"x": "{"-" * 300}", "epoch": {epoch}, "metrics": {{"val/loss": 0.{epoch}}}}}\n' for epoch in range(6)]
    assert followed.points() == []
    file.write_text("".join(lines[:2]) + lines[2][:9])
    assert followed.points() == [(0, 0.0), (1, 0.1)]
    file.write_text(lines[5] + "".join(lines[1:4]))  # what has been read is not read again
    assert followed.points() == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    file.write_text(lines[5])  # cut at a checkpoint
    assert followed.points() == [(5, 0.5)]
    file.write_text("".join(lines[:5]))  # cut, and already as long again
    assert followed.points() == [(epoch, epoch / 10) for epoch in range(5)]


@pytest.mark.all
def test_after_a_failure_on_error_stop_starts_no_other_job(tmp_path: Path) -> None:
    words = ("epochs=1", "optimizer.lr=1e9,0.1,0.2,0.3,0.4,0.5", BESIDE, "sweep.on_error=stop")
    done = trainer(*SMALL, *words, cwd=tmp_path)
    found = statuses(tmp_path)
    assert done.returncode == 1 and "sweep.on_error=stop: no other job is started" in done.stdout
    assert (found["0"], found["1"], found["5"]) == ("failed", "done", "not started"), found


@pytest.mark.all
def test_jobs_that_find_no_room_fail_with_a_sentence_and_the_table_is_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1500k") as place:
        done = trainer(*SMALL[:-1], "epochs=2", "seed=1,2,3,4", BESIDE, f"hydra.sweep.dir={place}/sweep", cwd=tmp_path)
        found = statuses(place)
    assert done.returncode == 1 and "MiB are free there" in done.stdout, done.stdout + done.stderr
    assert {"done", "failed"} == set(found.values()) and len(found) == 4


@pytest.mark.all
def test_a_sweep_whose_command_was_killed_goes_on(tmp_path: Path) -> None:
    words = (*SMALL, "epochs=40", "seed=1,2,3", BESIDE)
    sweep = start(*words, cwd=tmp_path)
    try:
        log = tmp_path / "sweep" / "2" / "metrics.jsonl"
        pace.wait_for(lambda: log.exists() and '"val/' in log.read_text(), 120, "the third job trains")
        slots = psutil.Process(sweep.pid).children(recursive=True)
        os.kill(sweep.pid, signal.SIGKILL)
        sweep.wait(20)
    finally:
        sweep.kill()
    done = [job for job in "012" if (tmp_path / "sweep" / job / "result.json").exists()]
    before = {job: (tmp_path / "sweep" / job / "metrics.jsonl").read_bytes() for job in done}
    assert done and len(done) < 3
    refused = trainer(*words, cwd=tmp_path)
    assert refused.returncode == 2 and "resume=auto" in refused.stderr, refused.stderr
    again = trainer(*words, "sweep.resume=true", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert set(statuses(tmp_path).values()) == {"done"}
    assert all((tmp_path / "sweep" / job / "metrics.jsonl").read_bytes() == points for job, points in before.items())
    assert not any(one.is_running() and "trainer.cli.sweep_slot" in one.cmdline() for one in slots)
