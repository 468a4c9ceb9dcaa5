"""Whether an engine runs a composed config, and which class hands it over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from trainer.launch.engines.contract import Submitter

LOCAL = tuple(f"trainer.launch.builtin.{name}" for name in ("Local", "InProcess", "Forkserver"))


def submitter_of(config: DictConfig) -> Submitter | None:
    """The submitter that hands the command of a composed config to an engine; None: it is another launcher, or this
    command is in the engine's job.

    Raises:
        UserError: ``launch._target_`` is no launcher, or does not take its keys.
    """
    from omegaconf import OmegaConf

    if (target := OmegaConf.select(config, "launch._target_", throw_on_missing=False)) is None or target in LOCAL:
        return None
    from trainer.cli.submit import made_submitter

    return made_submitter(config)
