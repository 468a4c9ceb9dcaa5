"""Spells texts so that Hydra and OmegaConf read them as they are, whatever characters they hold."""

from trainer.wording import literal, override

__all__ = ["literal", "override"]
