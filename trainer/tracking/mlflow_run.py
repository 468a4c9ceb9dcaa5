"""Sends one run folder's files to one MLflow run, with nothing lost and nothing sent twice."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.errors import first_line
from trainer.run_folder import tracking_file
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.tracking_file import Remembered
from trainer.tracking import experiment_view, mlflow_settings, reopened_run
from trainer.tracking.points import Point, Sent, metrics_of, points_of, without
from trainer.tracking.recorder_answers import NO_ANSWER, UNREACHED, tell

BATCH = 1000
LONGEST_PAUSE_S = 30.0
OPENED = "trainer.opened"
KIND, TRAININGS = "mlflow.experimentKind", "custom_model_development"
"""What tells MLflow's pages which view of an experiment to open."""
LOGS = ("workerlog.*", "serverlog.*")
"""What processes printed, which may be anything; it is cleaned of secrets by who ends the run."""


@dataclass
class Follower:
    """Follows a run folder's metrics.jsonl into one MLflow run; every step can be retried.

    ``tracking.json`` in the folder remembers the MLflow run, how many bytes of metrics.jsonl have been acknowledged,
    and how many after these are in doubt: they were sent, and no answer came, because the server or this process went
    away. Of those the server is asked what it has, and the rest is sent, so that nothing is lost or sent twice. The
    same holds for opening the run: it is looked for by ``trainer.opened``, a number that no other has.

    A run that goes on from a checkpoint writes points again that may have been sent in the life before, at other times.
    Of the updates ``again``, the server is asked how many points of each name it has, and only what is missing is sent.
    """

    run_dir: Path
    run: dict[str, Any]
    run_id: str | None = None
    sent: int = 0
    doubt: int = 0
    described: bool = False
    pause: float = 0.0
    retry_at: float = 0.0
    away_since: float | None = None
    error: str = ""
    children_of: str | None = None
    experiment_id: str | None = None
    asked: bool = False
    packed: dict[str, Path] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)
    models: dict[str, str] = field(default_factory=dict)
    forgetful: bool = False
    client: Any = field(default=None, repr=False)
    secrets: list[str] = field(default_factory=list, repr=False)
    again: tuple[int, int] | None = None
    counted: Sent | None = field(default=None, repr=False)
    hold: FolderLock | None = field(default=None, repr=False)

    def try_once(self) -> None:
        """Open the MLflow run if need be, and send what is new; after an error, pause before the next try.
        The pause doubles."""
        now = time.monotonic()
        if now < self.retry_at:
            return
        try:
            self._open()
            self._send_points()
        except Exception as error:  # whatever MLflow raises for a server that is away or in trouble: try again later
            self.counted = None
            self.error = _said(error)
            self.pause = min(LONGEST_PAUSE_S, max(1.0, self.pause * 2))
            self.retry_at = now + self.pause
            if self.away_since is None:
                self.away_since = now
                tell(
                    {
                        "warning": (
                            f"the tracking server does not answer ({self.error}); training goes on, points are "
                            f"kept in {self.run_dir / 'metrics.jsonl'} and sent later"
                        )
                    }
                )
            return
        if self.away_since is not None:
            tell({"warning": "the tracking server answers again; all points so far are sent"})
        self.away_since, self.pause, self.error = None, 0.0, ""

    def _open(self) -> None:
        if self.client is None:
            self.client = mlflow_settings.client(self.run["uri"])
        before = None
        if self.run_id is None and not self.asked:
            self.run_id = reopened_run.joined(self.client, self.run)
        goes_on = self.run.get("resumed") or self.run_id == self.run.get("join")
        if self.run_id is not None and goes_on and not self.described:
            before = reopened_run.find(self.client, self.run_id)
            if before is None:
                self._forget_run()
        if self.run_id is None:
            self.experiment_id = experiment_id = self._experiment()
            self.run_id = self._opened_before(experiment_id)
            if self.run_id is None:
                self.run_id = self._create(experiment_id)
            elif self.run.get("resumed"):
                before = reopened_run.find(self.client, self.run_id)
            self.remember()
        if not self.described:
            self._describe(before)
            self.described = True

    def _describe(self, before: Any) -> None:
        """Data and parameters.

        Args:
            before: the run as the server has it, which goes on; None: it is new.
        """
        from mlflow.entities import Param

        if dataset := self.run.get("dataset"):
            self.client.log_inputs(self.run_id, datasets=[_dataset(dataset)])
        told = {k: str(v)[:6000] for k, v in self.run["params"].items()}
        if before is not None:
            self.experiment_id = str(before.info.experiment_id)
            told = reopened_run.go_on(self.client, before, self.run["tags"], told)
        params = [Param(k, v) for k, v in told.items()]
        for start in range(0, len(params), 100):
            self.client.log_batch(self.run_id, params=params[start : start + 100])

    def _forget_run(self) -> None:
        """The run of the life before was deleted: another one gets all points."""
        tell({"warning": f"the run {self.run_id} is not there any more; another run gets all its points"})
        self.run = reopened_run.anew(self.run, str(self.run_id))
        self.run_id, self.sent, self.doubt, self.asked, self.again = None, 0, 0, False, None
        self.remember()

    def _experiment(self) -> str:
        """The run's experiment, which MLflow shows as one of trainings and not of agents, with the columns that count;
        what is set already stays."""
        name, known = self.run["experiment"], self.run.get("experiment_id")
        experiment = self.client.get_experiment(known) if known else self.client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self.client.create_experiment(name, _artifacts(self.run["uri"], name), self._pages()))
            except Exception:  # another run may have made it meanwhile; stores tell that in different ways
                if (experiment := self.client.get_experiment_by_name(name)) is None:
                    raise
        for key, value in self._pages().items():
            if key not in experiment.tags:
                self.client.set_experiment_tag(experiment.experiment_id, key, value)
        return str(experiment.experiment_id)

    def _pages(self) -> dict[str, str]:
        """The experiment's tags that MLflow's pages follow."""
        return {KIND: TRAININGS, experiment_view.TAG: self.run["view"]} if "view" in self.run else {KIND: TRAININGS}

    def _create(self, experiment_id: str) -> str:
        tags = {**self.run["tags"], OPENED: self.run["opened"]}
        if self.children_of is not None:
            tags["mlflow.parentRunId"] = self.children_of
        self.asked = True
        opened = self.client.create_run(
            experiment_id, start_time=self.run["start_time"], tags=tags, run_name=self.run["run_name"]
        )
        return str(opened.info.run_id)

    def _opened_before(self, experiment_id: str) -> str | None:
        """The run, where it was asked for before and no answer came."""
        if not self.asked:
            return None
        found = self.client.search_runs([experiment_id], f"tags.`{OPENED}` = '{self.run['opened']}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def go_back(self, points: int, cut: str) -> None:
        """Note that metrics.jsonl was cut to ``points`` bytes, and that ``cut`` will be written again.

        Args:
            cut: what was cut off.
        """
        told = self._told().after_cut(bytes(points) + cut.encode(), points)
        self.sent, self.doubt, self.again, self.counted = told.sent_bytes, told.doubtful_bytes, told.again, None
        self.remember()

    def _new_lines(self) -> bytes:
        try:
            with (self.run_dir / "metrics.jsonl").open("rb") as points:
                points.seek(self.sent)
                new = points.read()
        except OSError:  # not there yet, or the folder is gone
            return b""
        return new[: new.rfind(b"\n") + 1]

    def _send_points(self) -> None:
        new = self._new_lines()
        if self.doubt:
            metrics = metrics_of(new[: self.doubt].splitlines())
            once = [metric for metric in metrics if not self._is_again(metric)]
            twice = [metric for metric in metrics if self._is_again(metric)]
            self._send([*without(once, self._there(once)), *twice], self.doubt)
            new = self._new_lines()
        metrics, size = [], 0
        for line in new.splitlines(keepends=True):
            more = metrics_of([line])
            if len(metrics) + len(more) > BATCH:
                self._send(metrics, size)
                metrics, size = [], 0
            metrics += more
            size += len(line)
        if size:
            self._send(metrics, size)

    def _send(self, metrics: list[Any], size: int) -> None:
        """Send these points, which are so many bytes of metrics.jsonl; until the answer comes they are in doubt."""
        self.doubt = size
        self.remember()
        if any(map(self._is_again, metrics)):
            metrics = self._not_there(metrics)
        if metrics:
            self.client.log_batch(self.run_id, metrics=metrics)
        self.sent, self.doubt = self.sent + size, 0
        self.remember()

    def _there(self, metrics: list[Any]) -> Counter[Point]:
        """Of the metrics that these points are of, all points that the server has."""
        names = {metric.key for metric in metrics}
        return points_of(m for name in sorted(names) for m in self.client.get_metric_history(self.run_id, name))

    def _is_again(self, metric: Any) -> bool:
        """The point may have been sent in the life before."""
        return self.again is not None and self.again[0] <= metric.step <= self.again[1]

    def _not_there(self, metrics: list[Any]) -> list[Any]:
        """Without those that the server has from the life before."""
        if self.counted is None:
            with (self.run_dir / "metrics.jsonl").open("rb") as points:
                before = metrics_of(points.read(self.sent).splitlines())
            self.counted = Sent(before, lambda name: self.client.get_metric_history(self.run_id, name))
        return [m for m in metrics if not self._is_again(m) or self.counted.is_missing(m)]

    def remember(self) -> None:
        """Write tracking.json, without what only the server's owner should know."""
        try:
            if self.run_dir.is_dir():
                tracking_file.write(self.run_dir, self._told())
        except OSError as error:  # a full disk is no reason not to send what is there
            if not self.forgetful:
                tell(
                    {
                        "warning": (
                            f"{error.filename or self.run_dir / 'tracking.json'} cannot be written "
                            f"({error.strerror}): should this run be killed, nobody knows how far it was sent"
                        )
                    }
                )
            self.forgetful = True

    def _told(self) -> Remembered:
        return Remembered(
            self.run["uri"],
            self.run["experiment"],
            self.run_id,
            self.sent,
            self.doubt,
            self.asked,
            self.again,
            self.run,
        )

    def finish(self, status: str, tags: dict[str, str], timeout_s: float) -> dict[str, Any]:
        """Send the rest of the points, the artifacts and the end of the run, within ``timeout_s``."""
        until = time.monotonic() + timeout_s
        done = False
        while not done:
            self.try_once()
            if self.away_since is None:
                done = self._end(status, tags)
            if not done:
                if time.monotonic() > until:
                    break
                time.sleep(min(0.2, max(0.0, until - time.monotonic())) or 0.01)
        self._forget_models()
        if self.hold is not None:
            self.hold.leave()
        unsent = self._new_lines().count(b"\n")
        return {
            "closed": str(self.run_dir),
            "run_id": self.run_id,
            "experiment_id": self.experiment_id,
            "unsent": unsent,
            "error": "" if done else self.error,
        }

    def _end(self, status: str, tags: dict[str, str]) -> bool:
        try:
            for key, value in tags.items():
                self.client.set_tag(self.run_id, key, value)
            for name in self.run.get("artifacts", ()):
                for path in sorted(self.run_dir.glob(name)):
                    self.client.log_artifact(self.run_id, str(path))
            self.client.set_terminated(self.run_id, status)
            if status == "FINISHED":
                self._log_models()
                self._register_models()
        except Exception as error:  # as in try_once
            self.error = _said(error)
            return False
        return True

    def pack_models(self) -> dict[str, Any]:
        """Pack the run's trained models that are not packed yet; a failure does not fail the run."""
        from trainer.tracking import logged_model
        from trainer.weights import tensor_files

        choices = {
            which: logged_model.chosen(self.run_dir, which, name) for which, name in self.run.get("models", {}).items()
        }
        for which, choice in choices.items():
            if which in self.logged or which in self.packed or choice is None:
                continue
            try:
                if tables := tensor_files.left_out(choice.weights):
                    where = "checkpoints/persistables has its rows (strategy.export_limit)"
                    tell(
                        {
                            "told": (
                                f"the {which} model is not logged: its file is without {', '.join(tables)}, and {where}"
                            )
                        }
                    )
                    self.logged.add(which)
                    continue
                self.packed[which], taken = logged_model.pack_model(self.run_dir, choice)
                if taken:
                    tell({"told": f"the logged model takes along your {', '.join(taken)}"})
            except Exception as error:  # what a user's own model raises where it is loaded by MLflow
                tell({"warning": f"the {which} model was not logged: {type(error).__name__}: {_said(error)}"})
                self.logged.add(which)
        return choices

    def _log_models(self) -> None:
        """The trained models, sent until each is there."""
        from trainer.tracking import logged_model

        choices = self.pack_models()
        for which, folder in self.packed.items():
            if which not in self.logged and self.run_id is not None:
                self.models[which] = logged_model.send(self.client, self.run_id, choices[which], folder)
                self.logged.add(which)

    def _register_models(self) -> None:
        """The sent models as versions of a registered one; a registry that refuses that is told of and fails
        nothing."""
        from trainer.tracking import registry

        name = self.run.get("registered_model")
        if not name or not self.models or self.run_id is None:
            return
        try:
            tell(
                {"told": registry.register(self.client, name, self.run_id, self.run.get("start_time", 0), self.models)}
            )
        except Exception as error:
            if not registry.is_final(error):
                raise
            tell(
                {"warning": f"{name} got no version in the registry ({_said(error)}); the models are logged in the run"}
            )
        self.models = {}

    def _forget_models(self) -> None:
        if self.packed:
            from trainer.tracking import logged_model

            for folder in self.packed.values():
                logged_model.forget(folder)


def _artifacts(uri: str, experiment: str) -> str | None:
    """Where a new experiment keeps its artifacts; None: where MLflow decides.

    A local store keeps them in the working folder, whose path MLflow decodes although it has not encoded it.
    """
    folder = Path.cwd() / "mlruns"
    if not uri.startswith("sqlite:") or "%" not in str(folder):
        return None
    return (folder / re.sub(r"\W+", "_", experiment)).as_uri()


def _dataset(told: dict[str, str]) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    about = dict(told)
    context = about.pop("context", "training")  # a message that an older trainer has left has none
    return DatasetInput(Dataset(**about), [InputTag("mlflow.data.context", context)])


def _said(error: Exception) -> str:
    """What an exception says, in one line; of a server that is not reached, which one and why, and not who raised it
    where."""
    told = str(error)
    if (server := UNREACHED.search(told)) and (why := NO_ANSWER.search(told)):
        address = server[1] or f"{server[2]}:{server[3]}"
        return redact.text(f"{address}: {(why[1] or why[2]).strip().rstrip('.').lower()}")
    return redact.text(first_line(error)[:300])
