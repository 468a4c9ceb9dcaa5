"""The end of a run waits for a tracker as long as it can still take points, and says so; time is played."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tracking.test_resumed_points import write
from tests.tracking.test_trackers import Kept, followed, in_file
from trainer.run_folder import tracking_file
from trainer.run_folder.tracking_file import Position, Tracked
from trainer.tracking import client, follower
from trainer.tracking.contract import Point


class Clock:
    """A clock that sleeping moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    Kept.points.clear()
    monkeypatch.setattr(follower, "time", clock := Clock())
    return clock


class Service(Kept):
    """Fails as its service does at this time of the clock: ``error_at(seconds)`` gives the error, or None."""

    def __init__(self, run_dir: Path, clock: Clock, error_at: Callable[[float], Exception | None]) -> None:
        super().__init__(run_dir)
        self.clock, self.began, self.error_at, self.only_end = clock, clock.now, error_at, False

    def asked(self) -> None:
        if (error := self.error_at(self.clock.now - self.began)) is not None:
            raise error

    def log(self, points: Sequence[Point]) -> None:
        if not self.only_end:
            self.asked()
        self.points.extend(points)

    def finish(self, status: str, tags: Mapping[str, str]) -> None:
        self.asked()


def refusal() -> Exception:
    """As requests and MLflow raise it: the system's error is the cause of the cause."""
    outer = RuntimeError("API request to http://127.0.0.1:5999 failed")
    outer.__cause__ = OSError("Max retries exceeded")
    outer.__cause__.__context__ = ConnectionRefusedError(111, "Connection refused")
    return outer


def busy() -> Exception:
    return OSError("503 Service Unavailable")


ENDS: dict[str, tuple[Callable[[float], Exception | None], float, float]] = {  # trouble, flush_timeout_s, waited
    "no trouble": (lambda s: None, 60.0, 0.0),
    "refused": (lambda s: refusal(), 60.0, 10.0),
    "refused, and little time": (lambda s: refusal(), 2.0, 2.0),
    "busy": (lambda s: busy(), 60.0, 60.0),
    "refused after it was busy": (lambda s: busy() if s < 20 else refusal(), 60.0, 30.0),
    "busy after it was refused": (lambda s: refusal() if s < 4 else busy(), 60.0, 60.0),
}


@pytest.mark.parametrize("only_end", [False, True], ids=["points are unsent", "only the end is unsent"])
@pytest.mark.parametrize("name", ENDS)
def test_refused_connections_end_the_wait_early(name: str, only_end: bool, clock: Clock, tmp_path: Path) -> None:
    trouble, timeout_s, waited = ENDS[name]
    service = Service(tmp_path, clock, trouble)
    service.only_end = only_end
    write(tmp_path, 0, 9, 1000)
    ended = followed(service).finish("FINISHED", {}, timeout_s)
    assert (ended["error"] == "") == (waited == 0.0)
    # between two tries are at most 16 s, after which a new sort of answer is known
    late = 16.0 if name == "refused after it was busy" else 0.3
    assert waited <= clock.now - service.began <= waited + late


@pytest.mark.parametrize("back", [2.0, 6.9, 9.9])
def test_a_service_that_is_back_within_the_wait_gets_everything(back: float, clock: Clock, tmp_path: Path) -> None:
    write(tmp_path, 0, 9, 1000)
    service = Service(tmp_path, clock, lambda s: refusal() if s < back else None)
    assert followed(service).finish("FINISHED", {}, 60.0)["error"] == ""
    assert Counter((point.name, point.step) for point in Kept.points) == in_file(tmp_path)


@pytest.mark.parametrize("back", [600.0, 602.9, 700.0])
def test_a_service_that_was_away_for_long_is_asked_at_once_and_for_three_seconds(
    back: float, clock: Clock, tmp_path: Path
) -> None:
    write(tmp_path, 0, 9, 1000)
    service = Service(tmp_path, clock, lambda s: refusal() if s < back else None)
    one = followed(service)
    while clock.now < service.began + 600:
        one.try_once()
        clock.sleep(1.0)
    ended = one.finish("FINISHED", {}, 60.0)
    assert (ended["error"] == "") == (back < 603) and clock.now - service.began <= 603.3


@pytest.mark.parametrize("error", ["127.0.0.1:5999: connection refused", ""])
def test_the_screen_says_for_what_the_end_waits_and_how_long(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SILENT_S", 0.01)
    monkeypatch.setattr(client, "LONG_S", 0.05)
    lines: list[str] = []
    answers: queue.Queue[dict[str, object]] = queue.Queue()
    answer = {"closed": str(tmp_path), "id": "1", "where": "", "group": "", "unsent": 4, "error": error}

    def say(line: str) -> None:
        lines.append(line)
        answers.put({**answer, "tracker": "mlflow"})

    tracking_file.write(tmp_path, Tracked({}, {"mlflow": Position(error=error), "csv": Position()}))
    answers.put({**answer, "tracker": "csv"})
    process = SimpleNamespace(trackers={"mlflow": {}, "csv": {}}, answers=answers, say=say)
    ended = dict(client.RecorderProcess._answers(process, tmp_path, 60.0))  # type: ignore[arg-type]
    of = f"mlflow ({error})" if error else "mlflow"
    assert lines == [f"waiting at most 60 s for {of} to get the rest of the run"]
    assert ended.keys() == {"mlflow", "csv"}
