"""Turns errors of Hydra, OmegaConf and YAML into one sentence: the key, the reason, what to type instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import config_files, hydra_features, named_by_libraries
from trainer.cli.arguments import ADVISE, AUTO
from trainer.cli.vocabulary import Vocabulary
from trainer.config import keys, schema
from trainer.config.target_source import keys_of, parameters
from trainer.errors import UserError, first_line
from trainer.optim.refused import REFUSED
from trainer.wording import quoted

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

LONGEST_KEY = 100
"""Letters of the longest word that can be a mistyped key."""
OWN_NAME = re.compile(r"\w[\w./-]*")
"""What a file of options can be called."""
QUOTED_KEY = re.compile(r"""(?<=[{,])(\s*)(["'])([^"']*)\2(\s*:)""")
"""A quoted key of a mapping, which Hydra's grammar does not allow."""


def explain(vocabulary: Vocabulary, error: Exception) -> UserError:
    """Turn an exception that composing a config has raised into a UserError of one sentence."""
    chain = list(_chain(error))
    text = "\n".join(str(e) for e in chain)
    return (
        config_files.not_utf8(vocabulary, chain)
        or _unreadable(vocabulary)
        or _broken_file(chain)
        or config_files.not_global(vocabulary)
        or _by_text(vocabulary, text)
        or _by_key(vocabulary, chain, text)
        or UserError("the config", str(error).strip().split("\n")[0] or type(error).__name__)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _unreadable(vocabulary: Vocabulary) -> UserError | None:
    """The error of an override that cannot be parsed, or of a group without an option."""
    for typed in vocabulary.overrides:
        override = vocabulary.parsed(typed)
        if override is None:
            return _malformed(vocabulary, typed)
        if not override.key_or_group:
            return UserError(typed, "has no key before the =", f"KEY{typed}")
        group, value = override.key_or_group, override.value()
        parts = value if isinstance(value, list) else [value]
        numbers = any(v is None or isinstance(v, (int, float)) for v in parts)
        if group in vocabulary.groups and numbers and not override.is_delete():
            options = vocabulary.options(group)
            return UserError(
                typed,
                f"must be an option of {group}: {', '.join(options)}",
                f"{group}={vocabulary.usual_option(group, typed)}",
            )
    return None


def _malformed(vocabulary: Vocabulary, typed: str) -> UserError:
    name, equals, value = typed.partition("=")
    if not equals:
        if name.lstrip("+") == "recipe":
            return UserError(
                typed, f"needs the name of a recipe: {', '.join(vocabulary.options('recipe'))}", "+recipe=NAME"
            )
        if name in vocabulary.options("recipe"):
            return UserError(typed, "a recipe is chosen with +recipe", f"+recipe={name}")
        near = keys.nearest_key(name, vocabulary.keys())
        meant = near or (name if len(name) <= LONGEST_KEY else "KEY")
        return UserError(typed, "an override is KEY=VALUE", f"{meant}=VALUE")
    if "${" in value:
        return UserError(typed, "a value from elsewhere is ${KEY} or ${oc.env:NAME}", quoted(f"{name}=${{KEY}}"))
    closing = "".join({"[": "]", "{": "}"}[c] for c in reversed(value) if c in "[{")
    if value.count("[") + value.count("{") > value.count("]") + value.count("}"):
        return UserError(typed, "a bracket is not closed", quoted(typed + closing))
    if value.lstrip("+-").isdigit():
        return UserError(typed, "is a number of too many digits", f"{name}=1")
    if value.startswith(("{", "[")):
        return _malformed_container(typed, name, value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return UserError(
        typed,
        "Hydra cannot read this value; text with special characters goes into quotes",
        quoted(f'{name}="{escaped}"'),
    )


def _malformed_container(typed: str, name: str, value: str) -> UserError:
    """The error of a mapping or list that Hydra cannot read on the command line."""
    plain = QUOTED_KEY.sub(r"\1\3\4", value)
    if plain != value and _is_readable(f"{name}={plain}"):
        return UserError(typed, "Hydra takes the keys of a mapping without quotes", quoted(f"{name}={plain}"))
    lines = [part.strip().replace("\\", "\\\\").replace('"', '\\"') for part in value[1:-1].split(",")]
    texts = ", ".join(f'"{line}"' for line in lines)
    if value[0] == "[" and not set("[]{}'\"") & set(value[1:-1]) and _is_readable(f"{name}=[{texts}]"):
        return UserError(typed, "texts with special characters need quotes", quoted(f"{name}=[{texts}]"))
    group, _, key = name.lstrip("+~").partition(".")
    there = f"{group}: {{{key}: {value}}}" if key else f"{group}: {value}"
    return UserError(
        typed,
        "Hydra cannot read this from the command line, as a file of yours can have it",
        f"a recipe with the line {there}",
    )


def _is_readable(override: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def _broken_file(chain: list[BaseException]) -> UserError | None:
    """The error of a file that is not YAML."""
    for error in chain:
        if mark := getattr(error, "problem_mark", None):
            place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
            return UserError(place, f"this is no YAML: {getattr(error, 'problem', error)}")
    return None


def _by_text(vocabulary: Vocabulary, text: str) -> UserError | None:
    for pattern, sentence in SENTENCES:
        if found := re.search(pattern, text, re.S):
            return sentence(vocabulary, found)
    return None


def _no_option(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    group, name = found[1], found[2]
    if group in hydra_features.OPTIONS:
        return hydra_features.refused(group, name)
    options = vocabulary.options(group)
    root, _, below = group.partition("/")
    if not options and root in vocabulary.groups:  # a file in a folder of the group's folder
        group, name, options = root, f"{below}/{name}", vocabulary.options(root)
    if group == "schema" and (of := re.search(r"In '([^']+)': Could not load", found.string)):
        near = keys.nearest_option(name, options)
        return UserError(
            f"/schema/{name} (in {of[1]}.yaml)", "there are no such keys", near and f"/schema/{near}@_here_"
        )
    typed = "+recipe=" if group == "recipe" else f"{group}="
    word = "recipe" if group == "recipe" else "option"
    source = "" if any(name in o for o in vocabulary.overrides) else f" (in +recipe={vocabulary.recipe})"
    if group == "optimizer" and name.lower() in REFUSED:
        return UserError(f"{typed}{name}{source}", *REFUSED[name.lower()])
    more = " (any of torch.optim, by optimizer.name=NAME)" if group == "optimizer" and options[-1:] == ["torch"] else ""
    why = f"there is no such {word}; there is {', '.join(options)}{more}"
    if by_name := named_by_libraries.typed_for(group, name):
        return UserError(f"{typed}{name}{source}", why, by_name)
    near = options[0] if len(options) == 1 else keys.nearest_option(name, options)
    if near or not options:
        return UserError(f"{typed}{name}{source}", why, near and typed + near)
    if vocabulary.config_dir or not OWN_NAME.fullmatch(name):
        return UserError(f"{typed}{name}{source}", why, f"{typed}NAME")
    own = f"--config-dir FOLDER, if {name} is your own, in FOLDER/{group}/{name}.yaml"
    return UserError(f"{typed}{name}{source}", why, f"{typed}NAME (or {own})")


def _no_group(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    name = found[1].partition("@")[0]
    typed = vocabulary.typed(name)
    if name == "recipe":
        return UserError(typed, "a recipe is added to the config, with a plus", f"+{typed}")
    if name in keys.OF_OTHERS:
        return UserError(typed, *keys.OF_OTHERS[name])
    near = keys.nearest(name, vocabulary.groups)
    return UserError(typed, "there is no such group", f"{near}=OPTION" if near else "")


def _nothing_chosen(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    group, recipe = found[1], vocabulary.recipe
    if recipe:
        return UserError(
            f"+recipe={recipe}",
            f"it chooses no {group}; there is {', '.join(vocabulary.options(group))}",
            f"{group}=OPTION",
        )
    if minus := [o for o in vocabulary.overrides if o.startswith("recipe=")]:
        return UserError(minus[0], "a recipe is added to the config, with a plus", f"+{minus[0]}")
    if any(o in ("mode=eval", "mode=predict") for o in vocabulary.overrides):
        return _no_training_said(vocabulary)
    return UserError(
        "nothing to train",
        f"no recipe and no {group} chosen (python -m trainer --help lists them)",
        f"+recipe=digits_lenet, or {group}=OPTION",
    )


def _no_training_said(vocabulary: Vocabulary) -> UserError:
    """The error of mode=eval or mode=predict without the recipe of the weights; their run's folder has the config."""
    mode = next(o for o in vocabulary.overrides if o.startswith("mode="))
    weights = Path(str(vocabulary.typed_value("weights") or "."))
    why = "needs the recipe that the weights were trained with, and the training's overrides of model and data"
    verb, more = mode.removeprefix("mode="), " INPUT" if mode == "mode=predict" else ""
    if any((folder / "plan.json").is_file() for folder in (weights, *weights.parents[:2])):
        return UserError(
            mode, f"{why}, or the run's folder alone", f"python -m trainer {verb} {quoted(str(weights))}{more}"
        )
    return UserError(mode, why, "+recipe=NAME")


def _no_config(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    return UserError(
        f"--config-name {found[1]}",
        f"there is no {found[1]}.yaml at the top of --config-dir, and trainer's own is config",
        "--config-name config",
    )


def _twice(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    group = found[1].rstrip(".")
    added = [o for o in vocabulary.overrides if o.startswith(f"+{group}=")]
    instead = added[-1].lstrip("+") if group != "recipe" and added else (added or [""])[-1]
    return UserError(" ".join(added) or group, "the group is chosen twice, and it takes one option", instead)


def _exists(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    typed = vocabulary.typed(found[1])
    return UserError(typed, "this key exists already, so it takes no plus", quoted(typed.lstrip("+")))


def _nothing_to_delete(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    near = keys.nearest_key(found[1], vocabulary.keys())
    instead = f"~{near}" if "." in near else f"{near}=VALUE" if near else ""
    return UserError(f"~{found[1]}", "there is nothing of that name to take away", instead)


def _swept(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    name, _, value = found[1].partition("=")
    return UserError(
        found[1], "several values make a sweep", f"-m {quoted(found[1])} (for a list: {quoted(f'{name}=[{value}]')})"
    )


def _swept_hydra(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    return UserError(found[1], "hydra's own keys cannot be swept over", f"{found[1].split(',')[0]}")


def _unknown(vocabulary: Vocabulary, found: re.Match[str]) -> UserError:
    return _unknown_key(vocabulary, found[1].partition("@")[0])


RESUMING = ("resume_from", "resume_from_checkpoint", "restore", "ckpt_path")
"""Keys with which other programs resume a training."""
Sentence = Callable[[Vocabulary, re.Match[str]], UserError]
SENTENCES: tuple[tuple[str, Sentence], ...] = (
    (r"Could not (?:find|load) '(\S+)/([^'/]+)'", _no_option),
    (r"Could not (?:override|delete) '([^'=]+)[^']*'\.?\s+No match in the defaults list", _no_group),
    (r"You must specify '([^']+)'", _nothing_chosen),
    (r"Cannot find primary config '([^']+)'", _no_config),
    (r"Multiple values for ([\w/@.]+)", _twice),
    (r"force-add of config groups is not supported: '\+*([^']+)'", _twice),
    (r"An item is already at '([^']+)'", _exists),
    (r"Could not delete from config. '([^']+)' does not exist", _nothing_to_delete),
    (r"Ambiguous value for argument '([^\n]+)'\n", _swept),
    (r"Sweep parameters '([^\n]+)' requires --multirun", _swept),
    (r"Sweeping over Hydra's configuration is not supported : '([^\n]+)'", _swept_hydra),
    (r"Could not override '([^']+)'", _unknown),
    (r"config group '([^']+)' does not exist", _unknown),
)


def _unknown_key(vocabulary: Vocabulary, path: str, file: str = "") -> UserError:
    """The UserError for a key that the config does not have; it names the option that has it, or the nearest key."""
    group, _, name = path.partition(".")
    typed = vocabulary.typed(path)
    value = typed.partition("=")[2] or "VALUE"
    what = f"{path} (in {file}.yaml)" if file else typed
    option = vocabulary.chosen.get(group) if name and group in vocabulary.groups else None
    if path.rpartition(".")[2] in RESUMING:
        return UserError(
            what,
            "a run goes on from its newest checkpoint with resume=auto, and from another one with resume=FOLDER",
            "hydra.run.dir=FOLDER resume=auto",
        )
    own_value = vocabulary.typed_value(path)
    if group in keys.OF_OTHERS:
        return UserError(what, *keys.OF_OTHERS[group])
    if option is None:
        of_hydra = [f"hydra.{key}" for key in vocabulary.option_keys("hydra", "config")] if group == "hydra" else []
        known = of_hydra or vocabulary.keys()
        near = keys.nearest_key(path, known, own_value)
        return UserError(what, "there is no such key", near and _set(near, value, file))
    other = keys.MEANT.get(name, "")  # of options that are called alike: criteo for synthetic_criteo
    if other and (
        owners := [o for o in vocabulary.options(group) if o in option and other in vocabulary.option_keys(group, o)]
    ):
        return UserError(
            what,
            f"there is no such key; {group}={owners[0]} has {group}.{other}",
            f"{group}={owners[0]} {quoted(f'{group}.{other}={value}')}",
        )
    owners = [o for o in vocabulary.options(group) if name in vocabulary.option_keys(group, o)]
    # optimizer=momentum before others that have a momentum; an option that measures first comes last
    owners.sort(key=lambda option: (f"{group}={option}" in (ADVISE, AUTO), option != name))
    declared = keys.find(path)  # without an owner it is a key of the whole group, such as tracking.tags
    if declared is not None and declared.kind is dict and (option in owners or not owners):
        return UserError(what, "holds entries of your own, and a new one takes a plus", quoted(f"+{path}={value}"))
    own_class = vocabulary.own_class(group)
    if owners and not own_class:
        return UserError(
            what,
            f"{group}={option} has no such key, {group}={owners[0]} has it",
            f"{group}={owners[0]} {quoted(f'{path}={value}')}",
            [path],
        )
    parent = keys.find(path.rpartition(".")[0])
    if parent is not None:
        inside = parent.kind is dict
        return UserError(
            what,
            f"is not in {parent.path} yet" if inside else f"there is no such key; {parent.path} is a value",
            quoted(f"+{path}={value}" if inside else f"{parent.path}={value}"),
        )
    known = [key for key in vocabulary.option_keys(group, option) if key != "_target_"]
    if own_class:
        return _unknown_of_own_class(vocabulary, path, what, file, own_class, known)
    why = f"there is no such key; {group}={option} has {', '.join(known) or 'no keys'}"
    if near := keys.nearest_key(path, [*(f"{group}.{k}" for k in known), *vocabulary.keys()], own_value):
        return UserError(what, why, _set(near, value, file))
    if group in vocabulary.open_groups:
        return UserError(what, f"{why}; a further argument of the constructor takes a plus", quoted(f"+{path}={value}"))
    return UserError(what, why)


def _unknown_of_own_class(
    vocabulary: Vocabulary, path: str, what: str, file: str, target: str, known: list[str]
) -> UserError:
    """The UserError for a key that a class of the user's own may take; it names the keys that this class does take.

    Args:
        known: the keys that the option has.
    """
    group = path.partition(".")[0]
    value = vocabulary.typed(path).partition("=")[2] or "VALUE"
    named = [key for key in (*keys_of(target), *schema.NOT_ARGUMENTS.get(group, ())) if key not in known]
    why = f"there is no such key; {target} takes {', '.join([*known, *named]) or 'none'}"
    near = keys.nearest_key(path, [f"{group}.{key}" for key in (*known, *named)])
    if near and near.partition(".")[2] in known:
        return UserError(what, why, _set(near, value, file))
    if near:
        return UserError(what, f"{why}; one that is not in its YAML takes a plus", quoted(f"+{near}={value}"))
    if elsewhere := keys.nearest_key(path, vocabulary.keys(), vocabulary.typed_value(path)):
        return UserError(what, why, _set(elsewhere, value, file))
    if group in schema.OPEN_GROUPS and parameters(target) is None:
        return UserError(what, f"{why}; a further one takes a plus", quoted(f"+{path}={value}"))
    return UserError(what, why)


def _set(path: str, value: str, file: str) -> str:
    """The override that sets a key; in a file, only the key."""
    return path if file else quoted(f"{path}={value}")


def _by_key(vocabulary: Vocabulary, chain: list[BaseException], text: str) -> UserError | None:
    """The error of a key or value that OmegaConf refuses."""
    from omegaconf import errors

    if lost := next((e for e in chain if isinstance(e, errors.InterpolationResolutionError)), None):
        return _no_source(vocabulary, str(lost.full_key or ""), str(lost))
    error: Any = next((e for e in chain if getattr(e, "full_key", None)), None)
    if error is None:
        return None
    path = error.full_key.partition("[")[0]  # of an item, its list
    file = found[1] if (found := re.search(r"In '([^']+)': \w+ raised", text)) else ""
    if isinstance(error, (errors.ConfigKeyError, errors.ConfigAttributeError)):
        return _unknown_key(vocabulary, path, file)
    if not isinstance(error, errors.ValidationError):
        return None
    merged = re.search(r"Error merging override ([^\n]+)", text)
    override = vocabulary.parsed(merged[1]) if merged else None
    if override is not None and path.startswith(f"{override.key_or_group}."):  # a mapping, and something inside it
        declared = keys.find(path)
        why = declared.refuse(error.value) if declared is not None else first_line(error)
        return UserError(
            merged[1] if merged else path, f"{path}: {why}", declared.instead(error.value) if declared else ""
        )
    if override is not None and override.key_or_group != path:
        return _unknown_key(vocabulary, override.key_or_group)
    return _wrong_value(vocabulary, path, error, file, override)


def _wrong_value(vocabulary: Vocabulary, path: str, error: Any, file: str, override: Override | None) -> UserError:
    value = override.get_value_string() if override is not None else keys.spelled(error.value)
    what = f"{path}={value}" + (f" (in {file}.yaml)" if file else "")
    declared = keys.find(path)
    why = declared.refuse(error.value) if declared is not None else ""
    if declared is not None and why:
        return UserError(what, why, declared.instead(error.value, vocabulary.usual(path)))
    inside = [k.path for section in keys.sections() for k in section.keys if k.path.startswith(f"{path}.")]
    if inside:
        return UserError(what, f"{path} holds the keys {', '.join(inside)}", f"{inside[0]}=VALUE")
    return UserError(what, str(error).split("\n")[0])


def _no_source(vocabulary: Vocabulary, path: str, text: str) -> UserError:
    """The error of an interpolation without a source."""
    holders = [o for o in vocabulary.overrides if "${" in o]
    what = vocabulary.typed(path) if path else (holders or ["the config"])[0]
    path = path or what.partition("=")[0]
    if found := re.search(r"Environment variable '([^']+)' not found", text):
        return UserError(
            what, f"there is no environment variable {found[1]}", quoted(f"{path}=${{oc.env:{found[1]},DEFAULT}}")
        )
    declared = keys.find(path)
    instead = declared.instead(None) if declared is not None else ""
    if found := re.search(r"Interpolation key '([^']+)' not found", text):
        near = keys.nearest_key(found[1], vocabulary.keys())
        return UserError(
            what,
            f"there is no key {found[1]} to take the value from",
            quoted(f"{path}=${{{near}}}") if near else instead,
        )
    return UserError(what, text.split("\n")[0], instead)
