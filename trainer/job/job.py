"""One job in the parent process: check, plan, prepare data, track, start the processes, and say how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import redact
from trainer.config.instantiate import for_saved_weights
from trainer.config.redact import hide, text, values
from trainer.errors import BY_CTRL_C, Interrupted, RunFailed, UserError
from trainer.host import hardware
from trainer.host.writable import LEAST, check_folder
from trainer.job.closing import finish
from trainer.planning.auto import Machine, ModelFacts
from trainer.planning.key_checks import leaves
from trainer.planning.modes import CLASSES
from trainer.planning.plan import Plan, make_plan
from trainer.planning.validate import Checked, check, hosts_of
from trainer.run_folder.leftovers import check_reads, clear

if TYPE_CHECKING:
    from trainer.tracking.client import Tracker

Starter = Callable[[Plan, dict[str, Any], Path], dict[str, Any]]
"""Starts the plan's processes with a payload and returns worker 0's outcome."""

WEIGHTS_KEPT = 2
"""Times that a run's folder holds the weights: the last and the best."""


@dataclass
class Result:
    """How a run ended; also ``result.json``.

    Attributes:
        status: ``done``, ``failed``, ``killed`` or ``planned``.
        run_dir: its folder; run_id, experiment_id: of MLflow, or None.
        metrics, best: last and best values by name; best_step: the update after which checkpoints/best.safetensors is.
        ended: why it ended: ``all updates done``, or an early stop or a callback's request and its reason.
        steps, samples, seconds: updates (where work is leased: of worker 0), training samples over all workers, from start to end.
        chosen, why: what ``auto`` picked and the reasons.
        data_source: what was really trained on.
        mode: what was done; unreadable: with ``predict``, the first files that could not be read.
        lost_workers: by rank, how workers died whom the others did without.
    """

    status: str
    run_dir: str
    run_id: str | None = None
    experiment_id: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    ended: str = ""
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    chosen: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    data_source: str = ""
    mode: str = "train"
    unreadable: list[str] = field(default_factory=list)
    stand_in: str = ""
    lost_workers: dict[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass
class Ready:
    """A job that has passed every check.

    Attributes:
        swept: keys of which the sweep that it belongs to takes several values.
        later: it is not the first of its sweep, and is told of in few words.
    """

    checked: Checked
    model: ModelFacts
    plan: Plan
    imported: list[str] = field(default_factory=list)
    """Packages that checking it has imported: its processes need most of them."""
    swept: frozenset[str] = frozenset()
    later: bool = False

    @property
    def secrets(self) -> set[str]:
        """What nobody else should see: of the config, and what else this process knows."""
        return values(self.checked.config) | redact.HERE.values


def get_ready(
    config: dict[str, Any],
    typed: Sequence[str],
    run_dir: str,
    place: str = "hydra.run.dir",
    passed: Callable[[Checked], None] = lambda checked: None,
) -> Ready:
    """Check everything; nothing is written.

    Args:
        place: the key that names ``run_dir``.
        passed: called when the light checks are passed, before torch is imported.

    Raises:
        UserError: the job cannot run.
    """
    redact.HERE.learn(values(config))
    try:
        return _get_ready(config, typed, run_dir, place, passed)
    except OSError as error:  # whatever is read here, the config names
        raise UserError(str(error.filename or "the config"), f"cannot be read: {error.strerror or error}") from error


def _get_ready(
    config: dict[str, Any], typed: Sequence[str], run_dir: str, place: str, passed: Callable[[Checked], None]
) -> Ready:
    before = frozenset(sys.modules)
    checked = check(config, typed)
    with checked.lacks:
        if not checked.elsewhere:
            check_reads(checked.config, Path(run_dir), place)
    passed(checked)
    from trainer.launch.preload import imported_since
    from trainer.worker.probe import probe  # imports torch: only what has passed the light checks waits for that

    if checked.config["mode"] != "train":
        checked.config["model"] = dict(for_saved_weights(checked.config["model"]))
    model = probe(checked.config, checked.facts, checked.declaration)
    if checked.config["mode"] != "train":
        _check_weights(checked.config)
    check_places(checked, model, Path(run_dir), place)
    plan = make_plan(checked, model, this_machine(), run_dir)
    return Ready(checked, model, plan, imported_since(before))


def check_places(checked: Checked, model: ModelFacts, run_dir: Path, key: str) -> None:
    """What the run leaves can be written where it is asked for.

    Raises:
        UserError: it cannot; of a plan it is listed.
    """
    here, output = not checked.elsewhere, checked.config["predict"]["output"]
    weights = WEIGHTS_KEPT * 4 * model.parameters if checked.config["mode"] == "train" else 0
    with checked.lacks:
        check_folder(run_dir, key, LEAST + weights, here)
    with checked.lacks:
        if output is not None:
            check_folder(Path(output).parent, "predict.output", LEAST, here)


def _check_weights(config: dict[str, Any]) -> None:
    """The weights fit the model.

    Raises:
        UserError: they do not.
    """
    from trainer.weights import fit
    from trainer.worker.probe import build

    fit.check(Path(config["weights"]), build(config), str(config["model"]["_target_"]))


def this_machine() -> Machine:
    """This host, as far as choices depend on it."""
    return Machine(hardware.cores(), hardware.cpu_flags(), hardware.gpus())


def execute(
    ready: Ready, start: Starter, overrides: Sequence[str], tracker: Tracker | None, parent: Path | None = None
) -> Result:
    """Run a checked job to its end; its folder exists.

    Raises:
        RunFailed, Interrupted: after everything has been recorded.
    """
    from trainer.job import plan_table
    from trainer.run_folder.json_files import leave
    from trainer.terminal.bar import bar
    from trainer.tracking.describe import describe

    began = time.monotonic()
    run_dir, config = Path(ready.plan.run_dir), ready.checked.config
    mine = own_folder(ready.plan)
    result = Result("failed", str(run_dir), mode=ready.plan.mode)
    tracked = False
    try:
        with termination_raises():
            _clear(mine, ready.plan)
            _leave_config(mine, config)
            if config["mode"] == "train":
                (run_dir / "checkpoints").mkdir(exist_ok=True)
            plan = prepare_data(ready)
            result.chosen, result.why = plan.chosen, plan.why
            result.data_source, result.stand_in = plan.facts["source"], plan.facts["stand_in"]
            leave(mine / "plan.json", plan.as_dict(), private=True)
            (plan_table.show_briefly if ready.later else plan_table.show_plan)(plan, config["verbosity"])
            if config["mode"] == "train":
                _leave_names(mine, ready)
            if tracker is not None:
                tracker.open(run_dir, describe(config, plan, overrides, parent, _digest(ready), ready.swept))
                tracked = True
            payload = {
                "config": config, "plan": plan.as_dict(), "run_dir": str(run_dir), "files": ready.checked.files,
                "secrets": sorted(ready.secrets), "imported": ready.imported,
            }  # fmt: skip
            with bar(run_dir, plan.total_steps, config["verbosity"]):
                outcome = start(plan, payload, run_dir)
        result.chosen = {**plan.chosen, **outcome.pop("chosen", {})}
        result.why = {**plan.why, **outcome.pop("why", {})}
        result = replace(result, status="done", **outcome)
        return result
    except (Interrupted, KeyboardInterrupt) as error:
        result.status, result.error = "killed", str(error) or BY_CTRL_C
        raise Interrupted(result.error) from None
    except UserError as error:
        result.error = str(error)
        raise
    except (RunFailed, OSError) as error:
        said = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
        result.error = text(said, ready.secrets)
        raise RunFailed(result.error) from error
    except Exception as error:  # a mistake of ours, or of a source of the user's own
        result.error = text(f"{type(error).__name__}: {error}", ready.secrets)
        raise
    finally:
        with _undisturbed():
            result.seconds = round(time.monotonic() - began, 3)
            finish(result, mine, ready, overrides, tracker if tracked else None)


def own_folder(plan: Plan) -> Path:
    """Where this host's launcher writes: the run's folder, which hosts may share, belongs to host 0."""
    run_dir = Path(plan.run_dir)
    return run_dir / f"host.{plan.node_rank}" if plan.node_rank else run_dir


def prepare_data(ready: Ready) -> Plan:
    """Download or draw the data; the plan is made again when that changed what is known."""
    from trainer.terminal.bar import preparing
    from trainer.worker.probe import before_start

    checked = ready.checked
    if checked.files:  # the data set itself is not looked at
        return ready.plan
    with preparing(checked.config["verbosity"]) as show:
        facts = checked.source.prepare(checked.facts, show)
    before_start("prepare", checked.config["model"])
    if facts == checked.facts:
        return ready.plan
    checked.facts = facts
    plan = make_plan(checked, ready.model, this_machine(), ready.plan.run_dir)
    return replace(plan, left_out=ready.plan.left_out)


def _clear(mine: Path, plan: Plan) -> None:
    """Make this host's folder, without what a run before left there."""
    from trainer.job import plan_table

    mine.mkdir(parents=True, exist_ok=True)
    if clear(mine, None if plan.node_rank else plan.nnodes):
        plan_table.console().print(f"written over: the run that was in {mine}", soft_wrap=True)


def _leave_config(run_dir: Path, config: dict[str, Any]) -> None:
    import yaml

    from trainer.host.files import replace_file

    shown = yaml.safe_dump(hide(config, values(config)), sort_keys=False)
    replace_file(run_dir / "config.yaml", shown, private=True)


def _leave_names(run_dir: Path, ready: Ready) -> None:
    """The classes' names, by which mode=predict calls them where the data are not at hand."""
    from trainer.host.files import replace_file
    from trainer.job import plan_table

    checked = ready.checked
    try:
        names = list(checked.source.class_names(checked.facts))
    except Exception as error:  # a source of the user's own may break where it is asked for names
        plan_table.console().print(f"the classes have no names: {type(error).__name__}: {error}")
        return
    if names:
        replace_file(run_dir / CLASSES, json.dumps(names, indent=1))


def _digest(ready: Ready) -> str:
    """The data's fingerprint; a source of the user's own may break where it is asked for one."""
    try:
        return ready.checked.source.fingerprint(ready.checked.facts)
    except OSError as error:
        raise RunFailed(f"the fingerprint of {ready.checked.facts.source} cannot be taken: {error}") from error


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Interrupted in the main thread, as Ctrl-C raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Interrupted(f"got {signal.Signals(number).name}")

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No signal interrupts the few seconds of closing; they are bounded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, signal.SIG_IGN) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_here(plan: Plan, payload: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The plan's processes of this host: one worker alone runs in place, several from a forkserver."""
    if len(plan.processes) == 1:
        from trainer.launch.in_process import in_place

        return in_place(plan, payload, run_dir)
    from trainer.launch.forkserver import Role, launch
    from trainer.launch.preload import modules_of
    from trainer.launch.rendezvous import Meeting

    launch_config = payload["config"]["launch"]
    roles = []
    for name in plan.roles:
        mine = [p for p in plan.processes if p.role == name and p.node == plan.node_rank]
        entry = plan.entries[name]
        if mine:
            apart = plan.survives and name == "worker"
            roles.append(Role(name, plan.roles[name], entry, [p.device for p in mine], mine[0].rank, apart))
    meeting = Meeting(
        host=launch_config["master_addr"],
        port=launch_config["master_port"],
        number=plan.node_rank,
        hosts=plan.nnodes,
        timeout_s=launch_config["timeout_s"],
        interface="lo" if plan.nnodes == 1 else _interface(launch_config["master_addr"]),
        addresses=hosts_of(launch_config),
        terms=_terms(plan, payload["config"]),
    )
    entries = [plan.strategy_worker, *plan.entries.values()]
    preload = [*modules_of(payload["config"], entries), *payload.pop("imported", ())]
    results = launch(roles, payload, run_dir, meeting, preload, payload["config"]["verbosity"])
    outcome = results["worker"][min(results["worker"])]
    lost = {str(rank): why.splitlines()[0] for rank, why in results.get("lost", {}).items()}
    return {**outcome, **({"lost_workers": lost} if lost else {})}


def _interface(master_addr: str) -> str | None:
    """Where Gloo should listen for other hosts: what the user says, else where host 0 is."""
    return None if "GLOO_SOCKET_IFNAME" in os.environ else hardware.interface_towards(master_addr)


def _terms(plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    """What must be the same on all hosts; places of files and the number of reading processes may differ."""
    groups = ("model", "loss", "optimizer", "scheduler", "strategy", "sampler")
    typed = {key: value for group in groups for key, value in leaves(config[group], f"{group}.")}
    typed |= {
        key: config[key]
        for key in (
            "callbacks",
            "metrics",
            "mode",
            "seed",
            "epochs",
            "max_steps",
            "limit_train_batches",
            "limit_val_batches",
        )
    }
    planned = {"launch.nnodes": plan.nnodes, "workers": plan.workers, "data.batch_size": plan.batch_size, "data.global_batch_size": plan.global_batch_size, "device": plan.device}  # fmt: skip
    found = {
        "training samples": plan.facts["train_samples"],
        "batches": plan.total_steps,
        "precision": plan.chosen["precision"],
    }
    return {**typed, **planned, **found}
