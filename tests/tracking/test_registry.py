"""tracking.registered_model: models:/NAME@best and @last are the weights of the newest run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import FEATURE_DISABLED, PERMISSION_DENIED
from safetensors.torch import load_file

import trainer
from tests.runs import mlflow_runs, read
from tests.runs import trainer as command
from trainer.errors import UserError
from trainer.models.lenet import LeNet
from trainer.tracking import registry
from trainer.tracking.contract import TrackedRun
from trainer.tracking.mlflow_models import RunModels
from trainer.tracking.mlflow_tracker import MlflowTracker

TYPED = (
    "+recipe=digits_lenet",
    "epochs=3",
    "precision=fp32",
    "tracking.system_every_s=null",
    "register=digits",
    "callbacks=[{_target_: tests.tracking.test_registry.Spoiler}]",
)


class Spoiler:
    """Spoils the model in the last epoch, so that the best is another."""

    def on_update_end(self, event: Any) -> None:
        if event.epoch == 2:
            with torch.no_grad():
                next(event.model.parameters()).mul_(0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one registered model, with different seeds."""
    folder = tmp_path_factory.mktemp("registry")
    for seed in (1, 2):
        done = command(*TYPED, f"seed={seed}", f"hydra.run.dir=run{seed}", cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"version {2 * seed} is models:/digits@last" in done.stdout.replace("\n", " "), done.stdout
    return folder


def outputs(run: Path, weights: str, images: np.ndarray) -> torch.Tensor:
    """What these weights give, built by hand."""
    spec = read(run / "model.json")
    model = LeNet(**{k: v for k, v in spec["model"].items() if k not in ("_target_", "init")}).eval()
    model.load_state_dict(load_file(run / weights))
    mean, std = (torch.tensor(spec[name]).view(1, -1, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        return model((torch.from_numpy(images) - mean) / std)


@pytest.mark.all
@pytest.mark.parametrize(
    ("alias", "weights"), [("best", "checkpoints/best.safetensors"), ("last", "model.safetensors")]
)
def test_an_alias_is_these_weights_of_the_newer_run(folder: Path, alias: str, weights: str) -> None:
    images = np.random.default_rng(0).random((5, 1, 8, 8), dtype=np.float32)
    before, uri = mlflow.get_tracking_uri(), f"sqlite:///{folder / 'mlflow.db'}"
    try:
        mlflow.set_tracking_uri(uri)
        found = torch.as_tensor(np.asarray(mlflow.pyfunc.load_model(f"models:/digits@{alias}").predict(images)))
    finally:
        mlflow.set_tracking_uri(before)
    torch.testing.assert_close(found, outputs(folder / "run2", weights, images))
    other = "model.safetensors" if alias == "best" else "checkpoints/best.safetensors"
    assert not torch.allclose(found, outputs(folder / "run2", other, images), atol=1e-3)
    client = MlflowClient(uri)
    version = client.get_model_version_by_alias("digits", alias)
    [run] = [r for r in mlflow_runs(folder) if r.data.tags["trainer.run_dir"] == str(folder / "run2")]
    result = read(folder / "run2/result.json")
    step = result["best_step" if alias == "best" else "steps"]
    measured = result["best" if alias == "best" else "metrics"]
    assert {k: v for k, v in version.tags.items() if k.startswith("val")} == {
        k: f"{v:.6g}" for k, v in measured.items() if k.startswith("val")
    }
    assert version.run_id == run.info.run_id and version.tags["trainer.which"] == alias
    assert client.get_logged_model(version.source.removeprefix("models:/")).tags["trainer.step"] == str(step)


def test_again_makes_no_version_and_an_older_run_takes_no_alias_away(folder: Path) -> None:
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    held = dict(client.get_registered_model("digits").aliases)
    versions = {
        v.run_id: v for v in client.search_model_versions("name = 'digits'") if v.tags["trainer.which"] == "best"
    }
    older, newer = sorted(versions.values(), key=lambda v: int(v.version))
    for version in (newer, older):
        models = {"best": version.source.removeprefix("models:/")}
        said = registry.register(client, "digits", version.run_id, int(version.tags["trainer.began"]), models)
    assert "without the alias best" in said
    assert (
        dict(client.get_registered_model("digits").aliases) == held
        and len(client.search_model_versions("name = 'digits'")) == 4
    )


def test_the_plan_says_what_will_be_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer.run(["+recipe=digits_lenet", "plan=true", "register=digits"])
    assert "models:/digits@best and @last" in capsys.readouterr().out


def test_an_address_that_is_no_registry_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "ftp://someone:secret@host")
    with pytest.raises(UserError, match="MLflow knows none that begins with ftp:") as refused:
        trainer.run(["+recipe=digits_lenet", "register=digits"])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("code", [FEATURE_DISABLED, PERMISSION_DENIED])
def test_a_store_without_registry_is_told_of_and_fails_nothing(code: int, tmp_path: Path) -> None:
    said: list[str] = []

    def refuse(name: str) -> None:
        raise MlflowException("Model Registry features are not supported by the store", error_code=code)

    own = {"registered_model": "digits"}
    models = RunModels(
        TrackedRun(str(tmp_path), mlflow=own), SimpleNamespace(create_registered_model=refuse), said.append
    )
    models.sent = {"best": "m-1"}
    models.register("1")
    assert "digits got no version in the registry (Model Registry features are not supported" in said[0]


def test_a_registry_that_is_away_is_asked_again(tmp_path: Path) -> None:
    answers = [MlflowException("API request failed: Connection refused")]  # MLflow's INTERNAL_ERROR
    client = SimpleNamespace(
        set_terminated=lambda *a: None,
        create_registered_model=lambda name: (_ for _ in ()).throw(answers.pop()) if answers else None,
        search_model_versions=lambda which: [],
        create_model_version=lambda *a, **k: SimpleNamespace(version=1),
        get_registered_model=lambda name: SimpleNamespace(aliases={}),
        set_registered_model_alias=lambda *a: done.append(a),
    )
    done: list[Any] = []
    tracker = MlflowTracker(tmp_path)
    tracker.run_id, tracker.client = "1", client
    run = TrackedRun(str(tmp_path), mlflow={"registered_model": "digits"})
    tracker.models = RunModels(run, client, list[str]().append)
    tracker.models.sent = {"best": "m-1"}
    with pytest.raises(MlflowException):
        tracker.finish("FINISHED", {})
    assert not done
    for _ in range(2):
        tracker.finish("FINISHED", {})
    assert done == [("digits", "best", "1")]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["tracking.registered_model=a/b"], "is no name for MLflow's registry"),
        (["tracking=none", "tracking.registered_model=a"], "with tracking=none there are none"),
        (["tracking.log_model=false", "tracking.registered_model=a"], "with tracking.log_model=false there are none"),
    ],
)
def test_what_cannot_be_registered_is_refused(
    more: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=why):
        trainer.run(["+recipe=digits_lenet", *more])
    assert not list(tmp_path.iterdir())
