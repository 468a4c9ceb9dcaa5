"""What can be refused before anything starts, each with the reason and the nearest thing that works."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trainer.config.instantiate import call_target
from trainer.data.source import DataSource
from trainer.errors import UserError
from trainer.host import hardware
from trainer.host.cache import check_code
from trainer.host.writable import check_name
from trainer.planning.batches import batch_size, check_batch_fits, check_padding, nearest
from trainer.planning.checked import Checked, Lacks
from trainer.planning.data_checks import check_data, check_enough, check_optimization, check_orders, take_classes
from trainer.planning.key_checks import check_group, check_keys, check_targets
from trainer.planning.modes import check_mode, evaluation_batch_size, facts_of, looked_at
from trainer.planning.processes import (
    check_devices,
    check_port,
    choose_device,
    count_workers,
    default_workers,
    is_elsewhere,
    resolve_strategy,
)
from trainer.planning.tracking_store import check_store
from trainer.strategies.contract import Declaration


def check(config: dict[str, Any], typed: Iterable[str] = ()) -> Checked:
    """Everything that can be known without importing torch.

    Args:
        config: the composed config as a plain, resolved dict, without ``hydra``.
        typed: keys that the user typed on the command line.

    Raises:
        UserError: the first thing that cannot be.
    """
    typed = set(typed)
    check_keys(config)
    check_targets(config, typed)
    check_mode(config)
    check_name(config["name"])
    lacks = Lacks(config["plan"])
    device = choose_device(config)
    nproc = count_workers(config, device, default_workers(config))
    elsewhere = is_elsewhere(config, device, nproc)
    with lacks:
        check_tracking(config)
    workers = nproc * config["launch"]["nnodes"]
    auto_strategy = resolve_strategy(config, workers)
    check_group(config, "strategy")
    declaration: Declaration = call_target(config["strategy"], "strategy", kind=Declaration)
    for refusal in declaration.refuse(config, workers):
        with lacks:
            raise refusal
    check_devices(config, device, nproc)
    check_port(config)
    if not elsewhere:
        with lacks:
            check_compiler(config, device)
    merge = config["strategy"]["gradient_merge"]["k_steps"]
    if config["mode"] == "train":
        leased = declaration.leases and config["data"]["work"] != "static"
        refused = len(lacks)
        with lacks:
            config["data"]["batch_size"] = batch_size(config["data"], workers, merge, typed, leased)
        if len(lacks) > refused:
            config["data"] |= nearest(config["data"], workers * merge)
        with lacks:
            check_padding(config, typed)
    else:
        config["data"]["batch_size"] = evaluation_batch_size(config["data"], workers)
    source: DataSource = call_target(config["data"], "data", kind=DataSource)
    together = config["data"]["global_batch_size"] if config["mode"] == "train" else None
    facts = facts_of(config, source, together or config["data"]["batch_size"] * workers * merge)
    take_classes(config, facts)
    checked = Checked(
        config, declaration, source, facts, auto_strategy, workers, nproc, device, merge, lacks, elsewhere
    )
    for step in (check_orders, check_data, check_enough, check_optimization):
        with lacks:
            step(checked)
    if config["mode"] != "train":
        looked = looked_at(config, source, facts)
        checked.files, checked.samples = looked.files, looked.samples
        checked.facts = replace(facts, attention=looked.attention)
        return checked
    with lacks:
        check_batch_fits(config, facts.train_samples, workers)
    return checked


def check_tracking(config: Mapping[str, Any]) -> None:
    """Where MLflow's points go can work, and takes the names of run, experiment and tags."""
    tracking = config["tracking"]
    check_store(tracking, experiment_of(config))
    for key, most in (("experiment", 256), ("run_name", 250)):
        if len(given := str(tracking[key] or "")) > most:
            raise UserError(f"tracking.{key}={given}", f"is longer than {most} characters", f"tracking.{key}=null")
    for name, value in tracking["tags"].items():
        if not re.fullmatch(r"[\w\-. :/]{1,250}", str(name)) or os.path.normpath(str(name)) != str(name):
            raise UserError(f"tracking.tags.{name}", "is no name that MLflow takes: letters, digits, _ - . : / and spaces", "+tracking.tags.NAME=VALUE")  # fmt: skip
        if len(str(value)) > 8000:
            raise UserError(f"tracking.tags.{name}", "is longer than the 8000 characters that MLflow takes")


def experiment_of(config: Mapping[str, Any]) -> str:
    """The MLflow experiment of the run."""
    return str(config["tracking"]["experiment"] or config["name"])


def check_compiler(config: Mapping[str, Any], device: str) -> None:
    """torch.compile needs a C++ compiler for the CPU, and a cache that nobody else can put code into."""
    if config["compile"] and device == "cpu" and hardware.cpp_compiler() is None:
        raise UserError("compile=true", "there is no C++ compiler on this machine (g++ or clang++)", "compile=false")
    if config["compile"]:
        check_code()
