"""From overrides to results: one run, a sweep, or what Hydra shows of the config."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import compose, sweep_table
from trainer.cli.compose import plain, typed_keys
from trainer.cli.last_lines import say_broken, say_result, short
from trainer.cli.points import check_points, expand
from trainer.config.redact import HERE, command, hide, of_command_line, of_environment, text
from trainer.errors import BY_CTRL_C, Interrupted, RunFailed, UserError
from trainer.host.links import check_run_folder, check_sweep_folder
from trainer.job.closing import Closing
from trainer.job.job import Starter, execute
from trainer.job.ready import Ready, get_ready
from trainer.job.result import Result
from trainer.launch.start import start_here
from trainer.planning.checked import Checked
from trainer.planning.tracking_store import tracking_uri, try_store
from trainer.planning.validate import experiment_of
from trainer.terminal import streams
from trainer.terminal.screen import Screen

if TYPE_CHECKING:
    import argparse

    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from trainer.tracking.client import Tracker


def run(overrides: Sequence[str]) -> Result:
    """See ``trainer.run``."""
    if any(o in ("-m", "--multirun") for o in overrides):
        raise UserError("-m", "a sweep is for the command line", "python -m trainer -m ...")
    with streams.guarded(), compose.hydra_app() as app:
        HERE.learn(of_environment(os.environ), of_command_line(overrides))
        return run_one(app, list(overrides), "config")


def run_one(
    app: Hydra,
    overrides: list[str],
    config_name: str,
    start: Starter = start_here,
    flags: Sequence[str] = (),
    given: Sequence[str] = (),
) -> Result:
    """Compose, check, and run one job in Hydra's run folder.

    Args:
        flags: those that stand before the overrides in the command that repeats it.
        given: overrides that come from elsewhere, as torchrun's, and are no part of that command.
    """
    config = compose.compose(app, [*overrides, *given], config_name)
    run_dir = compose.named_folder(config, "hydra.run.dir")
    check_run_folder(run_dir, config.hydra.output_subdir)
    with contextlib.ExitStack() as stack:
        trackers: list[Tracker | None] = []

        def passed(checked: Checked) -> None:  # the recorder imports mlflow while this process imports torch
            trackers.append(stack.enter_context(tracking(_recorded_at(checked.config))))

        with compose.usual_values(app, overrides, config_name):
            ready = get_ready(plain(config), typed_keys(overrides), str(run_dir), passed=passed)
        if ready.checked.config["plan"]:
            from trainer.job.plan_table import show_plan

            show_plan(ready.plan)
            return _planned(ready)
        if (away := try_tracking(ready)) and trackers[0] is not None:
            trackers[0].tell_away(away)
        run_dir = claim(run_dir, chosen="hydra.run.dir" in typed_keys(overrides))
        ready.plan = replace(ready.plan, run_dir=str(run_dir))
        _leave_hydra_files(config, run_dir)
        try:
            result = execute(ready, start, [*flags, *overrides], trackers[0])
        except (Interrupted, RunFailed):
            say_broken(ready)
            raise
    say_result(result, ready, [*flags, *overrides])
    return result


def sweep(app: Hydra, overrides: list[str], config_name: str, flags: Sequence[str] = ()) -> list[Result]:
    """Every point of a sweep, one after the other, each in its own folder and MLflow run under one parent run.

    All points are checked before the first one starts. A job that fails is recorded and the others are done.
    """
    from hydra.core.hydra_config import HydraConfig

    from trainer.tracking.describe import NOTE
    from trainer.tracking.naming import key_of

    master, later = compose.compose_sweep(app, overrides, config_name)
    sweep_dir = compose.named_folder(master, "hydra.sweep.dir")
    check_sweep_folder(sweep_dir, master.hydra.output_subdir)
    jobs = expand(master)
    points, left_out = check_points(app, master, jobs)
    if points and points[0].checked.config["plan"]:
        from trainer.job.plan_table import show_plan

        for point in points:
            show_plan(point.plan)
        return [_planned(point) for point in points]
    away = try_tracking(points[0]) if points else ""
    ended: list[sweep_table.Job] = []
    swept = sweep_table.swept_keys(master)
    with tracking(points[0].plan.tracking if points and points[0].plan.node_rank == 0 else "", away) as tracker:

        def job(config: DictConfig) -> None:
            hydra = HydraConfig.get()
            mine, number = list(hydra.overrides.task), len(ended)
            where, shown = str(hydra.runtime.output_dir), tuple(text(override) for override in mine)
            told = [o for o in mine if key_of(o) in swept] or mine
            Screen().print(f"\n--- job {number}" + (f" of {len(jobs)}" if jobs else "") + f": {command(told)}")
            watched, ready = "", None
            try:
                ready = get_ready(plain(config), typed_keys(mine), where)
                if points:
                    ready.plan = replace(ready.plan, left_out=points[number].plan.left_out)
                watched, ready.swept, ready.later = ready.plan.best, frozenset(swept), number > 0
                result = execute(ready, start_here, [*flags, *mine], tracker, sweep_dir)
            except (Interrupted, KeyboardInterrupt) as error:
                if ready is not None:
                    say_broken(ready)
                ended.append(sweep_table.Job(shown, sweep_table.left(where, "killed", str(error)), watched))
                raise KeyboardInterrupt(str(error) or BY_CTRL_C) from None
            except (RunFailed, UserError) as error:
                if ready is not None:
                    say_broken(ready)
                print(f"job failed: {error}", flush=True)
                result = sweep_table.left(where, "failed", str(error))
            ended.append(sweep_table.Job(shown, result, watched))

        if tracker is not None and points:
            tracker.open(sweep_dir, _sweep_run(points[0], overrides, flags, swept))
        status = "KILLED"
        try:
            there = f"hydra.sweep.dir='{sweep_dir}'"  # its default holds the time, which Hydra would look up again
            with compose.ours_to_write(), compose.leaving_out(app, later, left_out):
                app.multirun(config_name, job, [*overrides, there, "hydra.mode=MULTIRUN"])
            status = "FINISHED" if all(job.result.status == "done" for job in ended) else "FAILED"
        finally:
            every = [*ended, *(sweep_table.waiting(text(o) for o in left) for left in jobs[len(ended) :])]
            closing = Closing(lambda line: Screen().print(line))
            with closing.step("the sweep's table"):
                show_sweep(every, sweep_dir)
            with closing.step("the end of the sweep's MLflow run"):
                if tracker is not None and points:
                    repeat = f"python -m trainer {command([*flags, '-m', *overrides])}"
                    told = sweep_table.note(points[0].plan.name, every, swept, repeat, sweep_dir)
                    tracker.close(sweep_dir, status, hide({NOTE: told}), 10.0)
            closing.tell()
    return [job.result for job in ended]


def exit_code(result: Result) -> int:
    """Of a command that ended with this: 0; 1 for a job of a sweep that failed; 2 for a plan that would be refused."""
    if result.status == "planned":
        return UserError.exit_code if result.error else 0
    return 0 if result.status == "done" else RunFailed.exit_code


def _planned(ready: Ready) -> Result:
    """Of a plan; ``error``: why the run would be refused."""
    return Result("planned", ready.plan.run_dir, error="\n".join(ready.plan.lacks))


def try_tracking(ready: Ready) -> str:
    """Call the tracking store once, before anything starts; returns why it does not answer, though it may come back.

    Raises:
        UserError: it will never take a run.
    """
    config = ready.checked.config
    if not ready.plan.tracking or ready.plan.node_rank:
        return ""
    return try_store(config["tracking"], experiment_of(config))


def _sweep_run(point: Ready, overrides: list[str], flags: Sequence[str], swept: Collection[str]) -> dict[str, Any]:
    from trainer.tracking.describe import describe, public
    from trainer.tracking.naming import sweep_name

    run = describe(point.checked.config, point.plan, [*flags, "-m", *overrides], None, "")
    named = sweep_name(public(overrides), swept)
    return {**run, "run_name": named, "params": {}, "dataset": None, "models": {}, "artifacts": ["sweep.csv"]}


def show_sweep(jobs: Sequence[sweep_table.Job], sweep_dir: Path) -> None:
    """A table of the jobs and their metrics, also as sweep.csv."""
    if not jobs:
        return
    columns, rows = sweep_table.table(jobs)
    spare = [columns.index(name) for name in sweep_table.SPARE if name in columns]
    out = Screen().rows("Sweep", columns, rows, columns.index("overrides"), spare)
    sweep_table.write(jobs, sweep_dir)
    more = f", with {', '.join(out)}" if out else ""
    Screen().print(f"jobs are in {short(sweep_dir)}/0, 1, ...; the table in {short(sweep_dir)}/sweep.csv{more}")


def show(app: Hydra, args: argparse.Namespace, config_name: str) -> None:
    """``--cfg``, ``--info``, ``--shell-completion``: Hydra's own."""
    with compose.sentences(app, args.overrides, config_name):
        if args.cfg:
            app.show_cfg(config_name, args.overrides, args.cfg, args.package, args.resolve)
        elif args.info:
            compose.compose(app, args.overrides, config_name)  # what is wrong is said before anything is shown
            app.show_info(args.info, config_name, args.overrides)
        else:
            app.shell_completion(config_name, args.overrides)


def _recorded_at(config: Mapping[str, Any]) -> str:
    """Where this host's process is to record the run; empty where there is nothing to record."""
    return "" if config["plan"] or config["launch"]["node_rank"] else tracking_uri(config["tracking"])


@contextlib.contextmanager
def tracking(uri: str, away: str = "") -> Iterator[Tracker | None]:
    """The recorder process of this invocation; None without tracking.

    Args:
        away: why the store did not answer when it was tried.
    """
    if not uri:
        yield None
        return
    from trainer.tracking.client import Tracker

    tracker = Tracker(lambda line: Screen().print(line), away)
    try:
        yield tracker
    finally:
        tracker.end()


def claim(folder: Path, chosen: bool) -> Path:
    """Make the run's folder: the one that the user chose, or an unused one when two runs start in the same second.

    Raises:
        UserError: it cannot be made, though it looked so.
    """
    try:
        if chosen:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        for number in itertools.count():
            free = folder.with_name(f"{folder.name}-{number}") if number else folder
            with contextlib.suppress(FileExistsError):
                free.mkdir(parents=True)
                return free
    except OSError as error:
        raise UserError(f"hydra.run.dir={folder}", f"cannot be made: {error.strerror}", "hydra.run.dir=ANOTHER_FOLDER") from error  # fmt: skip
    raise AssertionError("unreachable")


def _leave_hydra_files(config: DictConfig, run_dir: Path) -> None:
    """``.hydra/`` as Hydra leaves it: the composed config, Hydra's own, the overrides."""
    from omegaconf import OmegaConf, open_dict, read_write

    subdir = config.hydra.output_subdir
    with read_write(config), open_dict(config):
        config.hydra.runtime.output_dir = str(run_dir)
        job = config.copy()
        job.pop("hydra")
    if subdir is None:
        return
    folder = run_dir / subdir
    parts = {
        "config": job,
        "hydra": OmegaConf.create({"hydra": config.hydra}),
        "overrides": config.hydra.overrides.task,
    }
    for name, part in parts.items():
        compose.write_config(folder / f"{name}.yaml", part)
