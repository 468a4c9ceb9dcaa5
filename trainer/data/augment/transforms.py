"""data.transforms: the user's own changes of training images (e.g. torchvision's v2), tried before the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.config.instantiate import call_target
from trainer.data.augment.global_generators import own_randomness, seed_cpu
from trainer.errors import RunFailed, UserError, first_line

TRIES = 8
"""Calls of each transform before the start, with other seeds: a transform may do something else each time."""

Nodes = Sequence[Mapping[str, Any]]


class Transforms:
    """Applies data.transforms in order to an image (C, H, W) uint8. Each returns another of the same shape and dtype.

    Args:
        nodes: of each its ``_target_`` and that one's arguments.

    Raises:
        UserError: there is no such target, or it does not take these arguments.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.calls: list[Callable[[Any], Any]] = [call_target(node, _named(n)) for n, node in enumerate(nodes)]

    def __call__(self, image: torch.Tensor, number: float) -> torch.Tensor:
        """The changed image.

        Args:
            number: in [0, 1); the seed of torch's, Python's and numpy's generators follows from it.

        Raises:
            RunFailed: an image of another shape or type came out.
        """
        seed_cpu(int(number * 2**53))
        for place, call in enumerate(self.calls):
            changed = call(image)
            if why := _unlike(changed, image):
                raise RunFailed(f"{_named(place)}: {why}")
            image = changed
        return image


def try_out(nodes: Nodes, side: int) -> None:
    """Build data.transforms and call each with an image (3, side, side) of noise, before anything starts.

    Raises:
        UserError: one cannot be built or called, or makes something else of the image.
    """
    with own_randomness():
        for place, (node, call) in enumerate(zip(nodes, Transforms(nodes).calls, strict=True)):
            what = f"{_named(place)} ({node['_target_']})"
            if not callable(call):
                raise UserError(what, f"is a {type(call).__name__}, which cannot be called with an image")
            for seed in range(TRIES):
                seed_cpu(seed)
                image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
                try:
                    changed = call(image.clone())
                except Exception as error:
                    raise UserError(
                        what, f"does not take an image (3, {side}, {side}) of uint8: {first_line(error)}"
                    ) from error
                if why := _unlike(changed, image):
                    raise UserError(
                        what, why, "a transform of uint8 images that keeps their size; the device normalises them"
                    )


def _named(place: int) -> str:
    """The config key of one of data.transforms, for error messages."""
    return f"data.transforms[{place}]"


def _unlike(changed: Any, image: torch.Tensor) -> str:
    """Return how a transformed image's shape or dtype differs from the original's, or '' if they are the same."""
    if not isinstance(changed, torch.Tensor):
        return f"gives a {type(changed).__name__} instead of a tensor {tuple(image.shape)} of uint8"
    if changed.shape == image.shape and changed.dtype == image.dtype:
        return ""
    kind = str(changed.dtype).removeprefix("torch.")
    return f"gives {tuple(changed.shape)} of {kind} instead of {tuple(image.shape)} of uint8"
