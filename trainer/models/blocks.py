"""The blocks of a model: parts that are gathered, or computed again, one at a time."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from trainer.errors import UserError
from trainer.visible import shortened

AUTO = "auto"
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def chosen(model: nn.Module, patterns: str | Sequence[str], key: str) -> list[nn.Module]:
    """The modules that patterns choose, outer ones first.

    Args:
        patterns: ``auto`` (:func:`repeated`), or module names with ``*`` or class names, one or several.
        key: of the config that has them.

    Raises:
        UserError: a pattern fits no module.
    """
    if patterns == AUTO:
        return repeated(model)
    named = [(name, module) for name, module in model.named_modules() if name]
    wanted = [patterns] if isinstance(patterns, str) else patterns
    for pattern in wanted:
        if not any(fits(pattern, name, module) for name, module in named):
            names = shortened(", ".join(dict.fromkeys(type(module).__name__ for _, module in named)))
            raise UserError(
                f"{key}={pattern}", f"no module of the model has this name or class (classes: {names})", f"{key}={AUTO}"
            )
    return [module for name, module in named if any(fits(pattern, name, module) for pattern in wanted)]


def fits(pattern: str, name: str, module: nn.Module) -> bool:
    """Whether a pattern such as ``layer*.*`` fits a module's name, or is the name of its class."""
    return type(module).__name__ == pattern or fnmatch.fnmatchcase(name, pattern)


def repeated(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: the outermost modules of classes that come at least twice, such as residual blocks and
    transformer layers. A block that shares a parameter with what is outside of it is none."""
    named = [
        (name, module)
        for name, module in model.named_modules()
        if name and not isinstance(module, CONTAINERS) and any(True for _ in module.children())
    ]
    named = [(name, module) for name, module in named if any(True for _ in module.parameters())]
    times = Counter(type(module) for _, module in named)
    many = {name: module for name, module in named if times[type(module)] > 1}
    owners = _times(model)
    return [one for one in outermost(many).values() if _times(one).items() <= owners.items()]


def outermost(named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of these modules that are in none of the others, by name."""
    return {
        name: module
        for name, module in named.items()
        if not any(name.startswith(f"{other}.") for other in named if other != name)
    }


def _times(module: nn.Module) -> Counter[int]:
    """How often each parameter comes in a module."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
