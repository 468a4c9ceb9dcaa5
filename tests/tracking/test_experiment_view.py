"""An experiment's shared view: the list of runs shows the metric of the best model, charts begin with validations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.cli.last_lines import TRAINING_VIEW
from trainer.config.redact import hide
from trainer.tracking import experiment_view
from trainer.tracking.mlflow_run import Follower


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
    follower = Follower(tmp_path, {"uri": uri, "experiment": "digits", "view": experiment_view.view("val/acc1")})
    follower.client = client
    number = follower._experiment()
    tags = client.get_experiment(number).tags
    assert json.loads(tags[experiment_view.TAG])["selectedColumns"][1] == "metrics.`val/acc1`"
    client.set_experiment_tag(number, experiment_view.TAG, "{}")
    assert follower._experiment() == number
    assert client.get_experiment(number).tags[experiment_view.TAG] == "{}"
