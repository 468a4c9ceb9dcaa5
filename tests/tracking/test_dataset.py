"""The data set that MLflow shows for a run is what the run has looked at."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.data.source import Facts
from trainer.planning.plan import Predicted
from trainer.tracking import describe, mlflow_tracker

FACTS = Facts("images in d", "folder", 24, 6, (3, 32, 32), 3)
PREDICTED = Predicted("photos", 5, "image", None)


@pytest.mark.parametrize(
    ("mode", "predict", "name", "context", "size"),
    [
        ("train", None, "images in d", "training", {"val_samples": 6, "train_samples": 24}),
        ("eval", None, "images in d", "evaluation", {"val_samples": 6}),
        ("predict", PREDICTED, "photos", "prediction", {"samples": 5}),
    ],
)
def test_a_runs_data_set_is_what_it_looks_at(
    mode: str, predict: Any, name: str, context: str, size: dict[str, int]
) -> None:
    plan: Any = SimpleNamespace(mode=mode, data=SimpleNamespace(facts=FACTS, predict=predict))
    found = mlflow_tracker.dataset(describe._dataset(plan, "0" * 32))
    assert (found.dataset.name, found.dataset.digest, found.tags[0].value) == (name, "0" * 32, context)
    assert size.items() <= json.loads(found.dataset.profile).items()
