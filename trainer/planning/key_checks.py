"""Checks the config's keys and ``_target_``s: unknown or missing keys, and refused values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config import keys, schema
from trainer.config.keys import every_key, leaves
from trainer.config.run_config import RunConfig
from trainer.config.schema import option_of
from trainer.config.target_source import check_arguments, check_target, parameters
from trainer.errors import UserError, WrongValue
from trainer.optim.refused import TORCHS, option_for
from trainer.strategies.builtin import ADVISE, AUTO
from trainer.tasks.contract import AUTO as AUTO_TASK
from trainer.visible import one_line
from trainer.wording import quoted

LONGEST_NAME = 200
"""Bytes of a run's name: MLflow keeps 256 of an experiment's, and most file systems 255 of a folder's."""


def check_keys(config: Mapping[str, Any]) -> None:
    """Refuse unknown keys, missing keys, missing values, and values that a key does not accept."""
    _check_no_words_of_hydra(config)
    root = {k.path: k for k in keys.keys(schema.Config)}
    free = (*schema.GROUPS, "metrics")  # what is in these is checked elsewhere
    present = {**config, **{p: v for p, v in leaves(config, "") if p.partition(".")[0] not in (*free, p)}}
    # The keys of sweep.space are those of other groups; the search checks them.
    present = {p: v for p, v in present.items() if not p.startswith("sweep.space.")} | {"sweep.space": None}
    nodes = {path.partition(".")[0] for path in root} - set(root)
    for name, value in present.items():
        if name not in root and (name not in nodes or not isinstance(value, Mapping)):
            if name.partition(".")[0] in keys.OF_OTHERS:
                raise UserError(f"{name}={keys.spelled(value)}", *keys.OF_OTHERS[name.partition(".")[0]])
            near = keys.nearest_key(name, every_key(), value)
            raise UserError(
                f"{name}={keys.spelled(value)}",
                "there is no such key (python -m trainer --help lists them)",
                near and quoted(f"{near}={keys.spelled(value)}"),
            )
        if name in root and name not in schema.GROUPS:
            _check_value(root[name], value)
    for name, declared in root.items():
        if name not in present:
            raise _taken_away(declared)
    for group in schema.GROUPS:
        check_group(config, group)


def check_values(config: Mapping[str, Any]) -> None:
    """Refuse values that their keys do not accept; keys without a value, and interpolations, are left for the run.

    Raises:
        WrongValue: e.g. a ``mode`` that does not exist.
    """
    known = {k.path: k for k in keys.keys(schema.Config) if k.path not in schema.GROUPS}
    for group in schema.GROUPS:
        node = config.get(group)
        known |= _known_keys(group, str(node.get("_target_")))[0] if isinstance(node, Mapping) else {}
    for path, value in leaves(config, ""):
        if path in known and not (isinstance(value, str) and (value == "???" or "${" in value)):
            _check_value(known[path], value)


def check_group(config: Mapping[str, Any], group: str) -> None:
    """Refuse keys of a config group that its schema does not declare, unless they are for a constructor."""
    node = config[group]
    if not isinstance(node, Mapping):
        what = f"~{group}" if node == "???" else f"{group}={keys.spelled(node)}"
        raise UserError(what, "the run needs one of the group's options", f"{group}=OPTION")
    known, closed = _known_keys(group, str(node.get("_target_")))
    mappings = tuple(f"{declared.path}." for declared in known.values() if declared.kind is dict)
    present = dict(leaves(node, f"{group}."))
    for path, value in present.items():
        if value == "???":
            raise UserError(path, "has no value", f"{path}=VALUE")
        if path in known:
            _check_value(known[path], value)
        elif closed and not path.startswith(mappings):
            near = keys.nearest_key(path, [*known, *(k.path for k in keys.keys(schema.Config))], value)
            names = ", ".join(k.partition(".")[2] for k in known if not k.endswith("._target_"))
            raise UserError(
                path,
                f"there is no such key; this {group} has {names or 'no keys'}",
                near and quoted(f"{near}={keys.spelled(value)}"),
            )
    if group not in schema.CONSTRUCTED:
        for path, declared in known.items():
            if path not in present and declared.kind is not dict:
                raise _taken_away(declared) if closed else _without_schema(group, path, str(node.get("_target_")))


def _without_schema(group: str, path: str, target: str) -> UserError:
    """The refusal for an option of the user's own that does not begin with its group's keys."""
    base = schema.GROUPS[group][0].__name__
    return UserError(
        path,
        f"{target} is called without this key, which every {group} has",
        f"defaults: [/schema/{base}@_here_, _self_] in its YAML, or {path.rpartition('.')[2]}: VALUE",
    )


def _known_keys(group: str, target: str) -> tuple[dict[str, keys.Key], bool]:
    """The keys that a config group accepts for this ``_target_``, and whether it accepts no others."""
    declared = option_of(group, target)
    closed = str(getattr(declared, "_target_", None)) == target and group not in schema.CONSTRUCTED
    return {k.path: k for k in keys.keys(declared, f"{group}.")}, closed


def _taken_away(declared: keys.Key) -> UserError:
    value = "VALUE" if declared.default == "???" else keys.spelled(declared.default)
    return UserError(f"~{declared.path}", "the run needs this key", f"{declared.path}={value}")


def _check_value(declared: keys.Key, value: Any) -> None:
    if why := declared.refuse(value):
        raise WrongValue(declared.path, f"{declared.path}={keys.spelled(value)}", why, value, declared.instead)


HYDRAS = ("_args_", "_partial_", "_recursive_", "_convert_")
"""Words by which Hydra's instantiate changes a call."""


def _check_no_words_of_hydra(config: Mapping[str, Any]) -> None:
    """Refuse words of Hydra's instantiate: a ``_target_`` is called with the keys beside it, by name, and nothing
    else."""
    for path, value in _inside(config, ""):
        owner, _, word = path.rpartition(".")
        if word in HYDRAS and owner:
            why = f"{word} is not read: {owner}._target_ is called once, with the keys beside it as arguments by name"
            named = word == "_args_" and "[" not in path
            raise UserError(
                f"{path}={keys.spelled(value)}", why, f"+{owner}.NAME=VALUE" if named else f"{owner} without {word}"
            )


def _inside(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every key of a nested config with its value, those inside of lists too."""
    pairs = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in pairs:
        inner = f"{path}[{name}]" if isinstance(node, list) else f"{path}.{name}" if path else str(name)
        yield inner, value
        yield from _inside(value, inner)


def check_targets(config: Mapping[str, Any], typed: set[str]) -> None:
    """Refuse config groups whose ``_target_`` does not exist or does not take the group's keys."""
    for group in schema.GROUPS:
        target = config[group].get("_target_")
        if target is None and group in schema.CONSTRUCTED:
            raise UserError(
                f"{group}._target_",
                "has no value: it names the class or function to call",
                f"_target_: my_package.module.Name in the YAML file of this {group}",
            )
        if target is None or target in (ADVISE, AUTO, AUTO_TASK):
            continue
        if group == "scheduler" and str(target).startswith(TORCHS):
            why = (
                "is built with one process's optimizer and counts its steps; here each worker and server computes "
                "the rate from the update's number"
            )
            raise UserError(f"scheduler._target_={target}", why, option_for(config[group]))
        check_target(str(target), f"{group}._target_")
        if group in schema.CONSTRUCTED:
            check_arguments(config[group], group, typed)
    _check_nodes(
        "data.transforms",
        config["data"].get("transforms") or [],
        "data.transforms=[{_target_:torchvision.transforms.v2.ColorJitter,hue:0.1}]",
    )
    _check_nodes(
        "tracking.trackers",
        config.get("tracking", {}).get("trackers", {}),
        "tracking.trackers={csv:{_target_:my_package.Csv}}",
    )
    _check_nodes("callbacks", config["callbacks"], "callbacks=[{_target_:my_package.MyCallback}]")
    _check_nodes(
        "metrics",
        config["metrics"],
        "metrics={f1w:{_target_:torchmetrics.classification.MulticlassF1Score,num_classes:10}}",
    )


def _check_nodes(key: str, nodes: Any, example: str) -> None:
    """Refuse config nodes, in a list or by name, whose targets do not exist or do not take their keys.

    Args:
        example: of the whole key, to type instead.
    """
    by_path = (
        {f"{key}.{name}": node for name, node in nodes.items()}
        if isinstance(nodes, Mapping)
        else {f"{key}[{n}]": node for n, node in enumerate(nodes)}
    )
    for path, node in by_path.items():
        if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
            raise UserError(f"{path}={keys.spelled(node)}", "must be a mapping with a _target_", example)
        target = node["_target_"]
        check_target(target, f"{path}._target_")
        accepted = parameters(target)
        strange = next((name for name in node if accepted is not None and name not in (*accepted, "_target_")), None)
        if strange is not None:
            near = keys.nearest(strange, accepted or ())
            raise UserError(
                f"{path}.{strange}",
                f"{target} takes no such argument; it takes {', '.join(accepted or ())}",
                near and f"{near}: {keys.spelled(node[strange])}",
            )


def check_mode(config: RunConfig) -> None:
    """Refuse keys of another mode, and a mode without its keys.

    Raises:
        UserError: a key of another mode is set, or one of this mode is not.
    """
    mode, predict = config.mode, config.predict
    if mode in ("lr_find", "scaling"):  # one command makes trainings of it before this
        raise UserError(f"mode={mode}", "is a command of its own, and no job of a sweep", f"mode={mode} without -m")
    if config.strategy._target_ == ADVISE:
        why = "is a command of its own, and no job of a sweep or of an engine"
        raise UserError("strategy=advise", why, "python -m trainer ... strategy=advise")
    weights = "the file of weights, or the folder of the run that made it"
    for path, value, modes, needed in (
        ("weights", config.weights, ("eval", "predict"), weights),
        ("predict.input", predict.input, ("predict",), "a folder of images, or a file of rows"),
        ("predict.output", predict.output, ("predict",), ""),
    ):
        if value is not None and mode not in modes:
            instead = f"mode={modes[0]} (or ~{path}={value})" if path != "weights" else "mode=eval"
            raise UserError(f"{path}={value}", f"mode={mode} does not take it", instead)
        if value is None and mode in modes and needed:
            raise UserError(f"mode={mode}", f"needs {path}, {needed}", f"{path}=PATH")
    if config.eval.split != schema.EvalConfig.split and mode != "eval":
        instead = "mode=eval (test=true measures the test samples at the end of a training)"
        raise UserError(f"eval.split={config.eval.split}", f"mode={mode} does not take it", instead)


def check_name(name: str) -> None:
    """Refuse a run name that cannot be a folder below ``outputs/`` and an MLflow experiment.

    Raises:
        UserError: it would be somewhere else, or no folder's name.
    """
    what, parts = f"name={name}", name.split("/")
    readable = "".join(c if c.isalnum() or c in "._-" else "_" for c in parts[-1]).strip("._")[:60] or "custom"
    if any(not part.strip() or part in (".", "..") for part in parts):
        raise UserError(what, "its folder would not be one below outputs/", f"name={readable}")
    if one_line(name) != name:
        raise UserError(what, "holds characters that no terminal shows", f"name={readable}")
    if len(os.fsencode(name)) > LONGEST_NAME:
        raise UserError(what, f"is longer than {LONGEST_NAME} bytes", f"name={readable}")
