"""A run that goes on is one MLflow run: a point that was sent, cut off and written again is there once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.reset_files import reset_to_checkpoint
from trainer.run_folder.tracking_file import Position
from trainer.tracking import recorder, resend
from trainer.tracking.contract import TrackedRun
from trainer.tracking.follower import Follower, OpenRun
from trainer.tracking.mlflow_tracker import MlflowTracker
from trainer.tracking.resumed import goes_on

KEPT, WRITTEN = 40, 60
"""Updates of which the points stay, and updates that the first life has done."""


class Gone(Exception):
    """What MLflow raises for a run that is not there."""

    error_code = "RESOURCE_DOES_NOT_EXIST"


class Store:
    """A tracking server that keeps what it is sent, and fails at calls of a name that a test chooses."""

    def __init__(self) -> None:
        self.runs: dict[str, Any] = {}
        self.points: dict[str, list[Any]] = {}
        self.failing: list[str] = []

    def _called(self, name: str) -> str:
        """How this call fails; empty: it does not."""
        if self.failing and self.failing[0].startswith(name):
            return self.failing.pop(0)
        return ""

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="0", tags={"mlflow.experimentKind": "x"})

    def search_runs(self, *told: Any, **more: Any) -> list[Any]:
        return []

    def create_run(self, experiment_id: str, start_time: int, tags: dict[str, str], run_name: str) -> Any:
        name = f"run{len(self.runs)}"
        info = SimpleNamespace(run_id=name, experiment_id="0", lifecycle_stage="active", status="RUNNING")
        self.runs[name] = SimpleNamespace(info=info, data=SimpleNamespace(params={}, tags=dict(tags)))
        self.points[name] = []
        return self.runs[name]

    def get_run(self, run_id: str) -> Any:
        if self._called("get_run"):
            raise ConnectionError("away")
        if run_id not in self.runs:
            raise Gone(run_id)
        return self.runs[run_id]

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].info.status = status

    set_terminated = update_run

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[run_id].data.tags[key] = value

    def delete_tag(self, run_id: str, key: str) -> None:
        del self.runs[run_id].data.tags[key]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        held = self.runs[run_id].data.params
        for param in params:
            if held.setdefault(param.key, param.value) != param.value:
                raise ValueError(f"Changing param values is not allowed: {param.key}")
        how = self._called("log_batch") if metrics else ""
        if how == "log_batch before":
            raise ConnectionError("away")
        self.points[run_id] += metrics[: len(metrics) // 2] if how == "log_batch half" else metrics
        if how:
            raise ConnectionError("reply lost")

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        if self._called("history"):
            raise ConnectionError("away")
        return [m for m in self.points[run_id] if m.key == key]


def test_a_run_that_a_platform_has_opened_is_used_once(tmp_path: Path) -> None:
    store = Store()
    store.runs["theirs"] = store.create_run("0", 0, {"mlflow.runName": "job-17"}, "job-17")
    store.runs["theirs"].info.run_id, store.points["theirs"] = "theirs", []
    before = len(store.runs)
    (first := tmp_path / "first").mkdir()
    follower = followed(first, store, join="theirs", tags={"trainer.run_dir": str(first)})
    follower.try_once()
    assert follower.position.id == "theirs" and len(store.runs) == before and not follower.position.error
    assert store.runs["theirs"].data.params == {"lr": "1", "workers": "2"}
    assert store.runs["theirs"].data.tags["trainer.run_dir"] == str(first)
    (second := tmp_path / "second").mkdir()
    other = followed(second, store, join="theirs", tags={"trainer.run_dir": str(second)})
    other.try_once()
    assert other.position.id not in (None, "theirs"), "points of two runs would be mixed"


def described(run_dir: Path, **more: Any) -> TrackedRun:
    """A run as its trackers get it; ``uri``, ``join`` and ``models`` are MLflow's own."""
    own = {name: more.pop(name) for name in ("uri", "join", "models", "registered_model") if name in more}
    usual: dict[str, Any] = {"tags": {"t": "1"}, "params": {"lr": 1, "workers": 2}, "opened": "17"}
    node = {"_target_": "trainer.tracking.mlflow_tracker.MlflowTracker"}
    mlflow = {"uri": "sqlite:///a.db", **own}
    run = TrackedRun(str(run_dir), "r", "e", trackers={"mlflow": node}, mlflow=mlflow)
    return replace(run, **{**usual, **more})


def following(
    run: TrackedRun, positions: dict[str, Position], store: Any, kind: type[MlflowTracker] = MlflowTracker
) -> Follower:
    """The follower of a run into a store that stands for MLflow's server."""
    tracker = kind(Path(run.folder))
    tracker.client = store
    return Follower("mlflow", tracker, OpenRun(run, positions, print))


def followed(run_dir: Path, store: Any, **more: Any) -> Follower:
    """The follower of a new life of the run."""
    return following(*goes_on(described(run_dir, **more), print), store)


def again(follower: Follower) -> None:
    """Try once, however short ago it was tried."""
    follower.retry_at = 0.0
    follower.try_once()


def write(run_dir: Path, first: int, last: int, time: int) -> int:
    """Points of these updates, of which some have two of a name; returns the bytes of the file."""
    path = run_dir / "metrics.jsonl"
    with path.open("a") as file:
        for step in range(first, last):
            for _ in range(1 + (step % 7 == 0)):
                values = {"loss": 1.0 / (step + 1), "system/0/cpu": float(time)}
                file.write(json.dumps({"time": time + step, "step": step, "epoch": 0, "metrics": values}) + "\n")
    return path.stat().st_size


def counts(store: Store, run_id: str, run_dir: Path) -> tuple[Counter[Any], Counter[Any]]:
    """How often each name and update is at the server, and in the file."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return (
        Counter((m.key, m.step) for m in store.points[run_id]),
        Counter((name, line["step"]) for line in lines for name in line["metrics"]),
    )


def first_life(run_dir: Path, store: Store, failing: list[str], parts: int = 3) -> int:
    """Points are written and sent in parts; then the run is killed. Returns the bytes at the checkpoint."""
    follower = followed(run_dir, store)
    store.failing = list(failing)
    ends = sorted({KEPT, *(WRITTEN * part // parts for part in range(1, parts + 1))})
    kept = began = 0
    for end in ends:
        size = write(run_dir, began, end, 1000)
        kept, began = (size if end == KEPT else kept), end
        again(follower)
    store.failing = []
    return kept


def cut(run_dir: Path, kept: int) -> None:
    """What the next life's launcher does."""
    reset_to_checkpoint(run_dir, kept, print)


SENT: list[list[str]] = [
    [],
    ["log_batch before"] * 9,
    ["log_batch half"],
    ["log_batch half", "log_batch half"],
    ["log_batch after"] * 5,
    ["log_batch half", "history", "log_batch after", "history"],
]


@pytest.mark.parametrize("failing", SENT, ids=str)
@pytest.mark.parametrize("kills", [0, 1, 2])
@pytest.mark.parametrize("later", [[], ["get_run", "history", "log_batch half", "history", "log_batch after"]], ids=str)
def test_points_of_two_lives_are_there_once(tmp_path: Path, failing: list[str], kills: int, later: list[str]) -> None:
    store = Store()
    kept = first_life(tmp_path, store, failing)
    cut(tmp_path, kept)
    for kill in range(kills):  # before anything is sent again, and after a part
        write(tmp_path, KEPT, KEPT + 3 * kill + 1, 2000 + kill)
        if kill:
            follower = followed(tmp_path, store, resumed=True)
            store.failing = ["log_batch half"]
            again(follower)
        cut(tmp_path, kept)
    follower = followed(tmp_path, store, resumed=True)
    store.failing = list(later)
    write(tmp_path, KEPT, 50, 9000)
    again(follower)
    write(tmp_path, 50, 90, 9000)
    for _ in range(8):
        again(follower)
    assert not follower.position.error and list(store.runs) == ["run0"]
    there, wanted = counts(store, "run0", tmp_path)
    assert there == wanted


def test_points_that_a_power_cut_took_are_not_sent_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store()
    kept = first_life(tmp_path, store, [])
    with (tmp_path / "metrics.jsonl").open("r+b") as file:
        file.truncate(kept // 2)
    cut(tmp_path, kept)
    assert "is shorter than it was at the checkpoint" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    write(tmp_path, KEPT, 90, 9000)
    again(followed(tmp_path, store, resumed=True))
    there, wanted = counts(store, "run0", tmp_path)
    assert not wanted - there
    assert all(step < KEPT for _, step in there - wanted), "only what the file has lost is at the server alone"


def test_changed_parameters_are_tags_and_the_end_before_is_forgotten(tmp_path: Path) -> None:
    store = Store()
    cut(tmp_path, first_life(tmp_path, store, []))
    store.runs["run0"].info.status = "KILLED"
    store.runs["run0"].data.tags |= {"trainer.error": "broke", "trainer.changed.old": "1", "own": "stays"}
    again(followed(tmp_path, store, resumed=True, params={"lr": 1, "workers": 3, "new": 4}, tags={"t": "2"}))
    run = store.runs["run0"]
    assert run.info.status == "RUNNING" and run.data.params == {"lr": "1", "workers": "2", "new": "4"}
    opened = {k: v for k, v in run.data.tags.items() if k != "trainer.opened"}
    assert opened == {"t": "2", "own": "stays", "trainer.changed.workers": "3"}


@pytest.mark.parametrize("gone", ["deleted", "unknown", "another address", "another experiment"])
def test_where_the_run_is_not_there_another_gets_all_points(tmp_path: Path, gone: str) -> None:
    store, more = Store(), dict[str, Any]()
    cut(tmp_path, first_life(tmp_path, store, []))
    write(tmp_path, KEPT, 50, 9000)
    if gone == "deleted":
        store.runs["run0"].info.lifecycle_stage = "deleted"
    elif gone == "unknown":
        store.runs = {"other": store.runs["run0"]}
    else:
        more = {"uri": "http://b"} if gone == "another address" else {"experiment": "f"}
    before = set(store.runs)
    follower = followed(tmp_path, store, resumed=True, **more)
    again(follower)
    [new] = set(store.runs) - before
    there, wanted = counts(store, new, tmp_path)
    assert there == wanted and store.runs[new].data.tags["trainer.resumed_from"] == "run0"


def test_resend_sends_what_a_resumed_run_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    store = Store()
    cut(tmp_path, first_life(tmp_path, store, []))
    followed(tmp_path, store, resumed=True, artifacts=[])  # and the server is away until the end
    write(tmp_path, KEPT, 90, 9000)
    (tmp_path / "result.json").write_text('{"status": "done", "best_step": 0, "steps": 90}')
    monkeypatch.setattr(mlflow, "MlflowClient", lambda tracking_uri: store)
    assert resend.resend(tmp_path) == 0
    there, wanted = counts(store, "run0", tmp_path)
    assert there == wanted and store.runs["run0"].info.status == "FINISHED"


def test_resend_of_a_run_that_goes_on_is_refused_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else its MLflow run would be ended, and its points sent twice."""
    import mlflow

    store = Store()
    again(followed(tmp_path, store))
    write(tmp_path, 0, 9, 1000)
    monkeypatch.setattr(mlflow, "MlflowClient", lambda tracking_uri: store)
    launcher, before = FolderLock(tmp_path), (tmp_path / "tracking.json").read_bytes()
    assert launcher.share()
    assert recorder.main(["resend", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "processes of a run still work in this folder" in said and "the same command when that run has ended" in said
    assert store.runs["run0"].info.status == "RUNNING" and not store.points["run0"]
    assert (tmp_path / "tracking.json").read_bytes() == before
    launcher.leave()
    assert recorder.main(["resend", str(tmp_path)]) == 0
    assert store.runs["run0"].info.status == "KILLED" and store.points["run0"]


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        *((file, text) for file in ("result.json", "tracking.json") for text in ('{"a', "[]", "[" * 5000)),
        ("tracking.json", '{"run": 1, "trackers": {}}'),
        ("no run", ""),
    ],
    ids=lambda text: text[:13],
)
def test_resend_refuses_what_it_cannot_read_and_leaves_nothing(
    damaged: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    store = Store()
    if damaged != "no run":
        again(followed(tmp_path, store))
        write(tmp_path, 0, 9, 1000)
        (tmp_path / damaged).write_text(text)
    monkeypatch.setattr(mlflow, "MlflowClient", lambda tracking_uri: store)
    there = sorted(tmp_path.iterdir())
    code, said = recorder.main(["resend", str(tmp_path)]), capsys.readouterr().err
    assert code == 2 and said.startswith(f"error: resend {tmp_path}: ") and said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == there
    if damaged == "result.json":
        assert "result.json in it cannot be read" in said and f"rm {tmp_path}/result.json, and the same" in said
        (tmp_path / damaged).unlink()
        assert recorder.main(["resend", str(tmp_path)]) == 0 and store.points["run0"]


def test_an_experiment_that_another_run_makes_meanwhile_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Raced(Store):
        asked = 0

        def get_experiment_by_name(self, name: str) -> Any:
            self.asked += 1
            return None if self.asked == 1 else super().get_experiment_by_name(name)

        def create_experiment(self, name: str, tags: dict[str, str]) -> str:
            raise ValueError(
                "(sqlite3.IntegrityError) UNIQUE constraint failed: experiments.workspace, experiments.name"
            )

    follower = followed(tmp_path, Raced())
    again(follower)
    assert (follower.position.id, follower.position.error) == ("run0", "")
