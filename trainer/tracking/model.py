"""The trained model as an MLflow model: packed from the run's folder by the tracking process, and sent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from trainer import example

PACKAGE = Path(__file__).resolve().parents[1]
SERVED = Path(__file__).with_name("served.py")
NAME = "model"
REQUIREMENTS = ("torch", "torchvision", "safetensors", "numpy", "pillow", "mlflow")
DIRECTORY = "trainer-model-"


def can_be_packed(run_dir: Path) -> bool:
    """The run has left a model."""
    return all((run_dir / name).is_file() for name in (example.SPEC, example.SAMPLE, "model.safetensors"))


def pack(run_dir: Path) -> Path:
    """The model in a new folder outside the run's, in MLflow's layout; it is loaded and called once to see that it works.

    Raises:
        Exception: whatever building, loading or calling the model raises.
    """
    import mlflow
    from mlflow.models import infer_signature

    folder = Path(tempfile.mkdtemp(prefix=DIRECTORY)) / NAME
    spec, inputs = run_dir / example.SPEC, example.sample(run_dir)
    target = json.loads(spec.read_text())["model"]["_target_"]
    arguments: dict[str, Any] = {
        "python_model": str(SERVED),
        "artifacts": {"spec": str(spec), "weights": str(run_dir / "model.safetensors")},
        "code_paths": [str(PACKAGE), *_own_code(target)],
        "pip_requirements": list(_requirements(target)),
    }
    try:
        trial = folder.with_name("trial")
        mlflow.pyfunc.save_model(str(trial), **arguments)
        outputs = mlflow.pyfunc.load_model(str(trial)).predict(inputs)
        signature = infer_signature(inputs, outputs)
        shutil.rmtree(trial)
        mlflow.pyfunc.save_model(str(folder), signature=signature, input_example=inputs, **arguments)
    except BaseException:
        shutil.rmtree(folder.parent, ignore_errors=True)
        raise
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache, ignore_errors=True)
    return folder


def _requirements(target: str) -> Any:
    """What is installed of what the model needs, and of what its class or function is in."""
    top = target.replace(":", ".").partition(".")[0]
    own = top == PACKAGE.name or _own_code(target)
    theirs = () if own else importlib.metadata.packages_distributions().get(top, ())
    for package in dict.fromkeys((*REQUIREMENTS, *theirs)):
        try:
            yield f"{package}=={importlib.metadata.version(package).partition('+')[0]}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _own_code(target: str) -> list[str]:
    """The file or folder of the user's package that the model's class is in; nothing for what is installed."""
    top = target.replace(":", ".").partition(".")[0]
    spec = importlib.util.find_spec(top)
    if top == PACKAGE.name or spec is None or spec.origin is None or top in sys.stdlib_module_names:
        return []
    origin = Path(spec.origin).resolve()
    if any(origin.is_relative_to(Path(sysconfig.get_path(kind)).resolve()) for kind in ("purelib", "platlib")):
        return []
    return [str(origin.parent if origin.name == "__init__.py" else origin)]


def send(client: Any, run_id: str, folder: Path) -> None:
    """Give the run the packed model, as often as need be: what is there already is not made again.

    Raises:
        Exception: what MLflow raises for a server that is away.
    """
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    run = client.get_run(run_id)
    of_run = f"source_run_id = '{run_id}' AND name = '{NAME}'"
    made = client.search_logged_models([run.info.experiment_id], filter_string=of_run)
    model = made[0] if made else client.create_logged_model(run.info.experiment_id, NAME, run_id)
    description = Model.load(str(folder))
    description.run_id, description.model_id = run_id, model.model_id
    description.artifact_path = model.artifact_location
    description.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model.model_id, str(folder))
    if not any(output.model_id == model.model_id for output in _outputs(run)):
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
    client.finalize_logged_model(model.model_id, "READY")


def _outputs(run: Any) -> list[Any]:
    return list(run.outputs.model_outputs) if run.outputs is not None else []


def forget(folder: Path) -> None:
    """Remove a packed model."""
    shutil.rmtree(folder.parent, ignore_errors=True)
