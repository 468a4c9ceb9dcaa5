"""Compiles a model as the plan says: whole, or its repeated blocks, each kind of them once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from trainer.models.blocks import outermost
from trainer.planning.chosen import Compiling
from trainer.run_folder.report import Report

FEWEST = 3
"""Blocks of one kind from which they count as repeated."""
MOST_KINDS = 8
"""torch compiles a function for so many kinds of arguments (``torch._dynamo.config.recompile_limit``)."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def compile_model(model: nn.Module, chosen: Compiling, backend: str) -> None:
    """Compile a model in place; its parameters keep their names."""
    mode: dict[str, Any] = {} if chosen.mode == "default" else {"mode": chosen.mode}
    parts = repeated_blocks(model) if chosen.regions else []
    for part in parts or [model]:
        part.compile(backend=backend, **mode)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost blocks of a model that come several times: of one class, with parameters of the same shapes.

    torch compiles the first block of a kind, and takes its code for the others. Empty: there are none, or too many
    kinds.
    """
    kinds: dict[Any, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if module is model or isinstance(module, CONTAINERS) or not any(True for _ in module.children()):
            continue
        shapes = tuple((n, tuple(p.shape)) for n, p in module.named_parameters())
        if shapes:
            kinds.setdefault((type(module), shapes), []).append((name, module))
    repeated = {name: module for blocks in kinds.values() if len(blocks) >= FEWEST for name, module in blocks}
    outer = outermost(repeated)
    number = sum(any(name in outer for name, _ in blocks) for blocks in kinds.values())
    return list(outer.values()) if number <= MOST_KINDS else []


def share_in_blocks(model: nn.Module) -> float:
    """The share of a model's parameters that is in repeated blocks."""
    whole = sum(p.numel() for p in model.parameters())
    return sum(p.numel() for block in repeated_blocks(model) for p in block.parameters()) / max(whole, 1)


@contextmanager
def shown(report: Report, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Context manager: what torch compiles is shown as progress, and does not count as time of training."""
    from torch._dynamo.callback import callback_handler

    began, parts, spent = 0.0, 0, 0.0

    def start(_: Any) -> None:
        nonlocal began, parts
        began, parts = clock(), parts + 1
        before = f", {spent:.0f} s so far" if spent else ""
        report.doing(f"first update, compiling part {parts} of the model{before}")

    def end(_: Any) -> None:
        nonlocal spent
        seconds = clock() - began
        spent += seconds
        report.leave_out(seconds)

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch._dynamo.reset() has forgotten them
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)
