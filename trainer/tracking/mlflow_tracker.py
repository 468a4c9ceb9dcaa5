"""MLflow: the run with its experiment, parameters, tags, data set, points, artifacts and models."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import redact
from trainer.planning.sqlite_store import address
from trainer.planning.tracking_store import store_uri
from trainer.tracking import experiment_view, mlflow_settings, reopened_run
from trainer.tracking.contract import Point, TrackedRun, Tracker
from trainer.tracking.mlflow_models import RunModels
from trainer.wording import quoted

OPENED = "trainer.opened"
"""Tag with a text of this run alone, by which a run is found if the answer to its creation was lost."""
KIND, TRAININGS = "mlflow.experimentKind", "custom_model_development"
"""Tag of an experiment that tells MLflow's pages which view to open."""
TRAINING_VIEW = "workflowType=machine_learning&viewStateShareKey=trainer"
"""End of the addresses of MLflow's pages: the view of trainings, with the columns of `experiment_view`."""


class MlflowTracker(Tracker):
    """Sends a run to an MLflow server or database.

    Args:
        uri: of the store, for the plan; None: ``MLFLOW_TRACKING_URI``, or ``mlflow.db`` in the working folder. A run
            goes to the address in its description.
    """

    title = "MLflow"
    trouble = "the tracking server does not answer"

    def __init__(self, run_dir: Path, uri: str | None = None) -> None:
        super().__init__(run_dir)
        self.uri = store_uri(uri)
        self.client: Any = None
        self.run_id = ""
        self.asked = self.warm = False
        self.models: RunModels | None = None
        self.run = TrackedRun(str(run_dir))

    def prepare(self) -> None:
        """Import MLflow."""
        import mlflow  # noqa: F401

    def where(self) -> str:
        """Return the store; of a run that was opened, how its page is opened."""
        uri = str(self.run.mlflow.get("uri", self.uri))
        if not self.run_id:
            return uri
        page = f"#/experiments/{self.group}/runs?{TRAINING_VIEW}" if self.group else ""
        if uri.startswith("http"):
            return f"{uri.rstrip('/')}/{page}  (run {self.run_id})"
        ours = uri == address(Path.cwd() / "mlflow.db")
        start = "mlflow ui" if ours or "://" not in uri else f"mlflow ui --backend-store-uri {quoted(uri)}"
        return f"{start}   then http://127.0.0.1:5000/{page}  (run {self.run_id})"

    def start(self, run: TrackedRun, before: str | None) -> str:
        """Open a run, or go on with the one that it had before, or with the one of ``MLFLOW_RUN_ID``."""
        self.run = run
        if self.client is None:
            self.client = mlflow_settings.client(str(run.mlflow["uri"]))
        if self.models is None:
            self.models = RunModels(run, self.client, self.say)
        found = None
        if not self.run_id:
            left = run.copied.get("mlflow", "")  # the run of which this one is not the continuation
            if before is not None:
                found = self._found(run, before)
                left = "" if found is not None else before
            if before is None and not left:
                found = reopened_run.joined(self.client, run, self.say)
            self.run_id = str(found.info.run_id) if found is not None else self._opened(run, left)
        self._describe(run, found)
        return self.run_id

    def _found(self, run: TrackedRun, before: str) -> Any:
        """Find the run that this one had before; None: another one has to be created."""
        if run.before:
            there = (run.before["mlflow"].get("uri"), run.before["experiment"])
            if there != (redact.text(str(run.mlflow["uri"])), run.experiment):
                return None
        if (join := run.mlflow.get("join")) not in (None, before):
            self.say(f"the run goes on in its MLflow run {before}; MLFLOW_RUN_ID={join} is not used")
        found = reopened_run.find(self.client, before)
        if found is None:
            self.say(f"the run {before} is not there any more; another run gets all its points")
        return found

    def _opened(self, run: TrackedRun, left: str) -> str:
        """Create the run; if an earlier creation was not answered, find that run."""
        self.group = self._experiment(run)
        if self.asked or run.resumed:
            wanted = f"tags.`{OPENED}` = '{run.opened}'"
            if found := self.client.search_runs([self.group], wanted, max_results=1):
                return str(found[0].info.run_id)
        tags = {**run.tags, OPENED: run.opened}
        if left:
            tags[reopened_run.RESUMED_FROM] = left
        if run.parent_id is not None:
            tags["mlflow.parentRunId"] = run.parent_id
        self.asked = True
        created = self.client.create_run(self.group, start_time=run.start_time, tags=tags, run_name=run.name)
        return str(created.info.run_id)

    def _describe(self, run: TrackedRun, found: Any) -> None:
        """Log the data set and the parameters.

        Args:
            found: the run as the server has it, which goes on; None: it is new.
        """
        from mlflow.entities import Param

        if run.dataset:
            self.client.log_inputs(self.run_id, datasets=[dataset(run.dataset)])
        values = {key: str(value)[:6000] for key, value in run.params.items()}
        if found is not None:
            self.group = str(found.info.experiment_id)
            values = reopened_run.go_on(self.client, found, run.tags, values)
        params = [Param(key, value) for key, value in values.items()]
        for start in range(0, len(params), 100):
            self.client.log_batch(self.run_id, params=params[start : start + 100])

    def _experiment(self, run: TrackedRun) -> str:
        """The id of the run's experiment, which is made if it is not there; tags that it has stay."""
        name, known = run.experiment, run.mlflow.get("experiment_id")
        experiment = self.client.get_experiment(known) if known else self.client.get_experiment_by_name(name)
        pages = {KIND: TRAININGS}
        if view := run.mlflow.get("view"):
            pages[experiment_view.TAG] = view
        if experiment is None:
            try:
                return str(self.client.create_experiment(name, _artifacts(str(run.mlflow["uri"]), name), pages))
            except Exception:  # another run may have made it meanwhile; stores tell that in different ways
                if (experiment := self.client.get_experiment_by_name(name)) is None:
                    raise
        for key, value in pages.items():
            if key not in experiment.tags:
                self.client.set_experiment_tag(experiment.experiment_id, key, value)
        return str(experiment.experiment_id)

    def log(self, points: Sequence[Point]) -> None:
        """Send points as metrics."""
        from mlflow.entities import Metric

        metrics = [Metric(point.name, point.value, point.time, point.step) for point in points]
        self.client.log_batch(self.run_id, metrics=metrics)
        if not self.warm and self.run.mlflow.get("models"):
            self.warm = True  # what the end needs is imported while the training runs
            with contextlib.suppress(Exception):
                from trainer.tracking import logged_model, served_model  # noqa: F401

    def sent(self, name: str) -> Iterable[int]:
        """Return the updates of a metric that the server has."""
        return [int(metric.step) for metric in self.client.get_metric_history(self.run_id, name)]

    def artifact(self, path: Path) -> None:
        """Send a file."""
        self.client.log_artifact(self.run_id, str(path))

    def trained(self) -> None:
        """Pack the trained models."""
        if self.models is not None:
            self.models.pack()

    def leave_open(self, tags: Mapping[str, str]) -> None:
        """Send the last tags."""
        for key, value in tags.items():
            self.client.set_tag(self.run_id, key, value)

    def finish(self, status: str, tags: Mapping[str, str]) -> None:
        """Send the last tags and the end; of a run that is done, its models."""
        self.leave_open(tags)
        self.client.set_terminated(self.run_id, status)
        if status == "FINISHED" and self.models is not None:
            self.models.send(self.run_id)

    def close(self) -> None:
        """Remove the packed models."""
        if self.models is not None:
            self.models.forget()


def _artifacts(uri: str, experiment: str) -> str | None:
    """Where a new experiment keeps its artifacts; None: where MLflow decides.

    A local store keeps them in the working folder, whose path MLflow decodes although it has not encoded it.
    """
    folder = Path.cwd() / "mlruns"
    if not uri.startswith("sqlite:") or "%" not in str(folder):
        return None
    return (folder / re.sub(r"\W+", "_", experiment)).as_uri()


def dataset(plain: Mapping[str, str]) -> Any:
    """Make MLflow's input of a run of the data set's description."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    about = dict(plain)
    context = about.pop("context")
    return DatasetInput(Dataset(**about), [InputTag("mlflow.data.context", context)])
