"""mode=lr_find: an ordinary training whose learning rate grows at every update, and what its loss suggests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.schema import ExponentialSchedule
from trainer.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.job.ready import Ready

MODE = "lr_find"
CALLBACK = "trainer.worker.divergence.StopAtDivergence"


def as_training(config: DictConfig) -> None:
    """Change a composed config into the training that mode=lr_find asks for.

    The schedule grows exponentially from ``lr_find.first`` to ``lr_find.last``. Each update is logged. Nothing is
    validated, saved or tracked.

    Raises:
        UserError: the optimizer has no learning rate, the rates do not grow, the run would resume, or the optimizer is
        at servers.
    """
    from omegaconf import OmegaConf, open_dict

    asked = config.lr_find
    if OmegaConf.select(config, "optimizer.lr", throw_on_missing=False) is None:
        raise UserError(f"mode={MODE}", "this optimizer has no lr to find", "an optimizer with optimizer.lr")
    if "Pserver" in str(config.strategy.get("_target_")):
        why = "with parameter servers no worker can leave an update out where the loss is infinite"
        raise UserError(f"mode={MODE}", why, f"mode={MODE} strategy=collective (or strategy=single)")
    if asked.last <= asked.first:
        what = f"lr_find.last={asked.last:g}"
        raise UserError(what, f"is not above lr_find.first={asked.first:g}", f"lr_find.last={1000 * asked.first:g}")
    if config.resume.path:
        why = "a range test begins with fresh parameters"
        raise UserError(f"resume.path={config.resume.path}", why, "the command without it")
    with open_dict(config):
        config.mode, config.validation, config.test, config.profile = "train", False, False, False
        config.epochs = config.max_steps = asked.updates  # an epoch has at least one update
        config.optimizer.lr = asked.first
        config.scheduler = asdict(ExponentialSchedule(final=asked.last / asked.first))
        config.callbacks = [{"_target_": CALLBACK, "times": asked.diverged}]
        config.on_nonfinite = "skip"  # the callback ends the run where the loss is not finite
        config.early_stop.metric = config.ema.decay = config.best.metric = None
        config.metrics, config.tracking.trackers = {}, {}
        config.checkpoint.every_steps = config.checkpoint.every_minutes = config.checkpoint.every_epochs = None
        config.execution.log_every, config.execution.line_of, config.execution.val_every_steps = 1, "mean", None
        if config.verbosity == "normal":  # a line for each update tells nobody anything
            config.verbosity = "quiet"


def show(ready: Ready) -> None:
    """Draw ``lr_find.png``, and print the suggestion as the override to type."""
    from trainer.cli.last_lines import shown
    from trainer.job import lr_range
    from trainer.terminal.screen import Screen

    plan, config = ready.plan, ready.checked.config
    run_dir, asked = Path(plan.paths.run_dir), config.optimizer["lr"]
    curve = lr_range.read(run_dir, (plan.batches.lr or asked) / asked)
    title = f"{plan.paths.name}: learning rate range test, {plan.batches.global_size} samples per update"
    picture = lr_range.draw(run_dir, title, curve)
    out = Screen()
    if not curve.rates or curve.steepest is None:
        first, last = config.lr_find.first, curve.rates[-1] if curve.rates else config.lr_find.last
        out.print(
            f"no suggestion: the loss does not fall between {first:g} and {last:.2g}. Try another lr_find.first",
            style="bold yellow",
        )
    else:
        least = f"it is the least at {curve.rates[curve.least]:.2g}"
        out.print(f"suggestion: optimizer.lr={curve.rates[curve.steepest]:.2g}", style="bold green")
        out.print(f"there the loss falls the fastest; {least}, and the test ended at {curve.rates[-1]:.2g}")
    out.print(f"picture: {shown(picture)}")
