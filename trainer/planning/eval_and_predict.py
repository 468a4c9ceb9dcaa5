"""mode=eval and mode=predict: their requirements, weights, and inputs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.remote import is_address
from trainer.config import schema
from trainer.config.instantiate import call_target
from trainer.config.run_config import RunConfig
from trainer.data.source import DataSource, Facts, reader_of
from trainer.errors import UserError
from trainer.host import json_text
from trainer.planning.class_names import class_names_of, run_of
from trainer.planning.plan import measured_by, read_plan
from trainer.planning.user_class_checks import facts_of
from trainer.strategies.builtin import EVALUATORS
from trainer.weights import paddle_files
from trainer.wording import some, typed

if TYPE_CHECKING:
    from trainer.data.rows import RowReader


VAL, TEST = "val", "test"
"""What ``eval.split`` can be."""


def as_evaluation(config: RunConfig) -> RunConfig:
    """Return the config of mode=eval or mode=predict, in which plain workers replace the strategy's.

    Raises:
        UserError: there are no such weights, or a profile is asked for.
    """
    if config.profile:
        why = f"shows where an update's time goes, and mode={config.mode} makes none"
        raise UserError("profile=true", why, "profile=false")
    plain = asdict(schema.GroupStrategy())
    plain |= {"_target_": EVALUATORS, "timeout_s": config.node("strategy").get("timeout_s", plain["timeout_s"])}
    kept = {"cache": "none"} if config.node("data").get("cache") == "auto" else {}  # each sample is read once
    return config.replaced("strategy", plain).changed(
        weights=str(weights_file(Path(str(config.weights)))),
        launch={"servers": None, "server_hosts": "auto", "server_ports": None, "server_endpoints": None},
        data={"work": "static", "read": "each", **kept},
    )


def weights_file(path: Path) -> Path:
    """The file of weights (or checkpoint folder) that ``weights=`` names, for mode=eval and mode=predict.

    Raises:
        UserError: there is none, its name does not say what it is, or the checkpoint is damaged.
    """
    if store.NAME.fullmatch(path.name) and not path.is_file():
        return store.check(Path(os.path.abspath(path)))
    if path.exists():
        paddle_files.refuse(path, "weights")
    if path.is_dir():
        if not (path / "model.safetensors").is_file():
            for folder in (path / "checkpoints", path):
                if (newest := store.newest_whole(folder)) is not None:
                    return Path(os.path.abspath(newest))
            if (path / durable_folder.MARKER).is_file():
                run = Path(os.path.abspath(path)).parents[1]
                raise UserError(
                    f"weights={path}",
                    (
                        "this folder has persistables, which parameter servers start from (strategy.load_from), "
                        "and no weights"
                    ),
                    typed("weights", run if (run / "plan.json").is_file() else "RUN"),
                )
            raise UserError(
                f"weights={path}",
                "this folder has no model.safetensors, which a run leaves when it is done, and no whole checkpoint",
                "weights=FILE",
            )
        path = path / "model.safetensors"
    if not path.is_file():
        raise UserError(f"weights={path}", "there is no such file or folder", "weights=outputs/RECIPE/TIME")
    if not path.name.endswith(schema.WEIGHT_FILES):
        raise UserError(
            f"weights={path}", f"is none of the kinds {', '.join(schema.WEIGHT_FILES)}", "weights=model.safetensors"
        )
    return Path(os.path.abspath(path))


def evaluated_facts(config: RunConfig, source: DataSource, global_batch_size: int) -> Facts:
    """The facts of the data; for mode=predict without data, from the run that left the weights.

    Raises:
        UserError: the data are not there, and no run tells.
    """
    try:
        facts = facts_of(config, source, global_batch_size)
    except UserError:
        if (known := _of_the_run(config)) is None:
            raise
        return known
    return (_of_the_run(config) or facts) if facts.stand_in else as_measured(config, facts)


def as_measured(config: RunConfig, facts: Facts) -> Facts:
    """The facts with values that the run of the weights measured of its training data.

    Raises:
        UserError: a key of data is auto, and no run tells what was measured.
    """
    node = config.node("data")
    automatic = [key for key in ("dense_min", "dense_max") if node.get(key) == "auto"]
    if not automatic:
        return facts
    run = run_of(Path(str(config.weights)))
    measured = {} if run is None else measured_by(run)
    if missing := [key for key in automatic if key not in measured]:
        raise UserError(
            f"data.{missing[0]}=auto",
            f"no run beside weights={config.weights} tells what was measured of its training data",
            f"weights=RUN, the folder of the run, or data.{missing[0]}=[...] with its 13 numbers",
        )
    return replace(facts, measured={key: measured[key] for key in automatic})


def _of_the_run(config: RunConfig) -> Facts | None:
    """For mode=predict: the facts that the run of the weights had of data of the same kind."""
    if config.mode != "predict" or (folder := run_of(Path(str(config.weights)))) is None:
        return None
    import yaml

    try:
        target = yaml.safe_load((folder / "config.yaml").read_text())["data"]["_target_"]
        facts = read_plan(folder).data.facts
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return None
    return facts if target == config.data._target_ else None


@dataclass(frozen=True)
class EvaluatedInputs:
    """The image files or files of rows that mode=predict reads; none for mode=eval.

    Attributes:
        folder: that all files are in; empty where no file is read.
        files: images or files of rows, relative to it.
        samples: about how many there are in them.
        attention: what is odd about them, for the plan.
    """

    folder: str
    files: tuple[str, ...]
    samples: int
    attention: str = ""


def evaluated_inputs(config: RunConfig, source: DataSource, facts: Facts) -> EvaluatedInputs:
    """Find the image files, or the files of rows, that mode=predict reads.

    Raises:
        UserError: there are none, or no validation samples.
    """
    if config.mode == "eval":
        _check_split(config, facts)
        if (rows := reader_of(source, facts)) is not None:
            _check_same_reading(run_of(Path(str(config.weights))), rows)
        return EvaluatedInputs("", (), 0, facts.attention)
    reader = reader_of(source, facts)
    if reader is None and not source.sees_pictures:
        raise UserError("mode=predict", f"{facts.source} does not say how a picture becomes an input", "mode=eval")
    found = _images(config, source) if reader is None else _rows(config, reader)
    _check_output(config.predict.output)
    return found


def _check_split(config: RunConfig, facts: Facts) -> None:
    """Refuse a split without samples.

    Raises:
        UserError: there are none, or their number is not known.
    """
    split = config.eval.split
    if facts.val_samples if split == VAL else facts.test_samples:
        return
    kind, other = ("validation", TEST) if split == VAL else (TEST, VAL)
    what_is_there = (
        f"tells no number of {kind} samples ({split}_samples of its facts)"
        if facts.iterable
        else f"has no {kind} samples"
    )
    there = facts.test_samples if split == VAL else facts.val_samples
    what = "mode=eval" if split == VAL else f"eval.split={split}"
    raise UserError(what, f"{facts.source} {what_is_there}", f"eval.split={other}" if there else "")


def _images(config: RunConfig, source: DataSource) -> EvaluatedInputs:
    """The images of the folder, or the one named image, or those that a table names."""
    from trainer.data.images.image_files import EXTENSIONS, is_image
    from trainer.data.images.listing import images_in

    class_names_of(Path(str(config.weights)))  # asked for again when the table is written
    place = str(config.predict.input)
    folder, again = Path(place), list[str]()
    if folder.is_file() and is_image(folder.name):
        files, folder = [folder.name], folder.absolute().parent
    elif folder.is_dir():
        files, again = images_in(folder)
    elif (is_address(place) or folder.is_file()) and (found := source.pictures_of(place)):
        return EvaluatedInputs(os.path.abspath(found[0]), tuple(found[1]), len(found[1]))
    else:
        there = "is neither a folder nor an image" if folder.exists() else "there is no such folder"
        raise UserError(f"predict.input={folder}", there, "predict.input=FOLDER")
    if not files:
        passed = f". Passed over: {some(again)}" if again else ""
        raise UserError(
            f"predict.input={folder}",
            f"there is no image in it ({', '.join(EXTENSIONS)}){passed}",
            "predict.input=FOLDER",
        )
    return EvaluatedInputs(
        os.path.abspath(folder), tuple(files), len(files), f"passed over: {some(again)}" if again else ""
    )


def _rows(config: RunConfig, node: dict[str, Any]) -> EvaluatedInputs:
    """The files of rows, the folder that they are all in, and about how many rows they have.

    Raises:
        UserError: there is none, one does not begin with rows, or the run that left the weights read rows otherwise.
    """
    from trainer.data.criteo.blocks import Block, pieces
    from trainer.data.criteo.files import find

    reader: RowReader = call_target(node, "data")
    run = run_of(Path(str(config.weights)))
    _check_same_reading(run, node)
    files, rows = find(str(config.predict.input), "predict.input"), 0.0
    for path in files:
        _, text = next(pieces(Block(path, 0, 0, None), "predict.input"), (0, b""))
        rows += (text.rstrip(b"\r\n").count(b"\n") + 1) * max(1.0, path.stat().st_size / max(1, len(text)))
        if reader.labelled(text) is None:
            raise UserError(f"predict.input={path}", f"has no row in its first MiB ({reader.format})")
    common = os.path.commonpath([path.parent for path in files])
    return EvaluatedInputs(str(common), tuple(os.path.relpath(path, common) for path in files), round(rows))


def _check_same_reading(run: Path | None, node: dict[str, Any]) -> None:
    """Refuse keys with which rows become other inputs than in the run of the weights: the model would see other ids.

    Raises:
        UserError: a key is another one: the model would see other ids.
    """
    try:
        theirs = json_text.read_object(run / "model.json")["rows"] if run is not None else None
    except (OSError, ValueError, KeyError):
        return
    for key, value in node.items():
        if theirs is not None and key in theirs and theirs[key] != value:
            before = "null" if theirs[key] is None else theirs[key]
            raise UserError(
                f"data.{key}={'null' if value is None else value}",
                f"the run that left the weights had data.{key}={before}",
                f"data.{key}={before}",
            )


def _check_output(output: str | None) -> None:
    """Refuse an output that cannot be written.

    Raises:
        UserError: its folder is not there, or it is a folder itself.
    """
    if output is not None and not Path(output).absolute().parent.is_dir():
        raise UserError(f"predict.output={output}", f"there is no folder {Path(output).parent}", "predict.output=FILE")
    if output is not None and Path(output).is_dir():
        raise UserError(
            f"predict.output={output}", "is a folder", typed("predict.output", Path(output) / "predictions.csv")
        )
