"""The terms of a run: what must be the same in the commands of all hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.keys import is_of, leaves
from trainer.config.run_config import RunConfig
from trainer.planning.launch_role import plain_launch
from trainer.planning.launcher import Assignment
from trainer.planning.plan import Plan

OF_EACH_HOST = (
    "name",
    "weights",
    "precision",
    "device",
    "profile",
    "plan",
    "debug",
    "verbosity",
    "launch",
    "tracking",
    "predict",
    "resume",
    "checkpoint.to",
    "execution.keep_memory",
    "execution.threads",
    "execution.log_workers",
    "execution.profile_after",
    "execution.profile_steps",
    "data.batch_size",
    "data.global_batch_size",
    "data.memory_limit_gib",
    "data.num_workers",
    "data.prefetch",
    "data.pin_memory",
    "data.cache",
    "data.decode",
    "data.verify",
    "data.download",
)
"""Keys and groups that may differ between hosts: folders, output, how data are read. For some of them the planned
values are compared."""
WORDS_OF_DATA = tuple(
    f"data.{name}"
    for name in (
        "_target_",
        "work",
        "shard",
        "on_lost_worker",
        "read",
        "normalize",
        "augment",
        "train_split",
        "val_split",
    )
)
"""Texts in ``data`` that must be the same; other texts are paths, which may differ between hosts."""


def terms(plan: Plan, config: RunConfig, assignment: Assignment) -> dict[str, Any]:
    """The terms that must be equal on all hosts, by the name that a message shows."""
    from trainer.launch.rendezvous import ANY

    typed = {key: value for key, value in leaves(config.plain(), "") if not _is_of_each_host(key, value)}
    planned = {
        "launch.nnodes": plan.topology.nnodes,
        "workers": plan.topology.workers,
        "data.batch_size": plan.batches.size,
        "data.global_batch_size": plan.batches.global_size,
        "device": plan.topology.device,
    }
    if "server" in plan.topology.roles:
        planned |= {"hosts of the servers": plan.topology.nodes_of("server")}
    found = {
        "training samples": plan.data.facts.train_samples,
        "batches": plan.length.total_steps,
        "precision": plan.chosen.precision,
    }
    found_terms = {**typed, **planned, **found}
    found_terms |= {"the checkpoint": Path(assignment.resume).name or "none"}
    if plan.topology.by_role:
        found_terms = {key: value for key, value in found_terms.items() if key not in ("launch.nnodes", "workers")}
        found_terms |= plain_launch(config.launch)
    others = ("device", "precision") if config.launch.role == "server" else ()
    return {**found_terms, **dict.fromkeys(others, ANY)}


def _is_of_each_host(key: str, value: Any) -> bool:
    is_text = isinstance(value, str) or (isinstance(value, list) and any(isinstance(v, str) for v in value))
    if key.startswith("data.") and is_text and key not in WORDS_OF_DATA:
        return True
    return is_of(key, OF_EACH_HOST)
