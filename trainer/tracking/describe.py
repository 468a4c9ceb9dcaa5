"""Describes a training to its trackers: the run's name, parameters, tags and text."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.redact import HERE, command, hide, text, values
from trainer.config.run_config import RunConfig
from trainer.host import versions
from trainer.host.code_version import commit_of
from trainer.host.engine_tasks import OTHER_CODE
from trainer.planning.plan import Plan, Resume
from trainer.planning.tracking_store import experiment_of
from trainer.run_folder import repeat
from trainer.run_folder.lives import LifeRecord
from trainer.tasks.contract import best_metric
from trainer.tracking import experiment_view
from trainer.tracking.contract import TrackedRun
from trainer.tracking.naming import model_name, run_name
from trainer.tracking.reopened_run import RESUMED_FROM, RUN_DIR
from trainer.wording import counted

NOTE = "mlflow.note.content"
RESUMED = "trainer.resumed"
CONTEXTS = {"train": "training", "eval": "evaluation", "predict": "prediction"}
"""The use of the data by mode, in the words of MLflow's tag."""
DOING = {"train": "training", "eval": "evaluation of saved weights", "predict": "predictions"}
ARTIFACTS = (
    "config.yaml",
    "plan.json",
    "result.json",
    "classes.json",
    "lives.json",
    "workerlog.*",
    "serverlog.*",
    "server.*.json",
    "nonfinite*.json",
    "*.png",
    "*.csv",
    "validation.*.npz",
    "profile.*.json",
    "trace.*.json.gz",
)
PARAMETER = r"[\w\-. :/]+"
"""Names that MLflow allows for a parameter. Patterns of optimizer.lr_factors are not allowed, so they stay together as
one value."""


def describe(
    config: RunConfig,
    plan: Plan,
    overrides: Sequence[str],
    parent: Path | None,
    digest: str,
    swept: Collection[str] = (),
    lives: Sequence[LifeRecord] = (),
) -> TrackedRun:
    """Describe a training to its trackers: its name, parameters, tags and text.

    Args:
        digest: of the data, from its source.
        swept: keys of which the sweep that the run belongs to takes several values.
        lives: of the run, the present one included.
    """
    plain = config.plain()
    tracking, secrets = config.tracking, values(plain) | HERE.values
    experiment = experiment_of(tracking, plan.paths.name)
    shown = {
        "experiment": experiment.name,
        "name": tracking.run_name or run_name(plan.paths.name, public(overrides, secrets), swept, _first(plan)),
        "tags": {
            **tags(plan, overrides),
            **_lived(lives, plan.resume),
            **_own_tags(hide(tracking.tags, secrets)),
            NOTE: note(plan, repeat.words(config, overrides, lives, Path(plan.paths.run_dir)), lives=lives),
        },
        "params": {
            **dict(flat(hide(plain, secrets))),
            "lr": plan.batches.lr,
            "lr_factor": plan.batches.lr_factor,
            "update_batch": plan.batches.update_size,
        },
        "dataset": _dataset(plan, digest),
        "artifacts": list(ARTIFACTS),
    }
    return TrackedRun(
        folder=plan.paths.run_dir,
        start_time=int(time.time() * 1000),
        parent=str(parent) if parent else None,
        opened=uuid.uuid4().hex,
        resumed=plan.resume is not None and plan.resume.here,
        trackers=dict(tracking.trackers),
        mlflow={
            "uri": plan.paths.tracking,
            "experiment_id": experiment.id,
            "join": os.environ.get("MLFLOW_RUN_ID") if parent is None else None,
            "models": _models(config, plan),
            "registered_model": tracking.registered_model if plan.mode == "train" else None,
            "view": experiment_view.view(best_metric(config)),
        },
        **hide(shown, secrets),
    )


def secrets_of(config: RunConfig) -> list[str]:
    """The secret values that the recorder must hide: those of the config, and those that this process knows."""
    return sorted(values(config.plain()) | HERE.values)


def _lived(lives: Sequence[LifeRecord], resume: Resume | None) -> dict[str, str]:
    """Tags with the number of resumes, and with the folder of the resumed run if it is another run's."""
    resumed = {RESUMED: str(len(lives) - 1)} if lives else {}
    return {**resumed, RESUMED_FROM: resume.folder} if resume is not None and not resume.here else resumed


def _own_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """The user's tags as texts; a value that is no text becomes JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in tags.items()}


def _dataset(plan: Plan, digest: str) -> dict[str, str]:
    """The data set as MLflow records it: name, digest, size and use; of a prediction, its inputs."""
    facts, read = plan.data.facts, plan.data.predict
    if read is not None:
        name, source, size = (
            read.input,
            {"source": os.path.abspath(read.input), "kind": f"{read.each}s"},
            {"samples": read.samples},
        )
    else:
        name, source = facts.source, {"source": facts.source, "kind": facts.kind, "stand_in": facts.stand_in}
        size = {
            k: getattr(facts, k) for k in ("train_samples", "val_samples", "test_samples", "classes", "shape", "task")
        }
    return {
        "name": name[:500],
        "digest": digest,
        "source_type": "trainer",
        "source": json.dumps(source),
        "profile": json.dumps(size),
        "context": CONTEXTS[plan.mode],
    }


def note(
    plan: Plan, repeats: Sequence[str], ended: Mapping[str, Any] | None = None, lives: Sequence[LifeRecord] = ()
) -> str:
    """The MLflow run's description in Markdown: what ran, on what, with what result, and how to repeat it.

    Args:
        repeats: the words of the command that repeats it; [] where its lives had other commands.
        ended: the run's result as a dict; None: it has just begun.
        lives: of a run that went on from a checkpoint, each is shown.
    """
    facts, chosen = plan.data.facts, plan.chosen
    hosts = f" on {plan.topology.nnodes} hosts" if plan.topology.nnodes > 1 and not plan.topology.by_role else ""
    roles = ", ".join(counted(n, role) for role, n in plan.topology.roles.items())
    lines = [_headline(plan, ended)]
    if ended is not None:
        shown = {k: v for k, v in ended["metrics"].items() if k.startswith(("val/", "val_ema/", "test/", "predict/"))}
        best = ended["best"]
        if shown:
            lines += ["", "| metric | last | best |", "|---|---|---|"]
            lines += [f"| {k} | {v:.5f} | {f'{best[k]:.5f}' if k in best else ''} |" for k, v in shown.items()]
    lines += [
        *(line for said in (facts.stand_in, plan.remarks.concern) if said for line in ("", f"**ATTENTION: {said}**")),
        "",
        "| | |",
        "|---|---|",
        f"| data | {facts.source}: {facts.sizes}, {facts.targets} |",
        f"| model | {counted(plan.model.parameters, 'parameter', ',')} |",
        *([f"| weights | `{plan.model.weights}` |"] if plan.model.weights else []),
        f"| how | {plan.strategy.name}, {roles}{hosts}, {plan.topology.device}, {chosen.precision} |",
        f"| size | {_size(plan)} |",
    ]
    if ended is not None:
        lines += [
            (
                f"| took | {ended['seconds']:.1f} s, {counted(ended['steps'], 'update')}, "
                f"{counted(ended['samples'], 'sample')} |"
            )
        ]
        if ended["error"]:
            lines += ["", "```", ended["error"][:2000], "```"]
        if ended["ended"].startswith(("early stop", "stopped by a callback")):
            lines += ["", ended["ended"]]
        for who in ended["lost_workers"].values():
            lines += ["", f"lost on the way: {who}"]
        for who in ended.get("returned", ()):
            lines += ["", f"lost, and started again while the others went on: {who}"]
    if len(lives) > 1:
        lines += ["", "| life | began | ended | updates | how |", "|---|---|---|---|---|", *map(_life, lives)]
    again = " ".join(repeats) or "\n".join(life.command for life in lives)
    return "\n".join([*lines, "", "Repeat it:", "", "```", again, "```", "", f"Files: `{plan.paths.run_dir}`"])


def _headline(plan: Plan, ended: Mapping[str, Any] | None) -> str:
    """The first line of the description; MLflow's page shows little more without a click."""
    what = f"{plan.paths.name}: {DOING[plan.mode]}"
    if ended is None:
        return f"**{what} is running**"
    best = plan.objective.best and ended["best"].get(plan.objective.best)
    result = f", best {plan.objective.best} {best:.5f} at update {ended['best_step']}" if best else ""
    return f"**{what} {ended['status']}{result}**"


def _life(life: LifeRecord) -> str:
    """A row of the table of lives."""
    how = f"{life.how}: {life.why[:200]}".replace("|", "\\|") if life.why else life.how or "(it runs)"
    last = life.last if life.how else "..."
    began, ended = (time or "unknown" for time in (life.began, life.ended))
    return f"| {life.number} | {began} | {ended if life.how else ''} | {life.first} to {last} | {how} |"


def _size(plan: Plan) -> str:
    if plan.mode != "train":
        return f"{counted(plan.batches.size, 'sample')} per worker and batch"
    return (
        f"{counted(plan.length.total_steps, 'update')} ({counted(plan.length.epochs, 'epoch')}) of "
        f"{counted(plan.batches.global_size, 'sample')}"
    )


def public(overrides: Sequence[str], secrets: Iterable[str] = ()) -> list[str]:
    """The overrides to show in MLflow: those without secrets, without flags."""
    known = set(secrets)
    typed = [o for o in overrides if o.startswith("~") or "=" in o.partition("/")[0]]
    return [o for o in typed if not o.startswith("-") and text(o, known) == o]


def _first(plan: Plan) -> str:
    """The prefix of a run's name: stand-in data, and the mode if the run does not train."""
    return " ".join([plan.data.facts.kind] * bool(plan.data.facts.stand_in) + [plan.mode] * (plan.mode != "train"))


def _models(config: RunConfig, plan: Plan) -> dict[str, str]:
    """Which models a run logs in MLflow (``best`` and ``last``), with their names; {} if nothing is trained."""
    tracking = config.tracking
    if plan.mode != "train" or not tracking.log_model:
        return {}
    if not plan.objective.best:
        return {"last": model_name(plan.paths.name, "last")}
    last = tracking.log_last_model or tracking.registered_model is not None
    return {which: model_name(plan.paths.name, which) for which in ("best", *(["last"] if last else []))}


def tags(plan: Plan, overrides: Sequence[str]) -> dict[str, str]:
    """The tags by which an MLflow run can be searched."""
    found = {
        "trainer.recipe": plan.paths.name,
        "trainer.mode": plan.mode,
        "trainer.strategy": plan.strategy.name,
        "trainer.world_size": str(plan.topology.workers),
        "trainer.servers": str(plan.topology.roles.get("server", 0)),
        "trainer.device": plan.topology.device,
        "trainer.precision": str(plan.chosen.precision),
        "trainer.data_source": plan.data.facts.source,
        "trainer.stand_in": plan.data.facts.stand_in or "no",
        "trainer.transport": plan.strategy.transport or "none",
        "trainer.insecure": "yes" if plan.topology.insecure else "no",
        **({"trainer.weights_taken": plan.model.part[:5000]} if plan.model.part else {}),
        **{
            f"trainer.loss_{name}": " ".join(f"{n:.6g}" for n in numbers)[:5000]
            for name, numbers in plan.objective.class_weights.items()
        },
        **({"trainer.other_code": other[:5000]} if (other := os.environ.get(OTHER_CODE)) else {}),
        "trainer.overrides": command(overrides)[:5000],
        RUN_DIR: plan.paths.run_dir,
        "mlflow.user": user(),
        "mlflow.source.name": f"trainer {plan.paths.name}",
        "mlflow.source.type": "LOCAL",
        "trainer.python": platform.python_version(),
        **git(),
    }
    found_versions = versions.of(("torch", "torchvision", "mlflow", "hydra-core"))
    return {**found, **{f"trainer.{package}": version for package, version in found_versions.items()}}


def user() -> str:
    """The name of the user who started the run; a number if the machine has no name for it, as in a container."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # KeyError: before Python 3.13
        return str(os.getuid())


def git() -> dict[str, str]:
    """For the tags of an MLflow run: the git commit of the working directory, and whether it has changes; {} outside a
    checkout."""
    if (found := commit_of(os.getcwd())) is None:
        return {}
    commit, is_changed = found
    return {"mlflow.source.git.commit": commit, "trainer.git_dirty": str(is_changed).lower()}


def flat(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten a config into (dotted path, value) pairs, for MLflow's parameters."""
    pairs: list[tuple[str, Any]] = []
    for key, value in node.items():
        if isinstance(value, Mapping) and all(re.fullmatch(PARAMETER, str(name)) for name in value):
            pairs += flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
