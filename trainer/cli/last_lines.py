"""Prints the last lines of a run: its result, folder, tracking page, and the command that repeats it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from trainer.checkpoint import store
from trainer.config.redact import command
from trainer.errors import RunPreempted
from trainer.host.engine_tasks import ENGINE, NAMED, RUN_DIR, SLURM, SUBMITTED
from trainer.job.ready import Ready
from trainer.job.result import Result
from trainer.launch.engines.engine_folder import LEAVE
from trainer.planning.plan import Plan
from trainer.run_folder import lives, repeat
from trainer.terminal.screen import Screen
from trainer.terminal.status import read_status
from trainer.visible import one_line
from trainer.wording import counted, override, quoted

LOOKED_AT = {"eval": "sample", "predict": "image", "rows": "row"}
LEFT = {
    "train": (
        "curves.png",
        "servers.png",
        "confusion.png",
        "mistakes.png",
        "scatter.png",
        "labels.png",
        "model.safetensors",
    ),
    "eval": ("confusion.png", "mistakes.png", "scatter.png", "labels.png", "per_class.csv"),
    "predict": ("predictions.csv",),
}
"""Files of a run that the last lines name, by mode."""
EARLY = ("early stop", "stopped by a callback")
"""Beginnings of the reasons for an end before the last epoch."""
INDENT = 10


def say_result(result: Result, ready: Ready, overrides: Sequence[str]) -> None:
    """Print a run's last lines: its result, folder, tracking page, and the command that repeats it."""
    out = Screen()
    out.print(Text.assemble(("\ndone", "bold green"), f" {_done(result, ready)}"))
    if result.stand_in:
        out.print(f"ATTENTION: {result.stand_in}", style="bold red")
    if result.skipped:
        out.print(
            f"ATTENTION: {counted(result.skipped, 'update')} skipped, not finite (on_nonfinite=skip)",
            style="bold yellow",
        )
    if result.rewinds:
        out.print(
            (
                f"ATTENTION: the run went back {counted(result.rewinds, 'time')}, its numbers were not finite "
                f"(on_nonfinite=rewind)"
            ),
            style="bold yellow",
        )
    early = result.ended.startswith(EARLY)
    if early and ready.checked.config.verbosity == "quiet":  # otherwise the first worker has printed it
        out.print(result.ended, style="bold yellow")
    folder = Path(result.run_dir)
    out.fact("results", f"{shown(folder)}  ({', '.join(_left(folder, result.mode))})", INDENT, "")
    if output := ready.checked.config.predict.output:
        out.fact("guesses", shown(Path(output)), INDENT, "")
    for where in filter(None, (one.get("where") for one in result.tracking.values() if one.get("id"))):
        out.fact("look", where, INDENT, "")
    again = repeat.repeatable(overrides, result.chosen.get("batch_size"))
    if words := repeat.words(ready.checked.config, again, lives.read(folder), folder):
        out.command("repeat", words, INDENT)
    else:
        out.fact(
            "repeat",
            f"the commands in {shown(folder / lives.FILE)}, one after the other (resume.allow_changes)",
            INDENT,
            "",
        )


def how_to_resume(ready: Ready, overrides: Sequence[str]) -> str:
    """The command that resumes an interrupted or failed run, for its last line; '' if it has no whole checkpoint."""
    folder = Path(ready.plan.paths.run_dir)
    if ready.plan.mode != "train" or store.newest_whole(folder / "checkpoints", verify=False) is None:
        return ""
    from trainer.config.keys import key_of

    typed = [o for o in overrides if key_of(o) not in ("resume", "resume.path", "hydra.run.dir")]
    there = [o for o in overrides if key_of(o) == "hydra.run.dir" and "${" not in o] or [
        override("hydra.run.dir", str(folder) if ready.plan.paths.whole_path else short(folder))
    ]
    words = [command([o]) for o in (*typed, *there[-1:], "resume=auto")]
    return f"{'resume':<{INDENT}}{' '.join((*repeat.starter(overrides), *words))}"


def how_to_go_on(error: BaseException, ready: Ready, overrides: Sequence[str]) -> str:
    """The last line after an error: the command that resumes the run, or for a pre-empted run that begins again. '' in
    a job of Slurm that nobody has asked to leave: it is requeued."""
    is_preempted = isinstance(error, RunPreempted)
    left = Path(ready.plan.paths.run_dir) / ENGINE / LEAVE
    if is_preempted and os.environ.get(SUBMITTED) == SLURM and not left.exists():
        return ""
    if not (resumes := how_to_resume(ready, overrides)) and is_preempted:
        without = "there is no checkpoint yet" if ready.plan.mode == "train" else "nothing is kept of it"
        return f"{without}: the same command begins the run again"
    return resumes


def say_broken(ready: Ready) -> None:
    """Print the last lines of a run that was interrupted or has failed: its folder and its best weights so far."""
    out, folder = Screen(), Path(ready.plan.paths.run_dir)
    if not folder.is_dir():
        return
    out.print("")
    out.fact("left", f"{shown(folder)}  ({', '.join(_left(folder, ready.plan.mode))})", INDENT, "")
    best, weights = read_status(folder).get("best"), folder / "checkpoints" / "best.safetensors"
    if best and weights.is_file():
        out.fact(
            "best", f"{shown(weights)}  ({best['metric']} {best['value']:.5f} at update {best['step']})", INDENT, ""
        )


def _of_worker(plan: Plan, result: Result) -> str:
    """The worker whose updates are shown, if workers do different numbers of updates, and the planned average."""
    if not plan.updates_of or plan.topology.workers == 1 or result.ended.startswith(EARLY):
        return plan.updates_of
    return f"{plan.updates_of} ({plan.length.total_steps} per worker on average: whoever is faster gets more work)"


def _done(result: Result, ready: Ready) -> str:
    here = ready.plan.topology.here
    if all(process.role != "worker" for process in here):
        return f"{', '.join(f'{p.role} {p.rank}' for p in here)} {result.ended} ({result.seconds:.1f} s)"
    measured = ("val/", "val_ema/", "test/") if result.validation else ("train/", "test/")
    shown = ", ".join(f"{k}: {v:.5f}" for k, v in result.metrics.items() if k.startswith(measured))
    shown += "" if result.validation else " (not validated: validation=false)"
    if result.mode != "train":
        done = counted(result.samples, LOOKED_AT["rows" if "predict/rows" in result.metrics else result.mode])
        return (
            f"{done} {'evaluated' if result.mode == 'eval' else 'predicted'} in {result.seconds:.1f} s. {shown}"
        ).rstrip()
    watched = ready.plan.objective.best
    best = f" (best {watched.removeprefix('val/')} {result.best[watched]:.5f})" if watched in result.best else ""
    return (
        f"{counted(result.steps, 'update')}{_of_worker(ready.plan, result)}, {counted(result.samples, 'sample')} "
        f"in {result.seconds:.1f} s. {shown}{best}"
    )


def _left(folder: Path, mode: str) -> list[str]:
    """Names of the files of ``LEFT`` that exist, and of the logs."""
    found = [name for name in (*LEFT[mode], "result.json") if (folder / name).exists()]
    return found + [f"{log}.N" for log in ("workerlog", "serverlog") if any(folder.glob(f"{log}.*"))]


def short(path: Path) -> str:
    """Shorten a path for a run's last lines: relative to the working directory if it lies below it.

    In a job whose files come back to where the command was typed, the path is the one there.
    """
    if (named := os.environ.get(NAMED)) and path.is_relative_to(own := os.environ.get(RUN_DIR, "")):
        path = named / path.relative_to(own)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def shown(path: Path) -> str:
    """A path for a run's last lines: quoted for a shell, and not read as a flag if it begins with a dash."""
    written = short(path)
    return one_line(quoted(f"./{written}" if written.startswith("-") else written))
