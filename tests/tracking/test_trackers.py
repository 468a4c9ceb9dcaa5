"""Every point is there once in each tracker, as the tracker's own reader finds it."""

from __future__ import annotations

import json
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.pace import wait_for
from tests.tracking.test_resumed_points import write
from trainer.errors import UserError
from trainer.run_folder import tracking_file
from trainer.run_folder.reset_files import reset_to_checkpoint
from trainer.run_folder.tracking_file import position
from trainer.tracking import tensorboard_tracker, trackers, wandb_tracker
from trainer.tracking.contract import Point, TrackedRun, Tracker
from trainer.tracking.follower import Follower, OpenRun
from trainer.tracking.recorder import Recorder
from trainer.tracking.resumed import goes_on
from trainer.tracking.tensorboard_tracker import TensorBoardTracker
from trainer.tracking.wandb_tracker import WandbTracker

Counts = Counter[tuple[str, int]]


def in_file(run_dir: Path) -> Counts:
    """How often each name and update is in metrics.jsonl."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return Counter((name, line["step"]) for line in lines for name in line["metrics"])


def in_tensorboard(run_dir: Path) -> Counts:
    """The same as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return Counter((name, event.step) for name in found.Tags()["scalars"] for event in found.Scalars(name))


def in_wandb(run_dir: Path) -> Counts:
    """The same in the files that ``wandb sync`` sends."""
    found: Counts = Counter()
    for file in (run_dir / "wandb").glob("offline-run-*/*.wandb"):
        for record in wandb_records(file):
            if record.HasField("history"):
                keys = ((item.key or item.nested_key[0], item.value_json) for item in record.history.item)
                row = {key: json.loads(value) for key, value in keys}
                found += Counter((key, row["update"]) for key in row if key != "update" and not key.startswith("_"))
    return found


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a file of wandb: blocks of 32 KiB; each piece has checksum, length and type before it."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        piece = content[place + 7 : place + 7 + size]
        place += 7 + size
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            yield Record.FromString(whole)


def followed(tracker: Tracker, resumed: bool = False) -> Follower:
    """The follower of a life of a run in the tracker's folder."""
    run = TrackedRun(str(tracker.run_dir), "r", "e", "17" * 16, params={"lr": 0.1}, resumed=resumed)
    run, positions = goes_on(run, print)
    return Follower("it", tracker, OpenRun(run, positions, print))


def lives(make: type[Tracker], run_dir: Path) -> tuple[Follower, Follower]:
    """Two lives of a run: the first is killed after update 60, the second goes on from update 40."""
    first = followed(make(run_dir))
    kept = write(run_dir, 0, 40, 1000)
    first.try_once()
    write(run_dir, 40, 60, 1000)
    first.try_once()
    first.tracker.close()
    if first.ledger is not None:
        first.ledger.file.close()  # as the kernel does
    reset_to_checkpoint(run_dir, kept, print)
    second = followed(make(run_dir), resumed=True)
    write(run_dir, 40, 50, 9000)
    second.try_once()
    write(run_dir, 50, 90, 9000)
    assert second.finish("FINISHED", {}, 5.0)["error"] == ""
    return first, second


def test_tensorboard_has_every_point_of_two_lives_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first, second = lives(TensorBoardTracker, tmp_path)
    assert in_tensorboard(tmp_path) == in_file(tmp_path)
    assert first.position.id == second.position.id


def test_wandb_offline_has_every_point_of_two_lives_once_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    first, second = lives(WandbTracker, tmp_path)
    wait_for(lambda: in_wandb(tmp_path) == in_file(tmp_path), 20, "wandb's own process has written all points once")
    assert first.position.id == second.position.id
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{first.position.id}"}


class Kept(Tracker):
    """Keeps points in a list that all of its instances share; cannot be asked for them."""

    points: list[Point] = []
    failing = 0

    def where(self) -> str:
        return "a list"

    def start(self, run: TrackedRun, before: str | None) -> str:
        return before or "1"

    def log(self, points: Sequence[Point]) -> None:
        if self.failing:
            type(self).failing -= 1
            raise OSError("no room")
        self.points.extend(points)


@pytest.fixture(autouse=True)
def empty() -> None:
    Kept.points.clear()
    Kept.failing = 0


@pytest.mark.parametrize("failing", [0, 1])
def test_a_tracker_that_cannot_be_asked_gets_every_point_of_two_lives_once(failing: int, tmp_path: Path) -> None:
    Kept.failing = failing
    lives(Kept, tmp_path)
    assert Counter((point.name, point.step) for point in Kept.points) == in_file(tmp_path)


def test_a_batch_that_tensorboard_had_when_the_recorder_was_killed_is_not_written_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = followed(TensorBoardTracker(tmp_path))
    write(tmp_path, 0, 40, 1000)
    note = first.opened.note

    def killed(name: str, position: tracking_file.Position) -> None:
        if position.sent_bytes:
            raise KeyboardInterrupt
        note(name, position)

    first.opened.note = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.try_once()
    assert not position(tmp_path, "it").sent_bytes and in_tensorboard(tmp_path) == in_file(tmp_path)
    followed(TensorBoardTracker(tmp_path), resumed=True).finish("FINISHED", {}, 5.0)
    assert in_tensorboard(tmp_path) == in_file(tmp_path)


def test_another_run_in_the_same_folder_begins_with_empty_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for _ in range(2):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        write(tmp_path, 0, 9, 1000)
        followed(TensorBoardTracker(tmp_path)).finish("FINISHED", {}, 5.0)
    assert in_tensorboard(tmp_path) == in_file(tmp_path)


class Hangs(Kept):
    """Answers nothing until the test allows it."""

    free = threading.Event()

    def log(self, points: Sequence[Point]) -> None:
        self.free.wait(60)


class Breaks(Kept):
    """Takes nothing."""

    def log(self, points: Sequence[Point]) -> None:
        raise ConnectionError("broken for good")


def test_one_tracker_that_hangs_and_one_that_breaks_do_not_harm_the_third(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Hangs.free.clear()
    nodes = {name: {"_target_": f"{__name__}.{name}"} for name in ("Hangs", "Breaks", "Kept")}
    recorder = Recorder()
    write(tmp_path, 0, 20, 1000)
    run = TrackedRun(str(tmp_path), trackers=nodes)
    recorder.obey({"do": "open", "folder": str(tmp_path), "run": asdict(run), "secrets": []})
    wait_for(lambda: bool(Kept.points), 30, "the third has points")
    wait_for(lambda: "broken for good" in position(tmp_path, "Breaks").error, 30, "the error is in tracking.json")
    recorder.obey({"do": "close", "folder": str(tmp_path), "status": "FINISHED", "tags": {}, "timeout_s": 0.5})
    said = ""

    def closed() -> list[str]:
        nonlocal said
        said += capfd.readouterr().out
        return sorted(json.loads(line)["tracker"] for line in said.splitlines() if "closed" in line)

    wait_for(lambda: closed() == ["Breaks", "Kept"], 30, "two have ended")
    answers = {a["tracker"]: a for a in map(json.loads, said.splitlines()) if "closed" in a}
    assert answers["Kept"]["unsent"] == 0 and not answers["Kept"]["error"]
    assert answers["Breaks"]["unsent"] == 23 and answers["Breaks"]["error"] == "broken for good"
    assert said.count("Breaks: points cannot be sent (broken for good); training goes on") == 1
    Hangs.free.set()
    recorder.end()
    assert Counter((point.name, point.step) for point in Kept.points) == in_file(tmp_path)


@pytest.mark.parametrize(
    ("module", "tracker", "extra"),
    [(tensorboard_tracker, TensorBoardTracker, "tensorboard"), (wandb_tracker, WandbTracker, "wandb")],
)
def test_a_missing_package_is_refused_with_the_extra_that_brings_it(
    module: Any, tracker: type[Tracker], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"tracking={extra}: needs the package {extra}.*trainer\[{extra}\]"):
        tracker(tmp_path).check()


def test_wandb_without_login_or_with_an_unknown_mode_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no login.*tracking\.trackers\.wandb\.mode=offline"):
        WandbTracker(tmp_path).check()
    with pytest.raises(UserError, match="must be online or offline"):
        WandbTracker(tmp_path, mode="somewhere").check()
    WandbTracker(tmp_path, mode="offline").check()


def test_a_class_that_is_no_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tracking\.trackers\.x\._target_=.*nothing: is no "):
        trackers.made("x", {"_target_": "tests.tracking.test_trackers.nothing"}, tmp_path)


def nothing(run_dir: Path) -> Path:
    """Stands for a class that is no tracker."""
    return run_dir
