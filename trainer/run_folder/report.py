"""A worker's reports: lines on its output; from rank 0 also metrics.jsonl and status.json."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.errors import why
from trainer.host.files import REFUSED, replace_file, start_empty
from trainer.host.pulse import Pulse
from trainer.metrics.best import AVERAGED, NOBODY, RAW, TESTED, Best, falls, unmeasured
from trainer.run_folder.json_files import leave
from trainer.run_folder.lives import number
from trainer.run_folder.points import Points

STATUS_EVERY_S = 0.5
KEPT = ("metrics", "best", "samples", "step", "line_step", "epoch", "elsewhere", "data_waited", "_validated")
"""Attributes that a resumed report restores."""
OWN = "[worker "
"""Prefix of lines with one worker's own values (execution.log_workers)."""
ALL_DONE = "all updates done"
"""The end of a run that is not stopped early."""


class Phase(Enum):
    """What a worker does, for its errors: it builds or loads, trains, evaluates, or predicts."""

    START = auto()
    TRAINING = auto()
    EVALUATION = auto()
    PREDICTION = auto()


class Waits(Protocol):
    """Protocol of anything that counts the seconds spent waiting for data."""

    waited: float


class Due(NamedTuple):
    """When a line was due, which may be printed later: ``time.perf_counter``, the time of its point in ms, and the
    seconds of waiting for data until then."""

    clock: float
    time_ms: int
    waited: float

    @staticmethod
    def now(feed: Waits) -> Due:
        """A line that is due now."""
        return Due(time.perf_counter(), int(time.time() * 1000), feed.waited)


class Window(NamedTuple):
    """The state at the start of a line's measurements.

    Attributes:
        time: without validations. step: updates. waited: seconds of waiting for data.
        samples: of all earlier lines. line_step: update of the last earlier line, which may be of an earlier life.
    """

    time: float
    step: int
    waited: float
    samples: int
    line_step: int

    def later(self, seconds: float) -> Window:
        """This window moved by ``seconds``, to leave out time that does not count."""
        return self._replace(time=self.time + seconds)


class Report:
    """Writes the lines, points (metrics.jsonl) and status of one worker.

    Args:
        run_dir: the run's folder; None: lines only (every rank but 0).
        total_steps: updates of the whole run.
        watched: validation metric whose best value marks the best model, e.g. ``val/acc1``.
        lower: of a user's own metrics, whether less is better.
        own: file of this worker's own progress, if workers have no common step.
        goes_on: append to the existing metrics.jsonl.
        pulse: the worker's pulse; None: nobody reads it.

    Attributes:
        who: prefix of lines with this worker's own values; empty: they look like all others.
        phase: what the worker does, or did when it failed.
    """

    def __init__(
        self,
        run_dir: Path | None,
        total_steps: int,
        watched: str = "val/acc1",
        lower: Mapping[str, bool] = NOBODY,
        own: Path | None = None,
        goes_on: bool = False,
        pulse: Pulse | None = None,
    ) -> None:
        self.own = own
        self.who = ""
        self.phase = Phase.START
        self.pulse = pulse or Pulse()
        self.run_dir = run_dir
        self.life = number(run_dir) if run_dir else 1
        self.watched = Best(watched, lower=lower)
        self.ended = ""
        self.total_steps = total_steps
        self.metrics: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.samples = self.line_step = 0
        self.step = 0
        self.epoch = 0
        self.data_waited = 0.0
        self.started = time.perf_counter()
        self.elsewhere = 0.0
        self._window = self._window_before = Window(self.started, 0, 0.0, 0, 0)
        self._next_status = 0.0
        self._validated = -1
        self._refused = self._unmeasured = False
        self._moved = 0
        if run_dir and not goes_on:
            start_empty(run_dir / "metrics.jsonl")
        self._points = Points(run_dir) if run_dir else None

    def doing(self, what: str) -> None:
        """Before the first update: report what the run waits for."""
        if self.run_dir and not self.step:
            status = {
                "state": "starting",
                "doing": what,
                "step": 0,
                "total": self.total_steps,
                "metrics": {},
                "life": self.life,
            }
            with self._if_the_disk_takes(path := self.run_dir / "status.json"):
                leave(path, status)

    def progress(self, epoch: int, step: int) -> None:
        """After every update: report the progress."""
        self.pulse.update(step)
        self.epoch, self.step = epoch, step
        now = time.perf_counter()
        if now >= self._next_status:
            if self.run_dir:
                self.write_status("running", now)
            if self.own:
                self._next_status = now + STATUS_EVERY_S
                with self._if_the_disk_takes(self.own):
                    leave(self.own, {"epoch": epoch, "step": step})

    def training(
        self,
        epoch: int,
        batch: int,
        step: int,
        metrics: Mapping[str, float],
        samples: float,
        lr: float,
        due: Due,
        gauges: Mapping[str, float] | None = None,
        rest: bool = False,
    ) -> None:
        """Report training since the last line, as a line and a point: metrics, rate, share of time waiting for data.

        After a validation that ends the run, the rest before it is only a point: its line would come too late.

        Args:
            samples: since the last line, over all workers.
            gauges: the strategy's own values.
            rest: the last few batches; their rate is averaged with that of the line before.
        """
        self.samples += int(samples)
        since = self._window_before if rest and self._window_before.step else self._window
        warm = since.step > 0 or step == self.total_steps  # the first batch includes the start
        seconds, updates = max(due.clock - since.time, 1e-9), max(step - since.step, 1)
        share = updates / max(step - since.line_step, updates)  # the updates of this life
        perf = {
            "perf/samples_per_s": (self.samples - since.samples) * share / seconds,
            "perf/step_s": seconds / updates,
            "perf/data_wait": (due.waited - since.waited) / seconds,
        }
        self._window_before, self._window = self._window, Window(due.clock, step, due.waited, self.samples, step)
        self.line_step = step
        self.data_waited = due.waited
        self.metrics |= {**{f"train/{k}": v for k, v in metrics.items()}, "lr": lr, **perf}
        values = ", ".join(f"{k}: {v:.5f}" for k, v in metrics.items()) or "no update"
        rate = f"{perf['perf/samples_per_s']:.1f} samples/s, data wait: {perf['perf/data_wait']:.1%}"
        if not (rest and step == self._validated):  # the validation ends the run, and was printed last
            print(
                f"{self.who if self.own else ''}[Epoch {epoch}, batch {batch}] {values}, lr: {lr:.5g}, {rate}",
                flush=True,
            )
        point = {**{f"train/{k}": v for k, v in metrics.items()}, "lr": lr, **(perf if warm else {}), **(gauges or {})}
        self._point(epoch, step, point, due.time_ms)

    def of_worker(self, epoch: int, batch: int, metrics: Mapping[str, float]) -> None:
        """Print a line with this worker's own metrics."""
        values = ", ".join(f"{k}: {v:.5f}" for k, v in metrics.items()) or "no sample"
        print(f"{self.who}[Epoch {epoch}, batch {batch}] {values}", flush=True)

    def validation(self, epoch: int, step: int, values: Mapping[str, float]) -> bool:
        """Report a validation as a line and a point; returns whether this model is the best so far.

        Args:
            values: ``val/...``, and ``val_ema/...`` of the averaged weights where there are such.
        """
        improved = self.watched.improved(step + self._moved, values.get(self.watched.metric))
        self.metrics |= values
        for name, value in values.items():
            better = min if falls(name, self.watched.lower) else max
            self.best[name] = better(value, self.best.get(name, value))
        for prefix, words in ((RAW, "validation"), (AVERAGED, "validation of the averaged weights")):
            shown = ", ".join(f"{k.removeprefix(prefix)}: {v:.5f}" for k, v in values.items() if k.startswith(prefix))
            if shown:
                print(f"[Epoch {epoch}] {words} {shown}", flush=True)
        if self.watched.metric not in values and not self._unmeasured:
            print(unmeasured(self.watched.metric), flush=True)
        self._unmeasured = self.watched.metric not in values
        self._validated = step
        self._point(epoch, step, values)
        if self.run_dir:
            self.write_status("running", time.perf_counter())
        return improved

    def test(self, epoch: int, step: int, values: Mapping[str, float], of: str) -> None:
        """Report the metrics of the test data, as a line and a point.

        Args:
            values: ``test/...``. of: the measured weights, in words.
        """
        self.metrics |= values
        shown = ", ".join(f"{name.removeprefix(TESTED)}: {value:.5f}" for name, value in values.items())
        print(f"[Epoch {epoch}] test {shown} ({of})", flush=True)
        self._point(epoch, step, values)
        if self.run_dir:
            self.write_status("running", time.perf_counter())

    def counted(self, metrics: Mapping[str, float]) -> None:
        """Write a point of metrics that belong to neither training nor validation."""
        self.metrics |= metrics
        self._point(self.epoch, self.step, metrics)

    def gauges(self, values: Mapping[str, float]) -> None:
        """Write a point of the strategy's own values."""
        if values:
            self._point(self.epoch, self.step, values)

    def system(self, node: int, time_ms: int, metrics: Mapping[str, float]) -> None:
        """Write a point of a host's load at a given time; can be called from any thread."""
        self._point(self.epoch, self.step, {f"system/{node}/{k}": v for k, v in metrics.items()}, time_ms)

    def take_over(self, run_dir: Path) -> None:
        """Take over reporting from a lost worker."""
        if self.run_dir is None:
            self.run_dir, self.life = run_dir, number(run_dir)
            self._points = Points(run_dir)
            self._begin_after(self._points)
            print("reports from here on", flush=True)

    def hand_over(self) -> None:
        """Stop reporting, because a worker with a lower rank has rejoined."""
        self.run_dir, self._moved = None, 0
        points, self._points = self._points, None
        try:
            if points is not None:
                points.close()
        except OSError as error:  # a full disk, which the other worker reports
            print(f"some of this worker's points are lost: {why(error)}", flush=True)

    def stopped(self, why: str) -> None:
        """Report that the run ends before its last epoch, and why."""
        self.ended = why
        print(f"*** {why} ***", flush=True)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: the time inside does not count as training time. A failure leaves the phase as it is."""
        start, before, self.phase = time.perf_counter(), self.phase, Phase.EVALUATION
        yield
        self.phase = before
        self.leave_out(time.perf_counter() - start)

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds, which have just passed, as training time."""
        self._window = self._window.later(seconds)
        self._window_before = self._window_before.later(seconds)
        self.elsewhere += seconds

    def _point(self, epoch: int, step: int, metrics: Mapping[str, float], time_ms: int | None = None) -> None:
        if self._points is not None:
            time_ms = int(time.time() * 1000) if time_ms is None else time_ms
            point = {"time": time_ms, "step": step + self._moved, "epoch": epoch, "metrics": dict(metrics)}
            self._points.add(json.dumps(point))

    def _begin_after(self, points: Points) -> None:
        """Continue the steps of the existing points. A worker without a common step that is behind adds the difference
        to its own steps, so that no curve runs backwards."""
        self._moved = max(0, points.last_step - self.step)

    def write_status(self, state: str, now: float) -> None:
        """Write status.json."""
        assert self.run_dir is not None
        self._next_status = now + STATUS_EVERY_S
        elapsed = now - self.started
        total = max(self.total_steps, self.step)  # without a common step it is an average
        left = (total - self.step) * elapsed / self.step if self.step else None
        status = {
            "state": state,
            "life": self.life,
            "epoch": self.epoch,
            "step": self.step,
            "total": total,
            "percent": round(100.0 * self.step / total, 1),
            "eta_s": None if left is None else round(left, 1),
            "elapsed_s": round(elapsed, 1),
            "metrics": self.metrics,
            "bests": self.best,
            "best": {"metric": self.watched.metric, "value": self.watched.value, "step": self.watched.step}
            if self.watched.value is not None
            else None,
        }
        with self._if_the_disk_takes(path := self.run_dir / "status.json"):
            replace_file(path, json.dumps(status, indent=1))

    @contextmanager
    def _if_the_disk_takes(self, path: Path) -> Iterator[None]:
        """Context manager: on a full disk a status file stays as it is, with one message."""
        try:
            yield
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            if not self._refused:
                print(f"ATTENTION: {path} cannot be written ({why(error)}); the training goes on", flush=True)
            self._refused = True
        else:
            self._refused = False

    @property
    def points(self) -> int | None:
        """The size of metrics.jsonl in bytes; None if another worker writes it."""
        points = self._points
        return points.size if points is not None else None

    def unwritten(self) -> str:
        """Why some points so far are not in metrics.jsonl yet; '' if all are."""
        points = self._points
        return points.unwritten() if points is not None else ""

    def state(self) -> dict[str, Any]:
        """The report's state, for :meth:`load`."""
        kept = {name: getattr(self, name) for name in KEPT}
        watched, metric = self.watched.state(), self.watched.metric
        return {"kept": kept, "watched": watched, "seconds": time.perf_counter() - self.started, "metric": metric}

    def load(self, kept: Mapping[str, Any], watched: tuple[float | None, int], seconds: float, metric: str) -> None:
        """Restore what :meth:`state` returned; no best value if it is of another ``best.metric``."""
        for name in KEPT:
            setattr(self, name, kept[name])
        if metric == self.watched.metric:
            self.watched.load(watched)
        self.pulse.update(self.step)
        if self._points is not None:
            self._begin_after(self._points)
        now = time.perf_counter()
        self.started = now - seconds
        self._window = self._window_before = Window(now, self.step, self.data_waited, self.samples, self.line_step)

    def forget(self, incomparable: Callable[[str], object]) -> None:
        """Forget the best values of metrics that measured something else before.

        Args:
            incomparable: whether a metric of that name measured something else.
        """
        self.best = {name: value for name, value in self.best.items() if not incomparable(name)}
        if incomparable(self.watched.metric):
            self.watched.load((None, 0))

    def outcome(self) -> dict[str, Any]:
        """The outcome of the run: final and best metrics, updates, samples, seconds."""
        seconds = time.perf_counter() - self.started
        return {
            "metrics": self.metrics,
            "best": self.best,
            "best_step": self.watched.step,
            "ended": self.ended or ALL_DONE,
            "steps": self.step,
            "samples": self.samples,
            "seconds": round(seconds, 3),
            "training_seconds": round(seconds - self.elsewhere, 3),
            "data_wait_seconds": round(self.data_waited, 3),
        }

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self._points is not None:
            self._points.close()
