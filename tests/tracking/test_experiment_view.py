"""An experiment's shared view: the list of runs shows the metric of the best model, charts begin with validations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.config.redact import hide
from trainer.tracking import experiment_view
from trainer.tracking.contract import TrackedRun
from trainer.tracking.mlflow_tracker import TRAINING_VIEW, MlflowTracker


def test_view_has_the_best_metric_and_what_people_change() -> None:
    state = json.loads(experiment_view.view("val/auc"))
    assert state["selectedColumns"][:3] == ["attributes.`Duration`", "metrics.`val/auc`", "metrics.`val/loss`"]
    assert "params.`optimizer.lr`" in state["selectedColumns"]
    assert [section["name"] for section in state["compareRunSections"]][:2] == ["val", "test"]
    assert len(experiment_view.view("val/auc")) < 5000  # MLflow's limit of an experiment's tag
    assert hide(experiment_view.view("val/auc"), ()) == experiment_view.view("val/auc"), "the page reads it as JSON"
    assert TRAINING_VIEW.endswith(f"viewStateShareKey={experiment_view.KEY}")


def test_experiment_gets_the_view_once_and_keeps_a_changed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    own = {"uri": uri, "view": experiment_view.view("val/acc1")}
    run, tracker = TrackedRun(str(tmp_path), experiment="digits", mlflow=own), MlflowTracker(tmp_path)
    tracker.client = client
    number = tracker._experiment(run)
    tags = client.get_experiment(number).tags
    assert json.loads(tags[experiment_view.TAG])["selectedColumns"][1] == "metrics.`val/acc1`"
    client.set_experiment_tag(number, experiment_view.TAG, "{}")
    assert tracker._experiment(run) == number
    assert client.get_experiment(number).tags[experiment_view.TAG] == "{}"
