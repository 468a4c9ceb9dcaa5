"""One worker of the run: builds model, data and strategy from the finished config and runs the loop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.instantiate import call_target, for_saved_weights, locate
from trainer.config.redact import hide, values
from trainer.config.run_config import RunConfig
from trainer.data.batch_reordering import Rewind
from trainer.data.evaluated_split import TEST, VAL
from trainer.data.sampler import training_sampler
from trainer.data.source import reader_of
from trainer.errors import PREEMPTED, Interrupted, Missing, Preempted
from trainer.host import versions
from trainer.host.pulse import Pulse
from trainer.host.signals import requests, say_leaving
from trainer.planning.launcher import Assignment
from trainer.planning.plan import Plan
from trainer.run_folder.report import OWN, Report
from trainer.strategies.contract import HasGauges, Strategy
from trainer.strategies.lost_workers import HaltsWhileWaiting
from trainer.strategies.seat import Others, Seat
from trainer.tasks.contract import best_metric
from trainer.worker import example
from trainer.worker.build import build
from trainer.worker.checkpoints import Checkpoints
from trainer.worker.host_monitor import watched
from trainer.worker.loop import fit
from trainer.worker.model import save_by_first
from trainer.worker.nonfinite import SKIPPED
from trainer.worker.out_of_memory import memory_named
from trainer.worker.settings import settings
from trainer.worker.shared_folder import is_shared
from trainer.worker.training import Training, Unprofiled

PARTS_S = 600.0
"""Longest wait of the first worker until all others have written their parts of a checkpoint."""


def train(seat: Seat, assignment: Assignment) -> dict[str, Any]:
    """Train as one worker; returns the outcome.

    Args:
        seat: this process among the others.
        assignment: the run's config and plan.

    Returns:
        Final and best metrics, updates, samples, seconds (equal on all workers in lockstep strategies).
    """
    run_dir = Path(assignment.plan.paths.run_dir)
    with at_work(seat, assignment) as run, _checkpoints(run, seat, assignment):
        if seat.rank == 0:
            example.keep_skeleton(run_dir, run.final_test.skeleton)
        if seat.life.returns:
            from trainer.worker.coming_back import come_back

            come_back(run, seat)
        elif assignment.resume:
            from trainer.checkpoint.removal_guard import not_removed_meanwhile
            from trainer.worker.resuming import resume

            with not_removed_meanwhile(assignment.resume, run_dir):
                resume(run, Path(assignment.resume), seat, _shown(assignment), assignment.data)
        report = run.reporting.report
        if rewinds := (*run.progress.rewinds, *assignment.rewinds):
            run.progress.rewinds = tuple(Rewind(*rewind) for rewind in rewinds)
            run.feed.reorder(run.progress.rewinds)
        try:
            fit(run)
        except Preempted:
            return {**report.outcome(), "ended": PREEMPTED}
        if report.run_dir is not None:
            report.gauges(run.strategy.last_gauges() if isinstance(run.strategy, HasGauges) else {})
        run.strategy.persist(run_dir / "checkpoints")
        run.strategy.agree(lambda index, _: _keep_model(run, assignment, run_dir, index == 0))
        if TEST in run.feed.evaluated:
            from trainer.worker.final_test import test

            try:
                test(run, assignment, seat)
            except Preempted:
                return {**report.outcome(), "ended": PREEMPTED}
        skipped = run.watchers.step_hook.metrics(run).get(SKIPPED)
        outcome = {**report.outcome(), **({"skipped": int(skipped)} if skipped else {})}
        return {**outcome, **(run.feed.growth.found() if run.feed.growth is not None else {})}


@contextlib.contextmanager
def _checkpoints(run: Training, seat: Seat, assignment: Assignment) -> Iterator[None]:
    """Context manager: this worker writes checkpoints when they are due, if the config asks for them."""
    settings, plan = assignment.config.checkpoint, assignment.plan
    if not assignment.config.saves_checkpoints:
        yield
        return
    folder = Path(plan.paths.run_dir) / "checkpoints"
    apart = None if is_shared(folder, seat, PARTS_S) else plan.own_folder
    if apart is not None and settings.to is None:
        if seat.rank == 0:
            print(f"ATTENTION: there are no checkpoints, because not all hosts see {folder}", flush=True)
        yield
        return
    about = {
        "config": _shown(assignment),
        "strategy": plan.strategy.name,
        "workers": plan.topology.workers,
        "servers": plan.topology.roles.get("server", 0),
        "global_batch_size": plan.batches.global_size,
        "total_steps": plan.length.total_steps,
        "lease_batches": plan.batches.lease_batches,
        "precision": plan.chosen.precision,
        "data": assignment.data,
        "versions": versions.installed(),
    }
    run.watchers.checkpoints = kept = Checkpoints(
        folder,
        settings,
        seat,
        plan.strategy.traits.same_everywhere,
        plan.length.steps_per_epoch,
        plan.length.epochs,
        about,
        PARTS_S,
        apart=apart,
    )
    if not run.lockstep and isinstance(run.strategy, HaltsWhileWaiting):
        run.strategy.check_checkpoint = lambda decides: kept.check_due(run, decides)
    launched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a launcher limits the time
    say = partial(say_leaving, grace_s=settings.grace_s)
    how = (None, lambda name: None) if launched else (settings.grace_s, say)
    # a launcher that gets the same signal must not take this process for dead
    with requests(lambda: kept.updates_done or bool(seat.life.pulse), *how) as kept.request:
        try:
            yield
        except BaseException as error:
            kept.close(others_hang=isinstance(error, Missing), failed=True)
            raise
        kept.close()


def _shown(assignment: Assignment) -> dict[str, Any]:
    """The run's config without secrets, as checkpoints have it."""
    plain = assignment.config.plain()
    shown: dict[str, Any] = hide(plain, values(plain))
    return shown


def _keep_model(run: Training, assignment: Assignment, run_dir: Path, first: bool) -> None:
    """Write the trained model, the findings of the validations, and the files for using the model elsewhere.

    Args:
        first: this worker writes; the others only take part where they hold shards of the model.
    """
    save_by_first(run.strategy, run.model, run_dir / "model.safetensors", first)
    if run.watchers.ema is not None:
        with run.watchers.ema.in_place():
            save_by_first(run.strategy, run.model, run_dir / "model_ema.safetensors", first)
    if not first:
        return
    keep_findings(run, run_dir)
    config, plan, inputs = assignment.config, assignment.plan, run.feed.example()
    example.keep(
        run_dir,
        for_saved_weights(config.model),
        plan.chosen.precision,
        run.feed.place,
        inputs,
        reader_of(call_target(config.node("data"), "data"), plan.data.facts),
        plan.data.preprocessing,
        config.node("task"),
    )


@contextlib.contextmanager
def at_work(seat: Seat, assignment: Assignment) -> Iterator[Training]:
    """Context manager: one worker of the run. It makes report, strategy, model and data, and closes them at the end."""
    config, plan = assignment.config, assignment.plan
    run_dir, seat = Path(plan.paths.run_dir), seated(seat, config, plan)
    best = best_metric(config)
    own = None if plan.strategy.traits.lockstep else run_dir / f"status.{seat.rank}.json"
    report = Report(
        run_dir if seat.rank == 0 and not seat.life.returns else None,
        plan.length.total_steps,
        best,
        plan.objective.lower,
        own,
        bool(assignment.resume),
        Pulse(seat.life.pulse),
    )
    if config.execution.log_workers and seat.size > 1:
        report.who = f"{OWN}{seat.rank}] "
    with membership(seat, assignment, report) as strategy, _deaths_named(plan):
        try:
            report.doing("building the model and opening the data")
            run = build(config, plan, seat, strategy, report)
            run.reporting.run_dir = run_dir
            if config.profile:
                run.reporting.profile = _profiled(config, plan, seat, run_dir)
            try:
                with _host_watched(seat, report, config.tracking.system_every_s), _compiling_shown(plan, report):
                    yield run
                run.reporting.profile.close()
            except BaseException as error:
                run.reporting.profile.close(hangs=isinstance(error, Missing))
                raise
            finally:
                run.feed.close()
        except BaseException:
            with suppress(OSError):  # report the first cause, not the full disk after it
                report.close()
            raise
        report.close()


def _compiling_shown(plan: Plan, report: Report) -> AbstractContextManager[None]:
    """Context manager: what torch compiles is shown, and is no time of training."""
    if not plan.chosen.compiling.compile:
        return nullcontext()
    from trainer.worker.compiled_model import shown

    return shown(report)


def _deaths_named(plan: Plan) -> AbstractContextManager[None]:
    """Context manager: torch's error for a dead reading process becomes one sentence, if there are such processes."""
    if not plan.chosen.num_workers:
        return nullcontext()
    from trainer.data.reading_processes import deaths_named

    return deaths_named()


def _host_watched(seat: Seat, report: Report, every_s: float | None) -> AbstractContextManager[None]:
    """Context manager: the first worker of a host measures the host's load."""
    if every_s is None or seat.local_rank:
        return nullcontext()
    node, nodes = seat.rank // seat.local_size, -(-seat.size // seat.local_size)
    return watched(node, nodes, seat.store, report, every_s)


@contextlib.contextmanager
def membership(seat: Seat, assignment: Assignment, report: Report) -> Iterator[Strategy]:
    """Context manager: this process is a worker of the run. Its settings are those of the run, a lack of memory is a
    sentence, and its strategy, which is yielded, is closed at the end.

    An error is sent to the launcher before that, because another worker that hangs may hold up the close.
    """
    config, plan = assignment.config, assignment.plan
    with memory_named(plan, seat.device, report), settings(config, plan, seat):
        strategy: Strategy = locate(plan.strategy.worker)(config.node("strategy"), seat)
        try:
            with memory_named(plan, seat.device, report):  # in the error that is sent, too
                yield strategy
        except BaseException as error:
            strategy.failed = True
            if isinstance(error, (Exception, Interrupted)):
                with suppress(OSError, RuntimeError):  # the launcher is gone, and this process follows it
                    seat.send_failure(error)
            raise
        finally:
            strategy.close()


def seated(seat: Seat, config: RunConfig, plan: Plan) -> Seat:
    """In a training process: complete its seat from the plan, by even batches, the number of servers and their
    hosts."""
    sampler = training_sampler(config, plan.data.facts.train_samples, plan.batches.size, seat.rank, seat.size)
    even = plan.objective.denominator == "samples" and sampler.even(plan.batches.merge, config.limit_train_batches)
    server_hosts = (
        tuple(plan.topology.nodes_of("server")) if plan.topology.nnodes > 1 and not plan.topology.by_role else ()
    )
    servers, hang_s = plan.topology.roles.get("server", 0), config.launch.hang_timeout_s or 0.0
    return replace(seat, others=Others(even, servers, server_hosts, not plan.topology.by_role, hang_s))


def _profiled(config: RunConfig, plan: Plan, seat: Seat, run_dir: Path) -> Unprofiled:
    """Make the profiler for this worker's updates."""
    from trainer.worker.profiler import Profiled

    execution, cuda = config.execution, seat.device.startswith("cuda")
    after, updates = execution.profile_after, execution.profile_steps
    return Profiled(seat.rank, run_dir, after, updates, plan.length.total_steps, cuda)


def keep_findings(run: Training, run_dir: Path, split: str = VAL) -> None:
    """At the end of a training or evaluation: write the findings of its last validation, and of the best one if that is
    another.

    Args:
        split: whose samples they are.
    """
    best, last = run.progress.val_sums.get("best"), run.progress.val_sums.get("last")
    for which, sums in (("last", last), ("best", None if best is last else best)):
        found = None if sums is None else run.task.examined(sums)
        if found is not None:
            from trainer.metrics import validation_file

            numbers = list(found.samples)
            inputs = run.feed.validation_inputs(numbers, split) if numbers else None
            files = tuple(run.feed.files_of(numbers, split))
            validation_file.keep(run_dir, which, found.arrays(), inputs, files, split)
