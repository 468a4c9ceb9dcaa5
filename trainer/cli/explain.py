"""Turns errors of Hydra, OmegaConf and YAML into sentences. The sentences are in :mod:`trainer.cli.explanations`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.errors import UserError, WrongValue

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra


@contextlib.contextmanager
def sentences(app: Hydra, overrides: list[str], config_name: str = "config") -> Iterator[None]:
    """Context manager: errors of Hydra, OmegaConf and YAML become a UserError that names the key and what to type.

    Hydra raises ValueError, TypeError and AttributeError too where an override is not what it expects.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, AttributeError) as error:
        from trainer.cli.explanations import explain
        from trainer.cli.vocabulary import Vocabulary

        raise explain(Vocabulary(app, overrides, config_name), error) from error


@contextlib.contextmanager
def usual_values(app: Hydra, overrides: list[str], config_name: str = "config") -> Iterator[None]:
    """Context manager: explains a refused value by proposing the value that the key has without the override."""
    try:
        yield
    except WrongValue as error:
        from trainer.cli.vocabulary import Vocabulary

        raise error.usually(Vocabulary(app, overrides, config_name).usual(error.path)) from error
