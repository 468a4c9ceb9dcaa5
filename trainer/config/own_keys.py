"""``self.config`` of the trainer's base classes: a key that it lacks is a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import UserError


class MissingKey(UserError, KeyError):
    """A class reads a key of its node that the config does not have."""

    __str__ = UserError.__str__


class OwnKeys(dict[str, Any]):
    """The keys of a node of the config, without ``_target_``.

    Args:
        group: the node, such as ``task``. node: its keys.
    """

    def __init__(self, group: str, node: Mapping[str, Any]) -> None:
        super().__init__(node)
        self.group = group

    def __missing__(self, key: str) -> Any:
        raise MissingKey(
            f"{self.group}.{key}",
            f"the class of {self.group} needs it, and it has no value",
            f"+{self.group}.{key}=VALUE",
        )

    def __reduce__(self) -> Any:
        return OwnKeys, (self.group, dict(self))
