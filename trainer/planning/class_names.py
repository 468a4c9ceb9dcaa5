"""Compares the classes of saved weights with the classes of the data: names decide what an output means, not
numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config import schema
from trainer.config.run_config import RunConfig
from trainer.data.source import DataSource, Facts
from trainer.errors import RunFailed, UserError, why
from trainer.host import json_text
from trainer.planning.user_class_checks import asked
from trainer.wording import some

CLASSES = "classes.json"
"""Names of a run's classes, in the order of the labels."""


@dataclass(frozen=True)
class Classes:
    """What the outputs of the weights mean for these data.

    Attributes:
        names: of the outputs, in their order; empty: those of the data.
        labels: for each label of the data, the output of the same name; empty: label and output have the same number.
        said: for the plan, where this is not the usual case.
    """

    names: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()
    said: str = ""

    def applied(self, facts: Facts) -> Facts:
        """The facts of the data, with as many classes as the weights have."""
        return replace(facts, classes=len(self.names)) if self.names else facts

    def undone(self, facts: Facts) -> Facts:
        """These facts as the data source knows them, with its own number of classes."""
        return of_data(facts, self.labels)


def of_data(facts: Facts, labels: Sequence[int]) -> Facts:
    """The facts with the data's own number of classes; ``labels`` empty: the number of the weights is the data's."""
    return replace(facts, classes=len(labels)) if labels else facts


def run_of(weights: Path) -> Path | None:
    """The folder of the run that left these weights; None if it is not found."""
    return next((folder for folder in weights.parents[:2] if (folder / "plan.json").is_file()), None)


def class_names_of(weights: Path, key: str = "weights") -> list[str] | None:
    """The class names of the run that left the weights; None if they are not known.

    Args:
        key: that names the weights, for the error.

    Raises:
        UserError: the run's ``classes.json`` is damaged.
    """
    folder = run_of(weights)
    return None if folder is None else names_in(folder, f"{key}={weights}")


def names_in(run: Path, what: str) -> list[str] | None:
    """The class names in a run's folder; None if there are none.

    Raises:
        UserError: about ``what``: ``classes.json`` is damaged.
    """
    path = run / CLASSES
    if not path.is_file():
        return None
    try:
        names = json_text.read(path)
    except (OSError, ValueError) as error:
        raise _damaged(what, path, why(error)) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _damaged(what, path, "it is no list of texts")
    return names


def _damaged(what: str, path: Path, reason: str) -> UserError:
    return UserError(
        what, f"{path} does not hold the names of the classes: {reason}", "the folder of another run, or FILE elsewhere"
    )


def names_of_data(config: RunConfig, source: DataSource, facts: Facts) -> list[str]:
    """The class names of the data; empty where they have none, or tell them only when they are there."""
    what = f"data._target_={config.data._target_}"
    try:
        names = [str(name) for name in asked(what, "class_names", lambda: source.class_names(facts)) or ()]
    except (UserError, RunFailed, OSError):
        return []
    return names if len(names) == facts.classes else []


def of_outputs(config: RunConfig, source: DataSource, facts: Facts) -> Classes:
    """The meaning of the model's outputs: the classes of saved weights in evaluation and prediction, else those of the
    data.

    Raises:
        UserError: the weights, or what the run starts from, are of other classes.
    """
    if config.mode == "eval":
        return for_weights(config, source, facts)
    if config.mode == "predict":
        return for_predictions(config, source, facts)
    refuse_other_start(config, source, facts)
    return Classes()


def for_weights(config: RunConfig, source: DataSource, facts: Facts) -> Classes:
    """What the outputs of ``weights`` mean for these data, in mode=eval.

    Raises:
        UserError: the data have classes that the weights do not know.
    """
    weights = Path(str(config.weights))
    theirs, ours = class_names_of(weights), names_of_data(config, source, facts)
    if theirs is None:
        return Classes(said=_unnamed(weights, ours, facts))
    if not ours:
        if facts.task != "classification" or len(theirs) != facts.classes:
            return Classes()  # a model of another size is refused by its shapes
        return Classes(
            tuple(theirs),
            said=(
                f"the labels of {facts.source} have no names: they are taken for the classes of {run_of(weights)} "
                f"in their order, {some(theirs)}"
            ),
        )
    if ours == theirs:
        return Classes()
    if strange := [name for name in ours if name not in theirs]:
        raise _others(
            f"weights={weights}",
            strange,
            theirs,
            facts,
            "weights=RUN of these classes, or folders with the names of those",
        )
    if facts.task != "classification" or len(set(theirs)) < len(theirs) or len(set(ours)) < len(ours):
        raise UserError(
            f"weights={weights}",
            (
                f"its classes are {some(theirs)}, and those of {facts.source} are {some(ours)}: the order is "
                f"another, and labels of this kind are not mapped"
            ),
            "the order of the run",
        )
    fewer = f"{len(ours)} of the {len(theirs)}" if len(ours) < len(theirs) else f"the {len(theirs)}"
    order = "" if [name for name in theirs if name in ours] == ours else ", in another order"
    said = f"{facts.source} has {fewer} classes of {run_of(weights)}{order}: labels are mapped by name"
    return Classes(tuple(theirs), tuple(theirs.index(name) for name in ours), said)


def for_predictions(config: RunConfig, source: DataSource, facts: Facts) -> Classes:
    """The names of the outputs of ``weights`` in mode=predict: those of the run, else those of the data."""
    weights = Path(str(config.weights))
    if (theirs := class_names_of(weights)) is not None:
        return Classes(tuple(theirs))
    ours = [] if facts.stand_in else names_of_data(config, source, facts)
    return Classes(tuple(ours), said=_unnamed(weights, ours, facts))


def _unnamed(weights: Path, ours: Sequence[str], facts: Facts) -> str:
    """A remark on weights without class names; empty if the data have no names either."""
    if not ours:
        return ""
    run = run_of(weights)
    reason = f"{run} has no {CLASSES}" if run is not None else f"there is no {CLASSES} beside {weights}"
    return f"{reason}: its outputs are taken for the classes of {facts.source} in their order, {some(ours)}"


def _others(what: str, strange: Sequence[str], theirs: Sequence[str], facts: Facts, instead: str) -> UserError:
    return UserError(
        what, f"its classes are {some(theirs)}, and {facts.source} has {some(strange)}, which it does not know", instead
    )


def new_head(config: RunConfig, source: DataSource, facts: Facts) -> tuple[RunConfig, str]:
    """Return the config, with a new head if the pretrained weights have other classes, and a remark about it."""
    model = config.model
    if config.mode != "train" or model.get("_target_") != schema.FinetuneModel._target_ or model.get("head") != "auto":
        return config, ""
    weights = Path(str(model.get("weights"))).absolute()
    theirs = class_names_of(weights, "model.weights") if weights.exists() else None
    ours = names_of_data(config, source, facts)
    if theirs is None or not ours or ours == theirs:
        return config, ""
    said = (
        f"model.weights={model.get('weights')} was trained on the classes {some(theirs)}, and these are "
        f"{some(ours)}: the head is new (model.head=new)"
    )
    return config.changed(model={"head": "new"}), said


def refuse_other_start(config: RunConfig, source: DataSource, facts: Facts) -> None:
    """Refuse ``strategy.load_from`` of a run with other classes: its head would predict the wrong ones.

    Raises:
        UserError: the names or their order differ.
    """
    folder = config.node("strategy").get("load_from")
    if config.mode != "train" or folder is None:
        return
    what = f"strategy.load_from={folder}"
    start = Path(str(folder)).absolute()
    run = next((place for place in (start, *start.parents[:2]) if (place / "plan.json").is_file()), None)
    theirs = None if run is None else names_in(run, what)
    ours = names_of_data(config, source, facts)
    if theirs is not None and ours and ours != theirs:
        raise UserError(
            what,
            f"it is of a run with the classes {some(theirs)}, and {facts.source} has {some(ours)}",
            "strategy.load_from=null, or a run with these classes in this order",
        )


def of_checkpoint(run: Path, config: RunConfig, source: DataSource, facts: Facts) -> str:
    """How the classes differ from those of the run that wrote a checkpoint; empty if they are equal or unknown."""
    theirs, ours = names_in(run, f"resume={run}"), names_of_data(config, source, facts)
    if theirs is None or not ours or ours == theirs:
        return ""
    return f"the classes were {some(theirs)}, are {some(ours)}"
