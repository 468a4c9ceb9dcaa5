"""Refuses ``on_nonfinite=skip`` and ``rewind`` where they have no meaning."""

from __future__ import annotations

from trainer.errors import UserError
from trainer.planning.checked_config import Checked
from trainer.planning.elastic import restartable

STOP = "on_nonfinite=stop"


def check_nonfinite(checked: Checked) -> None:
    """Refuse ``on_nonfinite=skip`` or ``rewind`` for a run that cannot do it.

    Raises:
        UserError: it cannot.
    """
    config, declaration = checked.config, checked.declaration
    what, kept = f"on_nonfinite={config.on_nonfinite}", config.checkpoint
    if config.on_nonfinite == "stop":
        return
    if not declaration.traits.skips:
        why = f"with strategy={declaration.name} a worker's update cannot be left out: the optimizer is elsewhere"
        raise UserError(what, why, f"{STOP} (or strategy=collective)")
    if config.on_nonfinite == "skip":
        if config.node("strategy").get("comm_hook") == "powersgd":
            why = (
                "what strategy.comm_hook=powersgd leaves out of a gradient that is not finite would spoil the next ones"
            )
            raise UserError(what, why, "on_nonfinite=rewind (or strategy.comm_hook=none)")
        return
    if not restartable(checked) or config.launch.nnodes > 1:
        why = "the run goes back by a restart of its processes, which are all on one host and not started by torchrun"
        raise UserError(what, why, "on_nonfinite=skip")
    if not (kept.every_steps or kept.every_minutes or kept.every_epochs):
        why = "without checkpoints there is nothing to go back to"
        raise UserError(what, why, "checkpoint=auto (or on_nonfinite=skip)")
