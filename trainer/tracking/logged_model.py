"""Packs the trained model of a run's folder as an MLflow model and sends it, in the tracking process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.checkpoint.store import SKELETON
from trainer.host import json_text, private
from trainer.metrics.best import TESTED
from trainer.tracking.own_code import PACKAGE, own_modules, place, stage, third_parties
from trainer.worker import example

SERVED = Path(__file__).with_name("served_model.py")
REQUIREMENTS = ("torch", "torchvision", "safetensors", "numpy", "pillow", "mlflow")
DIRECTORY = "trainer-model-"


@dataclass(frozen=True)
class Choice:
    """A model that a run has left and that will be logged: ``best`` or ``last``.

    Attributes:
        name: in MLflow; weights: the file.
        which: ``best`` or ``last``; of a run without validations the last stands for the best.
        step: the update that made it.
        points: the lines of metrics.jsonl of that update's validation, and of the test where it measured this model.
    """

    name: str
    weights: Path
    which: str
    step: int
    points: tuple[dict[str, Any], ...]

    @property
    def metrics(self) -> dict[str, float]:
        """What the validation and the test measured of it."""
        measured = ((name, value) for point in self.points for name, value in point["metrics"].items())
        return {name: value for name, value in measured if name.startswith(("val", TESTED))}


def chosen(run_dir: Path, which: str, name: str) -> Choice | None:
    """Find the best or the last model of a run's folder to log in MLflow; None if the run has left none."""
    try:
        result = json_text.read_object(run_dir / "result.json")
        best_step, steps = result["best_step"], result["steps"]
    except (OSError, ValueError, KeyError):
        return None
    best = run_dir / "checkpoints" / "best.safetensors"
    if which == "best" and not (best_step and best.is_file()):
        which = "last"
    weights = best if which == "best" else run_dir / "model.safetensors"
    if not all(path.is_file() for path in (run_dir / example.SPEC, run_dir / example.SAMPLE, weights)):
        return None
    step = best_step if which == "best" else steps
    tested = step == (best_step or step)  # the test is of the best model, where there is one
    return Choice(name, weights, which, step, tuple(_measured(run_dir, step, tested)))


def _measured(run_dir: Path, step: int, tested: bool) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl of the validation after that update and, if ``tested``, of the test."""
    with (run_dir / "metrics.jsonl").open() as points:
        for line in points:
            point = json_text.loads(line)
            validated = point["step"] == step and any(name.startswith("val") for name in point["metrics"])
            if validated or (tested and any(name.startswith(TESTED) for name in point["metrics"])):
                yield point


def pack_model(run_dir: Path, choice: Choice) -> tuple[Path, list[str]]:
    """Pack a model in MLflow's layout in a new folder outside the run's, with the user's modules that it needs.

    It is called once to see that it works; with modules of the user's own, once more as it will be loaded elsewhere.

    Raises:
        Exception: whatever building, loading or calling the model raises.
    """
    import mlflow
    from mlflow.models import infer_signature

    folder = private.scratch(DIRECTORY) / "model"
    spec, inputs = run_dir / example.SPEC, example.sample(run_dir)
    artifacts = {"spec": str(spec), "weights": str(choice.weights)}
    if (run_dir / SKELETON).is_file():
        artifacts["skeleton"] = str(run_dir / SKELETON)
    target = json_text.read(spec)["model"]["_target_"]
    try:
        outputs, modules = _called(artifacts, inputs, target)
        with _requirements_taken_as_they_are():
            mlflow.pyfunc.save_model(
                str(folder),
                python_model=str(SERVED),
                artifacts={
                    name: Path(path).absolute().as_uri() for name, path in artifacts.items()
                },  # it decodes paths
                code_paths=stage(folder.with_name("code"), modules),
                pip_requirements=list(_requirements(target, modules)),
                signature=infer_signature(inputs, outputs),
                input_example=inputs,
            )
            if modules:
                with _alone(modules):
                    mlflow.pyfunc.load_model(str(folder)).predict(inputs)
    except BaseException:
        private.discard(folder.parent)
        raise
    for cache in folder.rglob("__pycache__"):
        shutil.rmtree(cache, ignore_errors=True)
    return folder, [str(place(name, file)) for name, file in modules.items()]


@contextlib.contextmanager
def _requirements_taken_as_they_are() -> Iterator[None]:
    """Context manager: MLflow does not compare a model's requirements with the installed packages. They were read from
    these packages, and the comparison, which lists all files of all packages, takes longer than the rest of the
    recorder's work."""
    import mlflow.utils.requirements_utils

    compares: Any = mlflow.utils.requirements_utils
    compare = compares._check_requirement_satisfied
    compares._check_requirement_satisfied = lambda requirement: None
    try:
        yield
    finally:
        compares._check_requirement_satisfied = compare


def _called(artifacts: dict[str, str], inputs: Any, target: str) -> tuple[Any, dict[str, Path]]:
    """Build the model and call it; returns its outputs, and the user's own modules that were imported for it."""
    from trainer.tracking.served_model import Served

    before = set(sys.modules)
    served = Served()
    served.load_context(SimpleNamespace(artifacts=artifacts))
    outputs = served.predict(None, inputs)  # type: ignore[no-untyped-call]
    late = _LATE.setdefault(target, set())
    late |= set(sys.modules) - before
    return outputs, own_modules(target, late)


_LATE: dict[str, set[str]] = {}
"""By target, what was imported when it was built first in this process; the next job of a sweep imports it no more."""


@contextlib.contextmanager
def _alone(modules: dict[str, Path]) -> Iterator[None]:
    """Context manager: these modules are unloaded and not found at their own place, so that imports find the packed
    copies."""
    roots = {str(_root(name, file)) for name, file in modules.items()}
    known = {name: sys.modules.pop(name) for name in list(sys.modules) if _below(name, modules)}
    path = sys.path[:]
    sys.path[:] = [entry for entry in path if os.path.realpath(entry or ".") not in roots]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _below(name, modules)]:
            del sys.modules[name]
        sys.modules.update(known)
        sys.path[:] = path


def _below(name: str, modules: dict[str, Path]) -> bool:
    return name.partition(".")[0] in {known.partition(".")[0] for known in modules}


def _root(name: str, file: Path) -> Path:
    """The folder on the module search path that holds the module."""
    return file.parents[len(place(name, file).parts) - 1]


def _requirements(target: str, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the installed packages that the model needs: the trainer's, the one of its class or function, and those
    that the user's modules import."""
    top = target.replace(":", ".").partition(".")[0]
    wanted = third_parties(modules.values()) if modules else {top} - {PACKAGE.name}
    of = importlib.metadata.packages_distributions() if wanted else {}
    theirs = (package for name in sorted(wanted) for package in of.get(name, ()))
    for package in dict.fromkeys((*REQUIREMENTS, *theirs)):
        try:
            yield f"{package}=={importlib.metadata.version(package).partition('+')[0]}"
        except importlib.metadata.PackageNotFoundError:
            continue


def send(client: Any, run_id: str, choice: Choice, folder: Path) -> str:
    """Send a packed model to an MLflow run; can be repeated, as it only adds what is missing. Returns the model's id.

    Raises:
        Exception: what MLflow raises for a server that is away.
    """
    from mlflow.entities import LoggedModelOutput, Metric
    from mlflow.models import Model

    run = client.get_run(run_id)
    of_run = f"source_run_id = '{run_id}' AND name = '{choice.name}'"
    made = client.search_logged_models([run.info.experiment_id], filter_string=of_run)
    tags = {"trainer.which": choice.which, "trainer.step": str(choice.step)}
    model = made[0] if made else client.create_logged_model(run.info.experiment_id, choice.name, run_id, tags)
    description = Model.load(str(folder))
    description.run_id, description.model_id = run_id, model.model_id
    description.artifact_path = model.artifact_location
    description.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model.model_id, str(folder))
    # The run has these points already; the same again, with the model's number, are the model's.
    metrics = [
        Metric(name, value, point["time"], point["step"], model_id=model.model_id)
        for point in choice.points
        for name, value in point["metrics"].items()
        if name.startswith(("val", TESTED))
    ]
    if metrics and not model.metrics:
        client.log_batch(run_id, metrics=metrics)
    outputs = run.outputs.model_outputs if run.outputs is not None else []
    if not any(output.model_id == model.model_id for output in outputs):
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=choice.step)])
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def forget(folder: Path) -> None:
    """Remove a packed model's folder."""
    private.discard(folder.parent)
