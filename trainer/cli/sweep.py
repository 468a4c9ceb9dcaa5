"""Checks a sweep as a whole, before its first job starts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.cli import compose
from trainer.cli.commands import check_same_folder, show_only
from trainer.cli.explain import sentences
from trainer.cli.submitters import submitter_of
from trainer.cli.sweep_composing import compose_sweep
from trainer.cli.sweep_engine import living_of
from trainer.cli.sweep_points import SweepJob, check_not_half_done, check_points, expand, swept_keys
from trainer.cli.sweep_run import Sweep
from trainer.config.keys import key_of
from trainer.host.symlink_checks import check_sweep_folder
from trainer.job.result import Result

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra


def sweep(app: Hydra, overrides: list[str], config_name: str, flags: Sequence[str] = ()) -> list[Result]:
    """Run every point of a sweep, each in its own folder and MLflow run under one parent run.

    All points are checked before the first one starts. A failed job is recorded, and the others run.
    """
    if any(key_of(o) == "sweep.resume" and o.endswith("=true") for o in overrides):
        overrides = [*overrides, "resume=auto"]
    with contextlib.ExitStack() as processes:
        return _run(_check(app, overrides, config_name, flags, processes))


def _run(checked: Sweep) -> list[Result]:
    """Run a sweep that is checked, or show what it would run."""
    first = checked.points[0]
    if first.ready.checked.config.plan:
        return [show_only(point.ready) for point in checked.points]
    checked.launcher = submitter_of(first.config)
    if checked.launcher is not None:
        text_of_job = checked.launcher.render(
            checked.engine_job(checked.launcher)
        )  # refused before anything is written
        if checked.launcher.options.dry_run:
            sys.stdout.write(text_of_job)
            return [Result("planned", str(checked.folder / point.subdir)) for point in checked.points]
    return checked.run()


def _check(
    app: Hydra, overrides: list[str], config_name: str, flags: Sequence[str], processes: contextlib.ExitStack
) -> Sweep:
    """Compose a sweep and check its folder and all its points, without starting a job.

    Args:
        processes: ends those for jobs side by side.

    Raises:
        UserError: the sweep cannot run.
    """
    master = compose_sweep(app, overrides, config_name)
    with sentences(app, overrides, config_name):
        folder = compose.named_folder(master, "hydra.sweep.dir")
    check_same_folder(master, "hydra.sweep.dir", folder)
    living = living_of(master, folder, [*flags, *overrides])
    if master.sweep.search is not None:
        from trainer.cli.sweep_of_search import checked

        return checked(app, master, overrides, flags, folder, config_name)
    jobs = expand(master)
    sweep = Sweep(
        master, overrides, flags, folder, jobs, [], swept_keys(master), living=living, config_name=config_name
    )

    def on_first(point: SweepJob) -> None:
        if submitter_of(master) is None and not master.get("plan"):
            sweep.warm(point, processes)

    points = sweep.points = check_points(app, master, jobs, living is not None, on_first)
    if living is None and not master.get("plan"):
        check_not_half_done(points, folder)
    check_sweep_folder(folder, [folder / point.subdir for point in points], master.hydra.output_subdir)
    return sweep
