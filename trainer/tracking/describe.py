"""What an MLflow run is told of a training: name, parameters, tags."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.plan import Plan

ARTIFACTS = (
    "config.yaml",
    "plan.json",
    "result.json",
    "workerlog.*",
    "serverlog.*",
    "server.*.json",
    "*.png",
    "profile.*.json",
    "trace.*.json.gz",
)
PARAMETER = r"[\w\-. :/]+"
"""What MLflow takes as a parameter's name; patterns of optimizer.lr_factors are none, so they stay together as a value."""
SECRET = ("password", "secret", "token", "api_key", "apikey", "credential")


def describe(config: Mapping[str, Any], plan: Plan, overrides: Sequence[str], parent: Path | None) -> dict[str, Any]:
    """The message that opens a run; see ``Tracker.open``."""
    tracking = config["tracking"]
    return {
        "uri": plan.tracking,
        "experiment": tracking["experiment"] or plan.name,
        "run_name": tracking["run_name"] or run_name(config, plan),
        "tags": {**tags(plan, overrides), **tracking["tags"]},
        "params": {**dict(flat(config)), "lr": plan.lr, "lr_factor": plan.lr_factor, "update_batch": plan.update_batch},
        "start_time": int(time.time() * 1000),
        "parent": str(parent) if parent else None,
        "artifacts": list(ARTIFACTS),
    }


def run_name(config: Mapping[str, Any], plan: Plan) -> str:
    """Readable: recipe, strategy, workers, global batch size, seed; a stand-in for the data is named."""
    stand_in = f"-{plan.facts['kind']}" if plan.facts["stand_in"] else ""
    return f"{plan.name}{stand_in}-{plan.strategy}-w{plan.workers}-b{plan.global_batch_size}-s{config['seed']}"


def tags(plan: Plan, overrides: Sequence[str]) -> dict[str, str]:
    """What a run can be searched by."""
    found = {
        "trainer.recipe": plan.name,
        "trainer.strategy": plan.strategy,
        "trainer.world_size": str(plan.workers),
        "trainer.servers": str(plan.roles.get("server", 0)),
        "trainer.device": plan.device,
        "trainer.precision": str(plan.chosen["precision"]),
        "trainer.data_source": plan.facts["source"],
        "trainer.stand_in": plan.facts["stand_in"] or "no",
        "trainer.overrides": " ".join(overrides)[:5000],
        "trainer.run_dir": plan.run_dir,
        "trainer.python": platform.python_version(),
        **git(),
    }
    for package in ("torch", "torchvision", "mlflow", "hydra-core"):
        try:
            found[f"trainer.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git() -> dict[str, str]:
    """Commit of the working directory and whether it has changes; empty outside a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        if commit.returncode:
            return {}
        dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"mlflow.source.git.commit": commit.stdout.strip(), "trainer.git_dirty": str(bool(dirty.stdout.strip())).lower()}  # fmt: skip


def flat(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every resolved parameter with its dotted path; values of keys that sound secret are hidden."""
    pairs: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, Mapping) and all(re.fullmatch(PARAMETER, str(name)) for name in value):
            pairs += flat(value, f"{prefix}{key}.")
        else:
            hidden = any(word in str(key).lower() for word in SECRET)
            pairs.append((f"{prefix}{key}", "(hidden)" if hidden and value else value))
    return pairs
