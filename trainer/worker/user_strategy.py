"""Checks a user's own strategy: the classes and functions that it names for its processes, and what its worker can
do."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainer.config.instantiate import locate
from trainer.config.run_config import RunConfig
from trainer.errors import RunFailed, UserError
from trainer.optim.schedules import is_plateau
from trainer.planning.plan import Plan
from trainer.strategies.contract import Declaration, LeasesWork, ObservesValidations, Scatters, Strategy
from trainer.wording import kind


def check_worker(declaration: Declaration, what: str) -> None:
    """Check a user's strategy: its ``worker`` names a :class:`Strategy` with all methods, and its ``entries``
    functions.

    Args:
        what: the key and the class that it names.

    Raises:
        UserError: they do not.
    """
    place = declaration.worker
    found = _imported(place, what, "worker")
    if not isinstance(found, type) or not issubclass(found, Strategy):
        what_it_is = "a Declaration" if isinstance(found, type) and issubclass(found, Declaration) else kind(found)
        raise UserError(
            what, f"its worker='{place}' is {what_it_is}, not a subclass of trainer.strategies.contract.Strategy"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UserError(
            what, f"its worker='{place}' lacks the {'method' if len(missing) == 1 else 'methods'} {', '.join(missing)}"
        )
    for role, entry in declaration.entries.items():
        function = _imported(entry, what, f"entries[{role!r}]")
        if not callable(function):
            raise UserError(what, f"its entries[{role!r}]='{entry}' is {kind(function)}, not a function")


def _imported(place: str, what: str, name: str) -> Any:
    """Import what a user's strategy names for a process, such as ``my_package.averaging:Averager``.

    Raises:
        UserError: nothing does, or its module cannot be imported.
    """
    try:
        return locate(place, name)
    except UserError as error:
        raise UserError(what, f"its {name}='{place}': {error.why}") from error


def check_set_up(strategy: Strategy, forward: object) -> None:
    """Check after ``setup`` that a strategy has returned a module and made an optimizer.

    Raises:
        RunFailed: it returned no model, or made no optimizer.
    """
    name = f"{type(strategy).__module__}.{type(strategy).__qualname__}"
    if not isinstance(forward, nn.Module):
        raise RunFailed(
            f"{name}: setup returned {kind(forward)}. Return the module to call in training, as a rule the "
            f"model that it was given"
        )
    # a strategy without an updater has its own lr
    if not hasattr(strategy, "updater") and type(strategy).lr is Strategy.lr:
        raise RunFailed(f"{name}: setup made no optimizer. Write self.updater = make_updater(model) in it")


def check_abilities(config: RunConfig, plan: Plan, strategy: Strategy) -> None:
    """Refuse a strategy without the methods that this run needs: leased blocks, scatter, validations.

    Raises:
        RunFailed: its declaration has promised what its worker cannot do.
    """
    needs: dict[str, tuple[bool, type]] = {
        "data.work=leased": (plan.batches.leased, LeasesWork),
        "data.read=scatter": (config.data.read == "scatter", Scatters),
        "scheduler=plateau": (plan.mode == "train" and is_plateau(config.scheduler._target_), ObservesValidations),
    }
    together = plan.mode == "train" and plan.topology.workers > 1 and plan.strategy.traits.exact
    if plan.objective.denominator != "samples" and together and type(strategy).weight is Strategy.weight:
        name = f"{type(strategy).__module__}.{type(strategy).__qualname__}"
        raise RunFailed(
            f"{name} weights workers by samples, and the loss is divided by {plan.objective.denominator}. Write its "
            f"method weight(denominator)"
        )
    for what, (needed, ability) in needs.items():
        if needed and not isinstance(strategy, ability):
            kind = type(strategy)
            raise RunFailed(
                f"{what} needs a strategy of kind trainer.strategies.contract.{ability.__name__}, and "
                f"{kind.__module__}.{kind.__qualname__} lacks its methods"
            )
