"""Prints the plan and its warnings before a run starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.schema import InProcessLaunch
from trainer.planning.auto import Buckets
from trainer.planning.chosen import BY_USER
from trainer.planning.plan import MOST_PROCESSES_SHOWN, Plan
from trainer.terminal.screen import Screen
from trainer.visible import shortened
from trainer.wording import counted

MIB = 2**20
DETAILS = ("logs", "  images", "cache", "transport")
"""Rows that only ``verbosity=debug`` shows."""
IF_AUTO = (
    *("channels_last", "keep_memory", "threads", "num_workers", "prefetch", "pin_memory", "decode", "fused_optimizer"),
    "compile_mode",
    *("tf32", "expandable_segments", "nccl_priority", "numa"),
)
"""Rows about choices of ``auto`` that only ``verbosity=debug`` shows."""
WHOLE = ("batch size", "device")
"""Rows whose reason is always shown."""
ONE_LINE = 62
"""Characters of a cell that a terminal of 80 columns shows on one line."""
NOT_WATCHED = "none: the only worker is this process"
IN_PLACE = ("", str(InProcessLaunch._target_))
"""Launchers that run one worker alone in the process that the user starts."""
MOST_BUCKETS_SHOWN = MOST_WEIGHTS_SHOWN = 12
INSECURE = "the hosts have no secret in common: whoever reaches the meeting point can change the training"


def show_plan(plan: Plan, verbosity: str = "normal", more: Iterable[tuple[str, str]] = ()) -> None:
    """Print the table of the resolved plan and warnings: one screen for an ordinary run.

    With ``verbosity=debug`` the table has every row and every reason, and the environment of each role's first process
    follows.

    Args:
        more: lines at the plan's end.
    """
    out = Screen()
    every = [] if verbosity == "quiet" else [*rows(plan), *more]
    if verbosity == "debug":
        out.facts(f"Plan of {plan.paths.name}", every)
        for role, variables in plan.topology.environment.items():
            out.facts(f"Environment of {role} 0", variables.items())
    elif verbosity != "quiet":
        shown = [(what, _shortened(what, value, plan)) for what, value in every if not _is_detail(what, value, plan)]
        out.facts(f"Plan of {plan.paths.name}", shown)
        out.print(f"({counted(len(every) - len(shown), 'more row')} with verbosity=debug)")
    _warn(out, plan)


def _is_detail(what: str, value: str, plan: Plan) -> bool:
    """Whether only ``verbosity=debug`` shows a row: its value is the usual one, or follows from other rows."""
    if what in IF_AUTO and what in plan.remarks.why:
        return not plan.remarks.why[what].endswith(BY_USER)
    if what in DETAILS:
        return True
    if what == "  written in":
        return value.endswith("(measured now)") and " s behind the training" in value
    if what == "loss":  # the task's own
        return value.endswith(f"(of task={plan.objective.task})")
    if what == "restarts":
        return value.startswith(NOT_WATCHED)
    return plan.topology.nnodes == 1 and (
        what == "meeting point" or (what.startswith(("  worker ", "  server ")) and value == plan.topology.device)
    )


def _shortened(what: str, value: str, plan: Plan) -> str:
    """A cell without a long reason of ``auto``, and with paths relative to the working folder."""
    if len(value) > ONE_LINE and what not in WHOLE and not value.endswith(f"{BY_USER})"):
        value = value.partition("  (auto: ")[0]
    if what == "weights" and plan.mode == "train":
        return value.replace(f"{plan.paths.run_dir}/", "")
    return value.replace(f"{Path.cwd()}/", "") if what in ("run folder", "tracking") else value


def show_briefly(plan: Plan, verbosity: str = "normal") -> None:
    """Print the plan of a sweep's job after the first in one line, and its warnings."""
    out = Screen()
    if verbosity != "quiet":
        done = f"{counted(plan.length.total_steps, 'update')} of {counted(plan.batches.global_size, 'sample')}"
        out.print(f"{_how(plan)}, {plan.topology.device}, {plan.chosen.precision}; {done}; {plan.paths.run_dir}")
        for override in plan.remarks.left_out:
            out.print(f"left out: {override}")
    _warn(out, plan)


def _how(plan: Plan) -> str:
    return f"{plan.strategy.name}, {', '.join(counted(n, role) for role, n in plan.topology.roles.items())}"


def _warn(out: Screen, plan: Plan) -> None:
    if plan.remarks.lacks:
        out.print("ATTENTION: this run would be refused:", style="bold red")
        for reason in plan.remarks.lacks:
            out.fact("  -", reason, 4, "")
    for said in (
        plan.remarks.concern,
        INSECURE if plan.topology.insecure else "",
        plan.data.facts.attention,
        plan.data.facts.stand_in,
    ):
        if said:
            out.print(f"ATTENTION: {said}", style="bold red")


def _preprocessed(done: Mapping[str, Any]) -> Iterator[str]:
    """Describe in a few words for the plan table what validation does to an image (resize, crop, mean, std)."""
    if done["resize"] is not None:
        yield f"shorter side to {done['resize']}, centre {done['crop']} x {done['crop']},"
    if done["divide"] is not None:
        yield f"/ {done['divide']},"
    if done["mean"] is None:
        yield "not normalised"
        return
    mean, std = (" ".join(f"{v:g}" for v in done[name]) for name in ("mean", "std"))
    yield f"mean {mean}, std {std}"


def rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the rows of the plan table: a name, and how much or where."""
    yield from _processes(plan)
    yield from _sizes(plan)
    yield from _data(plan)
    yield "model", counted(plan.model.parameters, "parameter", ",")
    if plan.model.part:
        yield "  its weights", plan.model.part
    if plan.model.rules:
        yield "optimizer", plan.model.rules
    if plan.objective.loss:
        yield (
            "loss",
            "; ".join([plan.objective.loss, *(f"{name} {weights}" for name, weights in balanced(plan).items())]),
        )
    if plan.strategy.buckets is not None:
        yield "  gradients", exchanged(plan.strategy.buckets, plan.chosen.precision)
    for key, value in plan.chosen.flat().items():
        if value == "" or (key in ("compile", "cuda_graph") and not value and key not in plan.remarks.why):
            continue
        yield key, str(value).lower() + _because(plan, key)
    yield from _places(plan)


def balanced(plan: Plan) -> dict[str, str]:
    """The first of the class weights that were computed from the training data, by key of ``loss``, in words."""
    shown = {name: [f"{weight:.4g}" for weight in weights] for name, weights in plan.objective.class_weights.items()}
    return {
        name: ", ".join(weights[:MOST_WEIGHTS_SHOWN] + ["..."] * (len(weights) > MOST_WEIGHTS_SHOWN))
        for name, weights in shown.items()
    }


def exchanged(buckets: Buckets, precision: str) -> str:
    """The plan table's cell of the buckets in which gradients are exchanged: how many, and their sizes."""
    sizes = [f"{size:.2g}" if size < 1 else f"{size:.1f}" for size in (n / MIB for n in buckets.sizes)]
    shown = sizes if len(sizes) <= MOST_BUCKETS_SHOWN else [*sizes[: MOST_BUCKETS_SHOWN - 1], "...", sizes[-1]]
    about = "about " if precision in ("bf16", "fp16") and len(sizes) > 1 else ""  # autocast moves some by one parameter
    parts = [f"{counted(len(sizes), 'bucket')}: {about}{', '.join(shown)} MiB"] if sizes else []
    return "; ".join([*parts, *([f"{counted(buckets.tables, 'table')} by rows"] if buckets.tables else [])])


def _because(plan: Plan, key: str) -> str:
    return f"  (auto: {plan.remarks.why[key]})" if key in plan.remarks.why else ""


def _processes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Which processes there are, and where they meet."""
    equal = " (equal to one process on the global batch)" if plan.strategy.traits.exact else ""
    yield "strategy", plan.strategy.name + equal + _because(plan, "strategy")
    if plan.strategy.exchange:
        yield "  exchange", plan.strategy.exchange
    spread = plan.topology.nnodes > 1 and not plan.topology.by_role
    number = (
        f"{plan.topology.least_nnodes} to {plan.topology.nnodes}"
        if plan.topology.least_nnodes
        else str(plan.topology.nnodes)
    )
    hosts = f" on {number} hosts" if spread else ", each by its own command" if plan.topology.by_role else ""
    yield "roles", ", ".join(counted(n, role) for role, n in plan.topology.roles.items()) + hosts
    yield "device", plan.topology.device + _because(plan, "device")
    if spread and "server" in plan.topology.roles:
        per_host = Counter(plan.topology.nodes_of("server"))
        yield "servers on", ", ".join(f"host {host}: {servers}" for host, servers in sorted(per_host.items()))
    for process in plan.topology.processes[:MOST_PROCESSES_SHOWN]:
        host = f"host {process.node}, " if spread else ""
        own = " (this command)" if plan.topology.by_role and process.node == plan.topology.node_rank else ""
        at = f"{process.endpoint}, " if process.endpoint else ""
        yield f"  {process.role} {process.rank}", f"{host}{at}{process.device}{own}"
    if len(plan.topology.processes) > MOST_PROCESSES_SHOWN:
        yield "  ...", f"and {counted(len(plan.topology.processes) - MOST_PROCESSES_SHOWN, 'more process')}"
    for override in plan.remarks.left_out:
        yield "left out", override
    if plan.topology.launcher:
        engine = plan.topology.launcher.removeprefix("trainer.launch.engines.").partition(".")[0]
        ours = plan.topology.launcher.startswith("trainer.launch.engines.")
        queued = plan.topology.launcher.startswith("trainer.service.")
        where = f"launch={engine}, in a job of it" if ours else plan.topology.launcher
        yield "launcher", "launch=queue, in slots of this host" if queued else where
    if plan.topology.least_nnodes:
        yield (
            "restarts",
            (
                f"at most {plan.topology.restarts} within an hour, when a process or a host dies; not counted: when "
                f"hosts come or leave"
            ),
        )
    elif plan.mode == "train" and plan.strategy.traits.lockstep and plan.topology.nnodes > 1:
        on = "of several commands" if plan.topology.by_role else "on several hosts"
        engine = plan.topology.launcher.removeprefix("trainer.launch.engines.").partition(".")[0]
        if engine in ("slurm", "kubernetes", "ray"):
            yield ("restarts", f"by launch={engine}: a lost host ends this life, and the next resumes")
        else:
            yield "restarts", f"none: a run {on} ends when a process dies"
    elif plan.topology.restarts and len(plan.topology.processes) == 1 and plan.topology.launcher in IN_PLACE:
        yield (
            "restarts",
            f"{NOT_WATCHED} (launch=forkserver makes it one of its own, which is watched and started again)",
        )
    elif plan.topology.restarts:
        yield "restarts", f"at most {plan.topology.restarts} within an hour, when a process dies or hangs"
    yield "meeting point", plan.topology.endpoint
    if plan.strategy.transport:
        yield "transport", plan.strategy.transport
    if plan.topology.insecure:
        yield "secret", "none (launch.insecure=true)"


def _sizes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Samples of an update, updates, learning rate, and how work is handed out."""
    if plan.mode != "train":
        yield "mode", plan.mode
    merged = f" x {plan.batches.merge} merged" if plan.batches.merge > 1 else ""
    portions = f"{plan.batches.size} per worker x {counted(plan.topology.workers, 'worker')}{merged}"
    even = plan.batches.size * plan.topology.workers * plan.batches.merge == plan.batches.global_size
    size = (
        f"{portions} = {plan.batches.global_size} global"
        if even
        else f"{plan.batches.global_size} global, shared out: at most {portions}"
    )
    yield "batch size", size + _because(plan, "batch_size")
    if plan.mode == "train":
        about = "about " if "train" in plan.data.facts.estimated else ""
        total = (
            about if plan.length.total_steps == plan.length.epochs * plan.length.steps_per_epoch else ""
        )  # else max_steps says it
        yield (
            "updates",
            (
                f"{about}{plan.length.steps_per_epoch} per epoch, {total}{plan.length.total_steps} in total "
                f"({counted(plan.length.epochs, 'epoch')})"
            ),
        )
        if not plan.objective.best:
            yield "validation", "none (validation=false)"
        if plan.batches.lr is not None:
            scaled = (
                f" = {plan.batches.lr / plan.batches.lr_factor:g} x {plan.batches.lr_factor:g}, for "
                f"{counted(plan.batches.update_size, 'sample')} per update"
            )
            yield "learning rate", f"{plan.batches.lr:g}" + (scaled if plan.batches.lr_factor != 1.0 else "")
    if plan.mode == "train" and "server" in plan.topology.roles:
        yield "work", _leased(plan) if plan.batches.leased else "split beforehand"


def _leased(plan: Plan) -> str:
    """The plan table's cell about leased blocks."""
    batches = -(-plan.batches.lease_batches // plan.batches.merge) * plan.batches.merge
    of = f" of {counted(batches, 'batch', ',')}" if batches else ""
    return f"leased in blocks{of}; a lost worker's {'are dropped' if plan.batches.drops_lost else 'go to others'}"


def _data(plan: Plan) -> Iterator[tuple[str, str]]:
    """The data, and how they are preprocessed."""
    facts = plan.data.facts
    if plan.data.predict:
        about = "" if plan.data.predict.each == "image" else "about "
        yield (
            "input",
            f"{plan.data.predict.input}: {about}{counted(plan.data.predict.samples, plan.data.predict.each, ',')}",
        )
        yield "output", plan.data.predict.output or f"{plan.paths.run_dir}/predictions.csv"
    else:
        yield "data", f"{facts.source}: {facts.sizes} of {_shape(facts.shape)}, {facts.targets}"
        if plan.objective.task != "classification":
            yield "task", plan.objective.task + _because(plan, "task")
        if facts.splits:
            yield "  splits", facts.splits
        if plan.objective.tests:
            of = (
                f"the best model by {plan.objective.best}"
                if plan.objective.best
                else "the model at the end (validation=false)"
            )
            yield (
                "  test",
                f"once at the end, with {of}"
                + ("" if facts.test_samples else ", if the data source opens test samples"),
            )
        elif facts.test_samples and plan.mode == "train":
            yield "  test", "not measured (test=false)"
        if plan.objective.limit_val and (measured := _measured(plan)):
            yield (
                "  measured",
                f"at most {counted(plan.objective.limit_val, 'batch')} of each worker in {measured} "
                f"(limit_val_batches)",
            )
        if plan.data.stream:
            yield "  a stream", plan.data.stream
        if facts.val_shape:
            yield "  validated", f"on samples of {_shape(facts.val_shape)}"
    if plan.data.preprocessing:
        yield "  images", " ".join(_preprocessed(plan.data.preprocessing))
    if plan.data.predict:
        return
    if facts.cache:
        yield "cache", facts.cache
    if broken := facts.left_out:
        yield "left out", f"{counted(len(broken), 'broken image')}: {', '.join(map(shortened, list(broken)[:3]))}"


def _measured(plan: Plan) -> str:
    """The measurements: validations, the test, both, or the evaluation; empty: none."""
    measured = (
        {"a validation": plan.objective.best, "the test": plan.objective.tests}
        if plan.mode == "train"
        else {"the evaluation": True}
    )
    return " and ".join(name for name, is_measured in measured.items() if is_measured)


def _places(plan: Plan) -> Iterator[tuple[str, str]]:
    """Where the run writes, and which weights it leaves or reads."""
    yield "run folder", plan.paths.run_dir
    yield "logs", f"{plan.paths.run_dir}/workerlog.N" + (", serverlog.N" if "server" in plan.topology.roles else "")
    if plan.mode == "train":
        best = (
            f", best {plan.objective.best} in checkpoints/best.safetensors"
            if plan.objective.best
            else " (no best one: validation=false)"
        )
        yield "weights", f"{plan.paths.run_dir}/model.safetensors{best}"
    else:
        yield "batches", f"{plan.length.total_steps} of each worker"
        yield "weights", plan.model.weights


def _shape(shape: Any) -> str:
    if isinstance(shape, dict):
        return " and ".join(f"{name} {tuple(size)}" for name, size in shape.items())
    return str(tuple(shape))
