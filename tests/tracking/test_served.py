"""`mlflow models serve` answers an image and a row over HTTP with what the weights give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_click_predictions import CLICKS
from tests.pace import wait_for
from tests.pages import blocks
from tests.ports import ports
from tests.runs import environment, mlflow_runs, read, trainer
from tests.tracking.test_registry import outputs
from trainer.data.criteo.rows import CriteoRowReader
from trainer.models.wide_and_deep import WideAndDeep
from trainer.tracking.served_model import Served

ROW = "\t".join([*"1234567890123", *(f"t{number}" for number in range(26))])


@contextmanager
def served(folder: Path, model: str) -> Iterator[str]:
    """Context manager: a model of the folder's store, served as the page says; yields the address."""
    [port] = ports(1)
    argv = ["mlflow", "models", "serve", "-m", model, "--env-manager", "local", "--port", str(port)]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # it starts uvicorn by name
    env = {**environment(MLFLOW_TRACKING_URI=f"sqlite:///{folder / 'mlflow.db'}"), "PATH": programs}
    del env["PYTHONPATH"]  # the trainer that answers is the packed one
    with (folder / "serve.txt").open("w") as screen:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv], cwd=folder, env=env, stdout=screen, stderr=screen, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / "serve.txt").read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_for(answers, 120, "the model is served")
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def asked(address: str, body: Any) -> Any:
    """What the server predicts for this."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/invocations", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["predictions"]


@pytest.mark.all
def test_a_served_model_answers_an_image(tmp_path: Path) -> None:
    done = trainer("+recipe=digits_lenet", "epochs=1", "register=digits", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    images = np.random.default_rng(0).random((2, 1, 8, 8), dtype=np.float32)
    with served(tmp_path, "models:/digits@best") as address:
        found = torch.tensor(asked(address, {"inputs": images.tolist()}))
    expected = outputs(tmp_path / "run", "checkpoints/best.safetensors", images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.all
def test_a_served_model_answers_a_row(tmp_path: Path) -> None:
    done = trainer(*CLICKS, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = mlflow_runs(tmp_path)
    with served(tmp_path, f"runs:/{run.info.run_id}/wide_and_deep") as address:
        found = asked(address, {"inputs": [ROW]})
        frame = asked(address, {"dataframe_split": {"columns": ["row"], "data": [[ROW]]}})
        with pytest.raises(urllib.error.HTTPError) as wrong:
            asked(address, {"inputs": [ROW, "x"]})
        said = wrong.value.read().decode()
    [logit] = logits(tmp_path / "run" / "model.json", tmp_path / "run" / "model.safetensors")
    assert found == frame == pytest.approx([1 / (1 + np.exp(-logit))], rel=1e-5)
    assert wrong.value.code == 400 and "row 2: 1 field instead of 39" in said


def logits(spec: Path, weights: Path) -> list[float]:
    """What the weights give for the row, without the product's reader of rows."""
    [code] = [code for code in blocks("ctr.md") if "def token_id" in code]
    names: dict[str, Any] = {}
    exec(code, names)
    dense, ids = names["inputs"](ROW.encode(), read(spec)["rows"]["hash_size"])
    model = WideAndDeep(**{k: v for k, v in read(spec)["model"].items() if k not in ("_target_", "init")}).eval()
    model.load_state_dict(load_file(weights), assign=True)
    with torch.no_grad():
        return model({"dense": torch.tensor([dense], dtype=torch.float32), "sparse": torch.tensor([ids])}).tolist()


@pytest.mark.parametrize(
    ("task", "bend"),
    [
        (None, torch.sigmoid),
        ("trainer.tasks.binary.Binary", torch.sigmoid),
        ("trainer.tasks.regression.Regression", torch.Tensor.clone),
    ],
)
def test_rows_get_what_their_task_predicts(task: str | None, bend: Any, tmp_path: Path) -> None:
    node = {"table_size": 100, "embedding_dim": 2, "hidden": [4]}
    reader = f"{CriteoRowReader.__module__}.{CriteoRowReader.__name__}"
    spec = {
        "model": {"_target_": "trainer.models.wide_and_deep.WideAndDeep", **node},
        **dict.fromkeys(("mean", "std")),
        "fp64": False,
        "rows": {"_target_": reader, "hash_size": 100},
        "task": None if task is None else {"_target_": task},
    }
    (tmp_path / "model.json").write_text(json.dumps(spec))
    torch.manual_seed(0)
    state = {
        name: torch.rand(parameter.shape) if "bias" not in name else torch.ones(parameter.shape)
        for name, parameter in WideAndDeep(**node).state_dict().items()
    }
    save_file(state, tmp_path / "w.safetensors")
    model_served = Served()
    artifacts = {"spec": str(tmp_path / "model.json"), "weights": str(tmp_path / "w.safetensors")}
    model_served.load_context(SimpleNamespace(artifacts=artifacts))
    expected = bend(torch.tensor(logits(tmp_path / "model.json", tmp_path / "w.safetensors"), dtype=torch.float64))
    found = model_served.predict(None, [ROW])  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
