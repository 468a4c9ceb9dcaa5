"""Runs one job from its overrides to its result: compose, check, train, print the last lines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import compose
from trainer.cli.arguments import ADVISE, asked_advice, typed_keys
from trainer.cli.chosen import VERBS, Chosen
from trainer.cli.compose import plain
from trainer.cli.explain import usual_values
from trainer.cli.submitters import submitter_of
from trainer.config.redact import HERE, of_command_line, of_environment
from trainer.errors import PRUNED, Interrupted, RunFailed, UserError
from trainer.host.engine_tasks import COPIES, FROZEN, OTHER_CODE, RESUME, RUN_DIR, SWEEP_DIR, SWEPT
from trainer.planning.find_checkpoint import AUTO, FRESH
from trainer.terminal import streams
from trainer.wording import override, typed

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from trainer.config.run_config import RunConfig
    from trainer.job.ready import Ready
    from trainer.job.result import Result
    from trainer.planning.checked_config import Checked
    from trainer.planning.launcher import Starter
    from trainer.tracking.client import RecorderProcess


"""Launchers that submit nothing."""


@contextlib.contextmanager
def chosen(words: Sequence[str], config_name: str | None = None, flags: Sequence[str] = ()) -> Iterator[Chosen]:
    """Context manager: yields what these words of a command line ask for.

    Raises:
        UserError: of a verb: RUN is no run, has no weights or no config, or its data are not found.
    """
    if not any(word in VERBS for word in words):
        yield Chosen(config_name or "config", list(words), list(flags))
        return
    from trainer.cli.saved_run import chosen_of_run

    with chosen_of_run(words, config_name, flags) as found:
        yield found


def run(overrides: Sequence[str]) -> Result:
    """Run a command line from Python and return the run's result (``trainer.run``)."""
    if any(o in ("-m", "--multirun") for o in overrides):
        raise UserError("-m", "a sweep is for the command line", "python -m trainer -m ...")
    with streams.guarded(), compose.hydra_app() as app:
        HERE.learn(of_environment(os.environ), of_command_line(overrides))
        with chosen(overrides) as asked:
            return run_one(app, asked.overrides, asked.config_name, flags=asked.flags)


def run_one(
    app: Hydra,
    overrides: list[str],
    config_name: str,
    start: Starter | None = None,
    flags: Sequence[str] = (),
    composed_with: Sequence[str] = (),
) -> Result:
    """Compose the config of one job, check it, and run it in Hydra's run folder.

    Args:
        start: starts the run's processes; None: on this host.
        flags: before the overrides, in the command that repeats the run.
        composed_with: further overrides that are not in that command, such as torchrun's.
    """
    if "mode=scaling" in overrides:
        from trainer.cli.scaling import scaling

        return scaling(app, overrides, config_name, flags)
    if FROZEN in os.environ:  # what was checked at the submission, whatever has become of its recipe
        config = compose.thawed(Path(os.environ[FROZEN]), os.environ[RUN_DIR], os.environ.get(RESUME))
    else:
        config = compose.compose(app, [*overrides, *composed_with, *_engine_overrides(overrides)], config_name)
    if (other := os.environ.get(OTHER_CODE)) and config.verbosity != "quiet":
        from trainer.terminal.screen import Screen

        Screen().print(f"ATTENTION: {other}", style="bold red")
    asked = "" if composed_with or FROZEN in os.environ else asked_advice(overrides)
    if asked == ADVISE:
        from trainer.cli.advise import Asked, advise

        return advise(Asked(app, overrides, config_name, config, flags))
    if (submitter := submitter_of(config)) is not None:
        from trainer.cli.submit import submit

        check_same_folder(config, "hydra.run.dir", compose.named_folder(config, "hydra.run.dir"))
        return submit(config, submitter, [*flags, *overrides], show_only)
    if asked:
        return _with_best(app, config, overrides, config_name, start, flags)
    if config.mode != "lr_find":
        return _run_here(app, config, overrides, config_name, start, flags)[0]
    from trainer.cli import lr_find

    lr_find.as_training(config)
    result, ready = _run_here(app, config, overrides, config_name, start, flags)
    if result.status == "done" and not ready.plan.topology.node_rank:
        lr_find.show(ready)
    return result


def _with_best(
    app: Hydra, config: DictConfig, overrides: list[str], config_name: str, start: Starter | None, flags: Sequence[str]
) -> Result:
    """Run with the strategy that ``strategy=auto`` finds the best, as if it were typed; the run's tags say why."""
    from omegaconf import open_dict

    from trainer.cli.advice_table import leave
    from trainer.cli.advise import Asked, alone_here, resolved

    if not alone_here(config):
        return _run_here(app, config, overrides, config_name, start, flags)[0]
    check_same_folder(config, "hydra.run.dir", compose.named_folder(config, "hydra.run.dir"))
    overrides, advice, why = resolved(Asked(app, overrides, config_name, config, flags))
    config = compose.compose(app, overrides, config_name)
    with open_dict(config):
        config.tracking.tags.update({"strategy.auto": why})

    def note(run_dir: Path) -> None:
        if advice is not None:
            leave(run_dir, advice, config, why)

    return _run_here(app, config, overrides, config_name, start, flags, note)[0]


def _run_here(
    app: Hydra,
    config: DictConfig,
    overrides: list[str],
    config_name: str,
    start: Starter | None,
    flags: Sequence[str],
    note: Callable[[Path], None] = lambda run_dir: None,
) -> tuple[Result, Ready]:
    """Check the job of a composed config, and run it in Hydra's run folder by this process.

    Args:
        note: called with the folder before the run starts.
    """
    # Imported after Hydra has accepted the command line, so that a refusal comes at once.
    from trainer.host.symlink_checks import check_run_folder
    from trainer.job.check import get_ready
    from trainer.job.claim_folder import claim
    from trainer.job.prepared_data import of_the_same_data
    from trainer.planning.launcher import start_here

    run_dir = compose.named_folder(config, "hydra.run.dir")
    check_run_folder(run_dir, config.hydra.output_subdir)
    check_same_folder(config, "hydra.run.dir", run_dir)
    with contextlib.ExitStack() as stack:
        recorder: RecorderProcess | None = None

        def record(checked: Checked) -> None:  # it imports mlflow while this process imports torch
            nonlocal recorder
            if checked.config.tracking.trackers:
                from trainer.tracking.trackers import check

                check(checked.config.tracking, run_dir)
            if recorded := recorded_by(checked.config):
                from trainer.tracking.client import tracking

                recorder = stack.enter_context(tracking(recorded))

        if config.verbosity != "quiet":
            streams.wait_for("checking the config, the data and the model with PyTorch")
        with usual_values(app, overrides, config_name):
            whole = compose.names_whole(config, "hydra.run.dir")
            ready = get_ready(plain(config), typed_keys(overrides), str(run_dir), on_checked=record, whole=whole)
        if ready.checked.config.plan:
            return show_only(ready), ready
        with _noted(ready, [*flags, *overrides]):
            ready = of_the_same_data(ready)
        if ready.plan.paths.tracking:
            from trainer.config.schema.run import MLFLOW
            from trainer.planning.tracking_store import try_tracking

            if (away := try_tracking(ready.checked.config, ready.plan)) and recorder is not None:
                recorder.mark_away(MLFLOW, away)
        start = start or start_here
        if start is start_here and _agrees_with_hosts(config, ready):
            run_dir, start = _agreed_folder(ready, run_dir)
        else:
            run_dir = claim(run_dir, RUN_DIR in os.environ or _is_chosen(config, ready, overrides))
        ready = replace(ready.in_folder(run_dir), swept=frozenset(filter(None, os.environ.get(SWEPT, "").split(","))))
        note(run_dir)
        with _noted(ready, [*flags, *overrides]):
            result = _executed(config, ready, start, [*flags, *overrides], recorder)
    from trainer.cli.last_lines import say_result

    say_result(result, ready, [*flags, *overrides])
    return result, ready


def _engine_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides for a process of an engine's job. The command that repeats the run does without them."""
    found = []
    shares = COPIES not in os.environ
    if (folder := os.environ.get(RUN_DIR)) and not (shares and "hydra.run.dir" in typed_keys(overrides)):
        found.append(override("hydra.run.dir", folder))
    if how := os.environ.get(RESUME):
        found.append(f"resume.path={how}")
    return found


def _executed(
    config: DictConfig, ready: Ready, start: Starter, overrides: Sequence[str], tracker: RecorderProcess | None
) -> Result:
    """Run the job in its folder; prints the last lines of a run that failed."""
    from trainer.host import early_signals
    from trainer.job.claim_folder import held
    from trainer.job.job import execute

    try:
        with held(ready):
            if not ready.plan.topology.node_rank:  # hosts may share the folder
                leave_hydra_files(config, Path(ready.plan.paths.run_dir))
            sweep = os.environ.get(SWEEP_DIR)
            result = execute(ready, start, overrides, tracker, Path(sweep) if sweep else None)
        early_signals.job_ended(exit_code(result))
        return result
    except (Interrupted, RunFailed) as error:
        from trainer.cli.last_lines import say_broken

        early_signals.job_ended(error.exit_code)
        say_broken(ready)
        raise


@contextlib.contextmanager
def _noted(ready: Ready, overrides: Sequence[str]) -> Iterator[None]:
    """Context manager: an error of the run gets a note, the last line of the output: how to resume the run."""
    try:
        yield
    except (Interrupted, RunFailed) as error:
        from trainer.cli.last_lines import how_to_go_on

        if note := how_to_go_on(error, ready, overrides):
            error.add_note(note)
        raise


def check_same_folder(config: DictConfig, key: str, folder: Path) -> None:
    """Refuse ``resume=auto`` if the folder's name is made of the time: each command would begin a new run.

    Args:
        key: of the folder. folder: this command's.

    Raises:
        UserError: the message has the newest folder beside it that can be resumed.
    """
    from trainer.checkpoint import store
    from trainer.planning.find_checkpoint import AUTO

    if config.resume.path != AUTO or config.mode != "train" or not compose.named_by_time(config, key):
        return
    from trainer.cli.last_lines import short

    there = sorted(folder.parent.glob(f"*/{store.CHECKPOINTS}/step-*/{store.ABOUT}"), key=lambda path: path.parts[-4])
    newest = short(there[-1].parents[2]) if there else f"{short(folder.parent)}/NAME"
    why = f"the folder has the time in its name ({key}), so that no command finds the checkpoints of the one before"
    raise UserError("resume=auto", why, f"{typed(key, newest)} resume=auto")


def _agrees_with_hosts(config: DictConfig, ready: Ready) -> bool:
    """Whether this host's folder has to get the name that host 0 gives it by its clock."""
    topology = ready.plan.topology
    several = topology.nnodes > 1 and not topology.least_nnodes
    return several and RUN_DIR not in os.environ and compose.named_by_time(config, "hydra.run.dir")


def _agreed_folder(ready: Ready, run_dir: Path) -> tuple[Path, Starter]:
    """The folder of a run on several hosts, and what starts the processes: the hosts meet in the same store."""
    from trainer.job.claim_folder import claim
    from trainer.launch.agreed_folder import leave_folder, take_folder
    from trainer.planning.launcher import start_here

    checked, plan = ready.checked, ready.plan
    if plan.topology.node_rank:
        run_dir, store = take_folder(checked.config, plan, run_dir)
    else:
        run_dir = claim(run_dir, chosen=False)
        store = leave_folder(checked.config, plan, run_dir)
    return run_dir, lambda assignment, supervision: start_here(assignment, replace(supervision, store=store))


def _is_chosen(config: DictConfig, ready: Ready, overrides: Sequence[str]) -> bool:
    """Whether the user has named the run's folder, by an override, or in a config with resume=auto."""
    if (ready.plan.resume is not None and ready.plan.resume.here) or "hydra.run.dir" in typed_keys(overrides):
        return True
    return ready.checked.config.resume.path in (AUTO, FRESH) and not compose.named_by_time(config, "hydra.run.dir")


def show_only(ready: Ready) -> Result:
    """Print a job's plan; nothing starts."""
    from trainer.job.checkpoint_rows import kept_rows
    from trainer.job.plan_table import show_plan
    from trainer.job.result import planned
    from trainer.tracking.trackers import rows

    more = [*rows(ready.checked.config.tracking, Path(ready.plan.paths.run_dir)), *kept_rows(ready)]
    is_debug = ready.checked.config.verbosity == "debug"
    with streams.answering():
        show_plan(ready.plan, "debug" if is_debug else "normal", more)  # also with verbosity=quiet
    return planned(ready.plan)


def exit_code(result: Result) -> int:
    """The exit code for a command's result: 0 done; 1 a sweep's job failed; 2 the shown plan would be refused."""
    if result.status == "planned":
        return UserError.exit_code if result.error else 0
    if result.status == "submitted":
        return 0
    return 0 if result.status in ("done", PRUNED) else RunFailed.exit_code


def recorded_by(config: RunConfig) -> Mapping[str, Mapping[str, Any]]:
    """The trackers for which to start a recorder; {} if the command only plans or if this is not host 0."""
    return {} if config.plan or config.launch.node_rank else config.tracking.trackers


def leave_hydra_files(config: DictConfig, run_dir: Path) -> None:
    """Write ``.hydra/`` as Hydra does: the composed config, Hydra's own config, the overrides."""
    compose.place(config, run_dir)
    subdir = config.hydra.output_subdir
    if subdir is None:
        return
    folder = run_dir / subdir
    for name, hydra in (("config", False), ("hydra", True)):
        with compose.only(config, hydra):
            compose.write_config(folder / f"{name}.yaml", config)
    compose.write_config(folder / "overrides.yaml", config.hydra.overrides.task)
