"""``python -m trainer eval RUN [DATA]`` and ``predict RUN INPUT``: the config comes from the folder of the run.

The values of the run become one more option of each group, ``as_in_run``, in Hydra's store. So overrides after RUN are
checked, and change the config, as after a recipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.cli.chosen import VERBS, Chosen
from trainer.cli.eval_data import other_data, own_data
from trainer.config import schema
from trainer.config.keys import is_of, key_of, leaves
from trainer.config.redact import command
from trainer.config.schema import TrackingConfig, option_of
from trainer.config.secret_parts import HIDDEN
from trainer.errors import UserError, why
from trainer.hashing import hash_of
from trainer.host import private
from trainer.planning.plan import Plan, read_plan
from trainer.run_folder.leftovers import CHECKPOINTS
from trainer.wording import counted, literal

OPTION = "as_in_run"
CARRIED = ("model", "data", "sampler", "task", "loss", "optimizer", "scheduler", "execution", "tracking")
TRACKING = "/schema/TrackingConfig@tracking"
"""The schema of all trackers. No option includes it, because several options can be chosen at once."""
USUAL = {"strategy": "auto", "launch": "local", "predict": "folder", "checkpoint": "auto", "hydra": "trainer"}
"""Options of the groups that describe how the training ran; they are not carried over from the run."""
OF_THE_COMMAND = (
    "mode",
    "weights",
    "plan",
    "profile",
    "debug",
    "verbosity",
    "resume",
    "validation",
    "early_stop",
    *USUAL,
)
OF_OTHER_KEYS = re.compile(r"(?:[^$]|\$\{[\w.]+\})*")
SKELETON, AS_BUILT = "skeleton.pkl", "trainer.models.skeleton.as_built"


@dataclass(frozen=True)
class Words:
    """A typed ``eval`` or ``predict``; ``input`` is '' if none was typed."""

    verb: str
    run: str
    input: str
    overrides: list[str]

    @property
    def command(self) -> str:
        """The command up to RUN."""
        return self.command_of(self.run)

    def command_of(self, run: Any) -> str:
        """The command up to another RUN."""
        return f"python -m trainer {command([self.verb, str(run)])}"

    @staticmethod
    def of(words: Sequence[str]) -> Words:
        """Parse an ``eval`` or ``predict``.

        Raises:
            UserError: no run, nothing to predict, or more than one folder was typed.
        """
        place = next(n for n, word in enumerate(words) if word in VERBS)
        verb, after = words[place], list(words[place + 1 :])
        named = []
        while after and not _is_override(after[0]):
            named.append(after.pop(0))
        instead = f"python -m trainer {verb} {VERBS[verb]}"
        overrides = [*words[:place], *after]
        if not named:
            raise UserError(verb, "needs the folder of a run, or its MLflow run id", instead)
        if len(named) > 2:
            raise UserError(
                command([verb, *named]), f"takes one folder or file after the run, not {len(named) - 1}", instead
            )
        if verb == "predict" and len(named) < 2 and not any(key_of(o) == "predict.input" for o in overrides):
            raise UserError(
                f"{verb} {named[0]}",
                "needs a folder of images, or a file of rows",
                f"python -m trainer {command([verb, named[0]])} FOLDER",
            )
        for override in overrides:
            if (key := key_of(override)) in ("recipe", "mode"):
                raise UserError(
                    override,
                    f"{verb} takes the {key} from the run" if key == "recipe" else f"{verb} is a mode",
                    f"{command([verb, named[0]])} without {override}",
                )
        return Words(verb, named[0], named[1] if len(named) > 1 else "", overrides)


def _is_override(word: str) -> bool:
    """Whether a word is ``key=value``, and not a path such as ``multirun/lr=0.1``."""
    return re.match(r"[+~]|[\w.@/-]+=", word) is not None and not os.path.lexists(word)


@contextlib.contextmanager
def chosen_of_run(words: Sequence[str], config_name: str | None, flags: Sequence[str]) -> Iterator[Chosen]:
    """Context manager: yields what a verb with a run asks for. The config is that of the run, whose own modules can be
    imported inside.

    Raises:
        UserError: RUN is no run, has no weights or no config, or its data are not found.
    """
    asked = Words.of(words)
    if config_name is not None:
        raise UserError(f"--config-name {config_name}", f"{asked.verb} takes the config of the run", asked.command)
    path = _path(asked)
    run = _run_of(path, asked)
    plan = _plan(run)
    config = _config(run, asked)
    _check_mode(config, asked)
    config = _finished(config, asked, plan, path)
    config |= {"model": _as_built(config.get("model", {}), run, asked)}
    own_code = plan.paths.own_code
    code = [folder for folder in own_code if os.path.isdir(folder)]
    before = sys.path[:]
    sys.path[:0] = code
    try:
        with _stored(config) as name:
            own = [asked.verb, asked.run, *filter(None, [asked.input])]
            yield Chosen(name, asked.overrides, [*own, *flags], asked.verb)
    except UserError as error:
        if "no module" in str(error).lower() and (gone := [folder for folder in own_code if folder not in code]):
            error.add_note(
                f"The run's own classes were in {', '.join(gone)}, which is gone. If they are elsewhere: "
                f"PYTHONPATH=FOLDER before the command"
            )
        raise
    finally:
        sys.path[:] = before


# -- the run -----------------------------------------------------------------------------------------------------------


def _path(asked: Words) -> Path:
    """The path of RUN: a run's folder, a checkpoint or file in it, or the folder of an MLflow run id."""
    if os.path.exists(asked.run):
        return Path(asked.run)
    from trainer.planning.find_checkpoint import RUN_ID

    if not RUN_ID.fullmatch(asked.run):
        why = "there is no such folder, and an MLflow run id has 32 hexadecimal digits"
        raise UserError(asked.command, why, asked.command_of("outputs/RECIPE/TIME"))
    from trainer.config.schema.run import MLFLOW
    from trainer.tracking.run_lookup import folder_of

    uris = [o.partition("=")[2].strip("'\"") for o in asked.overrides if key_of(o) == "tracking.uri"]
    tracking = TrackingConfig(trackers={MLFLOW: {}}, uri=uris[-1] if uris else None)
    return folder_of(tracking, asked.run, asked.command, asked.command_of("outputs/RECIPE/TIME"))


def _run_of(path: Path, asked: Words) -> Path:
    """The run folder that the path is, or lies in."""
    real = Path(os.path.abspath(path))
    for folder in (real, *real.parents[:2]):
        if (folder / "config.yaml").is_file() and (folder / "plan.json").is_file():
            return folder
    if jobs := sorted(job.parent for job in real.glob("*/plan.json")):
        raise UserError(
            asked.command,
            f"holds {counted(len(jobs), 'run')}, and is none itself",
            asked.command_of(path / jobs[-1].name),
        )
    raise UserError(
        asked.command,
        "is no folder of a run: it has no config.yaml and plan.json",
        asked.command_of("outputs/RECIPE/TIME"),
    )


def _plan(run: Path) -> Plan:
    try:
        return read_plan(run)
    except (OSError, ValueError) as error:
        raise UserError(str(run / "plan.json"), f"cannot be read: {why(error)}", "another run") from error


def _config(run: Path, asked: Words) -> dict[str, Any]:
    """The run's finished config, with the interpolations of the composed one, so that overrides reach both keys."""
    finished = _mapping(run / "config.yaml")
    composed = run / ".hydra" / "config.yaml"
    config: dict[str, Any] = _with_links(finished, _mapping(composed) if composed.is_file() else {})
    missing = [group for group in CARRIED if not isinstance(config.get(group), Mapping)]
    if missing:
        raise UserError(str(run / "config.yaml"), f"has no {', '.join(missing)}", "another run")
    return config


def _mapping(file: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(str(file), f"cannot be read: {why(error)}", "another run") from error
    if not isinstance(found, dict):
        raise UserError(str(file), "is no config of a run", "another run")
    return found


def _with_links(finished: Any, composed: Any) -> Any:
    """The finished value; or the composed one if that is an interpolation, or if the finished one is hidden."""
    if isinstance(finished, Mapping):
        others = composed if isinstance(composed, Mapping) else {}
        return {key: _with_links(value, others.get(key)) for key, value in finished.items()}
    if isinstance(finished, list):
        same = isinstance(composed, list) and len(composed) == len(finished)
        return [
            _with_links(value, other) for value, other in zip(finished, composed if same else finished, strict=True)
        ]
    if (
        isinstance(composed, str)
        and "${" in composed
        and (OF_OTHER_KEYS.fullmatch(composed) or HIDDEN in str(finished))
    ):
        return composed
    return literal(finished) if isinstance(finished, str) else finished


def _check_mode(config: Mapping[str, Any], asked: Words) -> None:
    """Refuse a run that evaluated or predicted: it has no weights."""
    if config.get("mode") == "train" or any(key_of(o) == "weights" for o in asked.overrides):
        return
    weights = Path(str(config.get("weights")))
    trained = weights.parents[1] if weights.parent.name == CHECKPOINTS else weights.parent
    raise UserError(
        asked.command, f"is a run of mode={config.get('mode')}, which leaves no weights", asked.command_of(trained)
    )


def _finished(config: Mapping[str, Any], asked: Words, plan: Plan, path: Path) -> dict[str, Any]:
    """The config of the command: the run's, without the keys of its own command, and with the typed keys.

    Raises:
        UserError: a value is hidden in the run's folder, and was not typed.
    """
    typed = [key_of(o) for o in asked.overrides]
    kept = {key: value for key, value in config.items() if key not in OF_THE_COMMAND}
    data, tracking = kept.pop("data"), kept.pop("tracking")
    kept |= {
        "data": _data(data, asked, plan.paths.started_in, typed),
        "tracking": {**tracking, "run_name": None, "registered_model": None},
    }
    for key, value in leaves(kept, ""):
        if HIDDEN in str(value) and not is_of(key, typed):
            empty = {"callbacks": "[]", "metrics": "{}"}.get(key.partition(".")[0], "VALUE")
            raise UserError(
                f"{key} of {asked.run}", "is a secret, which no run's folder keeps", f"{asked.command} {key}={empty}"
            )
    predict = {"input": literal(asked.input)} if asked.verb == "predict" and asked.input else {}
    return {**kept, "mode": asked.verb, "weights": literal(os.path.abspath(path)), "predict": predict}


def _data(data: Mapping[str, Any], asked: Words, started_in: str, typed: list[str]) -> dict[str, Any]:
    if asked.verb == "eval" and asked.input:
        split = next((o.partition("=")[2] for o in reversed(asked.overrides) if key_of(o) == "eval.split"), "val")
        return other_data(data, asked.input, asked.command, split)
    return own_data(data, started_in, typed, asked.command, refuse=asked.verb == "eval")


def _as_built(model: Mapping[str, Any], run: Path, asked: Words) -> Mapping[str, Any]:
    """The run's model from the run's skeleton, if there is one; a changed model is built from its class."""
    path = run / SKELETON
    if any(is_of(key_of(override), ["model"]) for override in asked.overrides):
        return model
    try:
        private.read_unshared(path)  # the check; the pickle is read where the model is built
    except OSError:
        return model
    return {**model, "_target_": AS_BUILT, "skeleton_file": literal(str(path))}


# -- Hydra's store -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stored(config: Mapping[str, Any]) -> Iterator[str]:
    """Context manager: put a config into Hydra's store, as primary config and as option of each group; yields its
    name."""
    from hydra.core.config_store import ConfigStore

    store: Any = ConfigStore.instance()
    name = f"run_{hash_of(json.dumps(config, default=str)):x}"
    groups = {**{group: OPTION for group in CARRIED}, **USUAL, "predict": OPTION}
    options = [{group: option} for group, option in groups.items()]
    defaults = ["schema", TRACKING, *options, "_self_"]  # as in conf/config.yaml
    for group in (*CARRIED, "predict"):
        declared = option_of(group, str(config[group].get("_target_")))
        base = [] if group == "tracking" else [f"/schema/{declared.__name__}@_here_"]
        node = {"defaults": [*base, "_self_"], **config[group]}
        store.store(group=group, name=OPTION, node=node, provider="the run's folder")
    root = {key: value for key, value in config.items() if key not in schema.GROUPS}
    store.store(name=name, node={"defaults": defaults, **root}, provider="the run's folder")
    try:
        yield name
    finally:
        store.repo.pop(f"{name}.yaml", None)
        for group in (*CARRIED, "predict"):
            store.repo.get(group, {}).pop(f"{OPTION}.yaml", None)
