"""Checks what a user's strategy, data source or launcher returns; if it is wrong, one sentence names the class."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config import schema
from trainer.config.instantiate import locate, required_by
from trainer.config.run_config import RunConfig
from trainer.config.target_source import check_target
from trainer.data.source import DataSource, Facts
from trainer.errors import RunFailed, UserError, first_line
from trainer.strategies.contract import Declaration, Traits
from trainer.wording import kind


def asked(what: str, method: str, call: Callable[[], Any]) -> Any:
    """Call a method of the user's class and return its result; an exception in it becomes a UserError.

    Args:
        what: the key and the class that it names, e.g. ``data._target_=my_package.data.Squares``.

    Raises:
        UserError: the method breaks; with file and line.
    """
    try:
        return call()
    except (UserError, RunFailed, OSError):  # these say by themselves what is wrong
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            what, f"its {method} breaks in {frame.filename}:{frame.lineno}: {type(error).__name__}: {first_line(error)}"
        ) from error


def callback_name(number: int, node: Mapping[str, Any]) -> str:
    """The name of a callback in messages and checkpoints."""
    return f"callbacks[{number}] ({node.get('_target_')})"


def refusals(what: str, method: str, call: Callable[[], Any]) -> Sequence[UserError]:
    """Call a user's method such as ``refuse`` and return its list of UserErrors.

    Raises:
        UserError: the method breaks, or returns something else.
    """
    found = asked(what, method, call)
    if not isinstance(found, (list, tuple)):
        raise UserError(
            what, f"its {method} returned {kind(found)}. Return a list of UserErrors, empty where nothing is refused"
        )
    if strange := [one for one in found if not isinstance(one, UserError)]:
        raise UserError(
            what,
            (
                f"its {method} returned a list with {kind(strange[0])}. Return a list of "
                f"trainer.errors.UserError(what, why, instead)"
            ),
        )
    return found


def check_declaration(declaration: Declaration, what: str) -> None:
    """Check a user's strategy declaration: its traits, and the classes and functions that it names.

    Raises:
        UserError: they are not.
    """
    traits = asked(what, "traits", lambda: declaration.traits)
    if not isinstance(traits, Traits):
        raise UserError(what, f"its traits are {kind(traits)}. Write traits = Traits(exact=..., lockstep=...)")
    worker, entries = getattr(declaration, "worker", None), declaration.entries
    _check_place(worker, what, "worker", "module:class", "the Strategy that runs in each worker")
    if not isinstance(entries, Mapping):
        raise UserError(what, f"its entries are {kind(entries)}. Write entries = {{ROLE: 'module:function'}}")
    for role, place in entries.items():
        _check_place(
            place, what, f"entries[{role!r}]", "module:function", f"where each process of the role {role} enters"
        )


def _check_place(place: Any, what: str, name: str, form: str, purpose: str) -> None:
    """Check that a text such as ``my_package.averaging:Averager`` in a user's declaration names something that exists.

    Raises:
        UserError: it does not.
    """
    if place is None:
        raise UserError(what, f"has no {name}. Write {name} = '{form}', {purpose}")
    if not isinstance(place, str):
        here = f"{place.__module__}:{place.__qualname__}" if isinstance(place, type) else form
        raise UserError(what, f"its {name} is {kind(place)}, not a text", f"{name} = '{here}'")
    module, colon, found = place.partition(":")
    if not colon or not found:
        before, _, last = place.rpartition(".")
        raise UserError(what, f"its {name}='{place}' is not '{form}'", f"{name} = '{before}:{last}'" if before else "")
    try:
        check_target(place, name)
    except UserError as error:
        raise UserError(
            what,
            f"its {name}='{place}': {error.why}",
            error.instead and f"{name} = '{module}:{error.instead.rpartition('.')[2]}'",
        ) from error


def facts_of(config: RunConfig, source: DataSource, global_batch_size: int) -> Facts:
    """Ask a data source for its facts, and check them.

    Raises:
        UserError: the data are not there, or the source breaks or returns something else.
    """
    what = f"data._target_={config.data._target_}"
    return checked_facts(asked(what, "facts", lambda: source.facts(global_batch_size)), what, "facts")


def checked_facts(facts: Any, what: str, method: str) -> Facts:
    """Check and return what ``facts`` or ``prepare`` of a user's data source class returned.

    Raises:
        UserError: they are no facts, or hold something else than they should.
    """
    if not isinstance(facts, Facts):
        raise UserError(
            what,
            f"its {method} returned {kind(facts)}. Return a trainer.data.source.Facts"
            + (" (the facts that it was given, where nothing has changed)" if method == "prepare" else ""),
        )
    for name, least in (("train_samples", 0), ("val_samples", 0), ("test_samples", 0), ("classes", 1)):
        value = getattr(facts, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(
                what,
                f"its {method} returned Facts with {name}={value!r}. It must be a whole number of at least {least}",
            )
    shapes = facts.shape.values() if isinstance(facts.shape, dict) else [facts.shape]
    if not all(isinstance(shape, tuple) and all(isinstance(n, int) and n > 0 for n in shape) for shape in shapes):
        raise UserError(
            what,
            (
                f"its {method} returned Facts with shape={facts.shape!r}. It must be a tuple of whole numbers, "
                f"such as (3, 224, 224), or a dict of these by input"
            ),
        )
    return facts


def before_start(what: str, node: Mapping[str, Any]) -> str:
    """Call the class method ``check`` (writes nothing) or ``prepare`` (once per host) of the model, if it has one.

    Returns:
        what it says for the plan: which part of a file of weights is taken.

    Raises:
        UserError: what it needs is not there.
    """
    step = getattr(locate(str(node["_target_"]), "model._target_"), what, None)
    if callable(step) and not isinstance(step, type):
        left_out = ("_target_", *schema.not_arguments("model", node, required_by(step)))
        said = step(**{k: v for k, v in node.items() if k not in left_out})
        return said if isinstance(said, str) else ""
    return ""
