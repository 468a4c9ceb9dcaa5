"""``python -m trainer runs list | compare | reproduce | prune | report``: the run folders on this machine."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.cli.verb_parser import VerbParser, within
from trainer.config.keys import key_of, leaves
from trainer.config.secret_parts import HIDDEN
from trainer.errors import RunFailed, UserError
from trainer.host.parent_death import killed_with_parent
from trainer.run_folder import lives
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.points import read_points
from trainer.terminal.screen import Screen
from trainer.terminal.status import read_status
from trainer.wording import counted, since

VERB = "runs"
START = f"python -m trainer {VERB}"
USAGE = {
    "list": "[FOLDER ...]",
    "compare": "RUN RUN",
    "reproduce": "RUN",
    "prune": "[--state STATE,...] [--older DAYS] [--yes] [FOLDER ...]",
    "report": "SWEEP",
}
FOLDERS = ("outputs", "runs", "multirun")
"""Where runs are looked for, in the working folder."""
LIVING, LOST = "running", "lost"
"""States of a run that says that it runs: a process holds its lock, or none does."""
PRUNED = "failed,killed,lost"
DAY_S = 86_400.0
OF_A_RUN = ("status.json", "config.yaml")
RESULT = "result.json"
OF_ITS_FOLDER = ("hydra.run.dir", "hydra.sweep.dir", "resume", "resume.path", "resume.allow_changes")
NOT_AGAIN = (*OF_ITS_FOLDER, "launch.wait", "launch.once")
"""Keys that a run which is repeated does not have: it is another one, and is waited for."""
MACHINE = ("perf/", "system/", "host", "server")
"""Beginnings of the names of metrics that measure the machine and not the training."""


@dataclass(frozen=True)
class Saved:
    """A run as its folder describes it.

    Attributes:
        state: done, failed, killed, preempted, ``running`` or ``lost``. age: seconds since its last sign of life.
        size: bytes of its files.
    """

    folder: Path
    state: str
    best: str
    age: float
    size: int


def answer(words: Sequence[str]) -> int:
    """Do what ``runs WORDS`` asks for; returns the exit code.

    Raises:
        UserError: there is no such verb or run.
    """
    if not words or words[0] not in USAGE:
        typed = f"{VERB} {words[0]}" if words else VERB
        raise UserError(typed, f"needs one of {', '.join(USAGE)}", f"{START} list")
    verb, asked = words[0], parsed(words[0], words[1:])
    if verb == "list":
        _list(asked.folders)
    elif verb == "compare":
        _compare(_run(asked.run), _run(asked.other))
    elif verb == "reproduce":
        return _reproduce(_run(asked.run))
    elif verb == "prune":
        _prune(asked.folders, asked.state.split(","), asked.older, asked.yes)
    else:
        from trainer.cli.sweep_report import report

        print(f"report: {report(Path(asked.folder))}")
    return 0


def parsed(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """The words after ``runs VERB``.

    Raises:
        UserError: the verb takes other words.
    """
    parser = VerbParser(prog=f"{START} {verb}", usage=f"{START} {verb} {USAGE[verb]}")
    if verb in ("list", "prune"):
        parser.add_argument("folders", nargs="*")
    if verb == "prune":
        parser.add_argument("--state", default=PRUNED)
        parser.add_argument("--older", type=within(float, 0), default=7.0)
        parser.add_argument("--yes", action="store_true")
    if verb in ("compare", "reproduce"):
        parser.add_argument("run")
    if verb == "compare":
        parser.add_argument("other")
    if verb == "report":
        parser.add_argument("folder")
    return parser.parse_args(words)


def found(folders: Sequence[str]) -> Iterator[Saved]:
    """Yield the runs below these folders, or below ``FOLDERS``; links are not followed.

    Raises:
        UserError: one of the folders does not exist.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(folder, "there is no such folder", f"{START} list FOLDER")
    for top in folders or [name for name in FOLDERS if Path(name).is_dir()]:
        for where, below, files in os.walk(top):
            if all(name in files for name in OF_A_RUN):
                below.clear()
                yield _saved(Path(where))
            below.sort()


def _saved(folder: Path) -> Saved:
    status = read_status(folder)
    state = str(status.get("state", LOST))
    if state not in lives.REPORTED:
        state = LIVING if _is_held(folder) else LOST
    best = status.get("best") or {}
    shown = f"{best['metric']} {best['value']:.4f}" if "value" in best else ""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    age = time.time() - (folder / "status.json").stat().st_mtime
    return Saved(folder, state, shown, age, sum(path.stat().st_size for path in files))


def _is_held(folder: Path) -> bool:
    """Whether a process holds the run's lock, or nobody can say so."""
    hold = FolderLock(folder, make=False)
    try:
        return not hold.take()
    finally:
        hold.leave()


def _list(folders: Sequence[str]) -> None:
    runs = list(found(folders))
    if not runs:
        where = ", ".join(folders or FOLDERS)
        print(f"no runs in {where}")
        return
    rows = [[str(run.folder), run.state, run.best, since(run.age), _size(run.size)] for run in runs]
    Screen().rows("Runs", ["run", "state", "best", "age", "size"], rows, 0)


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _run(word: str) -> Path:
    """The folder of a run.

    Raises:
        UserError: it is none.
    """
    folder = Path(word)
    if not all((folder / name).is_file() for name in OF_A_RUN):
        raise UserError(word, f"is no run's folder: it lacks {' or '.join(OF_A_RUN)}", f"{START} list")
    return folder


def _config(folder: Path) -> dict[str, Any]:
    import yaml

    found = yaml.safe_load((folder / "config.yaml").read_text())
    return dict(leaves(found, ""))


def _compare(one: Path, other: Path) -> None:
    """Print the config keys that differ, and the metrics beside each other."""
    out = Screen()
    configs, results = [_config(one), _config(other)], [read_status(one, RESULT), read_status(other, RESULT)]
    keys = [
        key for key in dict.fromkeys([*configs[0], *configs[1]]) if _cell(configs[0], key) != _cell(configs[1], key)
    ]
    if keys:
        out.rows("Config", ["key", str(one), str(other)], [[k, *(_cell(c, k) for c in configs)] for k in keys], 0)
    else:
        out.print("the configs are equal")
    metrics = [
        result.get("metrics", {}) | {f"best {k}": v for k, v in result.get("best", {}).items()} for result in results
    ]
    names = list(dict.fromkeys([*metrics[0], *metrics[1]]))
    rows = []
    for name in names:
        values = [values.get(name) for values in metrics]
        both = None not in values
        change = f"{values[1] - values[0]:+.5g}" if both else ""
        rows.append([name, *("" if value is None else f"{value:.5g}" for value in values), change])
    out.rows("Metrics", ["metric", str(one), str(other), "difference"], rows, 0)
    for line in _made_with(results):
        out.print(line)


def _cell(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key]) if key in config else "(not there)"


def _made_with(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what code, data and versions of two runs are: the same, different or not known."""
    from trainer.host.versions import differences

    before, now = (result.get("made_with") or {} for result in results)
    for name in ("code", "data"):
        if not before.get(name) or not now.get(name):
            yield f"{name}: not known of both runs"
        else:
            yield f"{name}: {'the same' if before[name] == now[name] else 'DIFFERENT'}"
    if not before.get("versions") or not now.get("versions"):
        yield "versions: not known of both runs"
        return
    others = differences(before["versions"], now["versions"])
    yield f"versions: {'; '.join(others) if others else 'the same'}"


def _reproduce(run: Path) -> int:
    """Run the command of a run again, in a new folder beside it; print what is the same. Returns the exit code.

    Raises:
        UserError: its command is not known, or holds a secret. RunFailed: no metrics can be compared.
    """
    known = lives.read(run)
    if not known:
        raise UserError(str(run), "has no lives.json with its command", "the command, as you typed it")
    words = [word for word in shlex.split(known[0].command) if key_of(word) not in NOT_AGAIN]
    if secret := next((word for word in words if HIDDEN in word), None):
        raise UserError(
            str(run), f"its command has a secret that no file keeps ({secret})", "the command, as you typed it"
        )
    if len(known) > 1:
        print(f"the run had {len(known)} lives; it is run again from its beginning, in one")
    size = (read_status(run, RESULT).get("chosen") or {}).get("batch_size")
    words += [f"data.batch_size={size}"] if size else []
    again = _new_folder(run)
    command = [sys.executable, "-m", "trainer", *words, f"hydra.run.dir={again}"]
    print(f"again: python -m trainer {shlex.join(command[3:])}", flush=True)
    code = subprocess.call(command, preexec_fn=killed_with_parent())  # the saved command of the user  # nosec B603
    if code:
        return code
    for line in _made_with([read_status(run, RESULT), read_status(again, RESULT)]):
        print(line)
    for line in differences(run, again):
        print(line)
    return 0


def _new_folder(run: Path) -> Path:
    number = 1
    if (run.parent / "multirun.yaml").is_file():  # a sweep's folder has its own jobs alone
        run = run.parent.with_name(f"{run.parent.name}-{run.name}")
    while (folder := run.with_name(f"{run.name}-again{number if number > 1 else ''}")).exists():
        number += 1
    return folder


def differences(run: Path, again: Path) -> Iterator[str]:
    """Yield by how much the metrics of two runs differ: at the end, and in all points of ``metrics.jsonl``."""
    ends = [
        {n: v for n, v in read_status(f, RESULT).get("metrics", {}).items() if not n.startswith(MACHINE)}
        for f in (run, again)
    ]
    for name in sorted(ends[0].keys() & ends[1].keys()):
        before, now = ends[0][name], ends[1][name]
        yield f"{name}: {before:.6g}, again {now:.6g}, difference {now - before:.3g}"
    points = [_points(run), _points(again)]
    both = sorted(points[0].keys() & points[1].keys())
    if not both:
        yield "no point of metrics.jsonl is in both runs"
        return
    apart = [(step, name) for step, name in both if points[0][step, name] != points[1][step, name]]
    same = f"{len(both)} values of metrics.jsonl in both runs"
    if not apart:
        yield f"all {same} are equal: the difference is exactly 0"
        return
    largest = max(abs(points[0][at] - points[1][at]) for at in apart)
    step, name = apart[0]
    yield f"{len(apart)} of {same} differ, first {name} at update {step}; the largest difference is {largest:.3g}"


def _points(run: Path) -> dict[tuple[int, str], float]:
    values: dict[tuple[int, str], float] = {}
    for point in read_points(run):
        for name, value in point["metrics"].items():
            if not name.startswith(MACHINE):
                values[point["step"], name] = value
    return values


def _prune(folders: Sequence[str], states: Sequence[str], days: float, really: bool) -> None:
    """List the runs of these states that are older, and delete them if ``really``. A living run is never deleted.

    Raises:
        UserError: there is no such state.
    """
    allowed = (*lives.REPORTED, LOST)
    if wrong := [state for state in states if state not in allowed]:
        raise UserError(f"--state {wrong[0]}", f"must be some of {', '.join(allowed)}", f"--state {PRUNED}")
    waiting = _in_queue()
    old = [
        run
        for run in found(folders)
        if run.state in states and run.age >= days * DAY_S and os.path.realpath(run.folder) not in waiting
    ]
    for run in old:
        print(f"{run.folder}  {run.state}, {since(run.age)}, {_size(run.size)}")
    total = f"{counted(len(old), 'run')}, {_size(sum(run.size for run in old))}"
    if not really:
        print(f"{total} would be deleted; nothing is (--yes deletes them)" if old else "nothing to delete")
        return
    deleted = [run for run in old if _delete(run)]
    print(f"deleted: {counted(len(deleted), 'run')}, {_size(sum(run.size for run in deleted))}")


def _in_queue() -> set[str]:
    """The folders of runs that wait or live in this machine's queue, without making one."""
    from trainer.service import queue

    if not (queue.home() / queue.FILE).exists():
        return set()
    return {os.path.realpath(run.folder) for run in queue.Queue().in_states((*queue.WAITING, *queue.ALIVE))}


def _delete(run: Saved) -> bool:
    """Delete a run's folder while its lock is held; returns False if somebody else holds it or it has changed."""
    hold = FolderLock(run.folder, make=False)
    try:
        if not hold.take() or _saved_state(run.folder) != run.state:
            print(f"{run.folder} is in use: it stays")
            return False
        try:
            shutil.rmtree(run.folder)
        except OSError as error:
            raise RunFailed(f"{run.folder} cannot be deleted: {error}") from error
        return True
    finally:
        hold.leave()


def _saved_state(folder: Path) -> str:
    """The state that the run's files name, while this process holds its lock."""
    state = str(read_status(folder).get("state", LOST))
    return state if state in lives.REPORTED else LOST
