"""``python -m trainer submit | ps | logs | cancel | resume | retry | show | runner``: the queue of this machine."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.errors import UserError
from trainer.wording import counted

if TYPE_CHECKING:
    from trainer.service.queue import Queue, Run

SUBMIT = "submit"
VERBS = {
    SUBMIT: "[--priority N] [--key K] +recipe=NAME [key=value ...]",
    "ps": "[--all]",
    "logs": "[-f] RUN",
    "show": "RUN",
    "cancel": "RUN ...",
    "resume": "RUN ...",
    "retry": "RUN ...",
    "runner": "[--idle SECONDS] [--leave] [--host NAME]",
}
START = "python -m trainer"
SHOWN = 20
"""Runs that ``ps`` shows without ``--all``, besides those that wait or live."""


def submitted(words: Sequence[str]) -> list[str]:
    """Return the command line that ``submit WORDS`` stands for.

    Raises:
        UserError: the words choose another launcher.
    """
    if other := next((word for word in words if word.startswith("launch=")), None):
        raise UserError(
            f"{SUBMIT} ... {other}", "submit puts the run into this machine's queue", f"{START} ... {other}"
        )
    rest, own = list(words), ["launch=queue", "launch.wait=false"]
    for flag, key in (("--priority", "launch.priority"), ("--key", "launch.key")):
        for place, word in enumerate(rest):
            if word == flag and place + 1 < len(rest):
                own.append(f"{key}={rest[place + 1]}")
                del rest[place : place + 2]
                break
            if word.startswith(f"{flag}="):
                own.append(f"{key}={rest.pop(place).partition('=')[2]}")
                break
    return [*rest, *own]


def answer(verb: str, words: Sequence[str]) -> int:
    """Do what a verb other than ``submit`` asks for; returns the exit code.

    Raises:
        UserError: there is no such run, or it is not in a state for this.
    """
    from trainer.service import queue

    parser = _Parser(prog=f"{START} {verb}", usage=f"{START} {verb} {VERBS[verb]}")
    if verb == "ps":
        parser.add_argument("--all", action="store_true")
    elif verb == "runner":
        parser.add_argument("--idle", type=float, default=None)
        parser.add_argument("--leave", action="store_true")
        parser.add_argument("--host", type=_host_name, default=None)
    else:
        if verb == "logs":
            parser.add_argument("-f", "--follow", action="store_true")
        parser.add_argument("runs", nargs="+" if verb in ("cancel", "resume", "retry") else 1)
    asked = parser.parse_args(words)
    the_queue = queue.Queue()
    if verb == "ps":
        _print_runs(the_queue, asked.all)
        return 0
    if verb == "runner":
        return _run_runner(the_queue, asked.idle, asked.leave, asked.host)
    for run in [run for word in asked.runs for run in _named(the_queue, word)]:
        if verb == "logs":
            return _logs(the_queue, run, asked.follow)
        print(_done(the_queue, verb, run), flush=True)
    return 0


def _host_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", text):
        raise argparse.ArgumentTypeError("letters, digits, -, _ and .")
    return text


def _run_runner(the_queue: Queue, idle_s: float | None, leave: bool, host: str | None) -> int:
    """Be this host's runner, until there is nothing to do or it is asked to end.

    Raises:
        UserError: there is one.
    """
    import os

    from trainer.service import queue, runner

    if (lock := runner.only_one(the_queue.folder, host)) is None:
        raise UserError("runner", f"a runner of {the_queue.folder} runs already on this host")
    one = runner.Runner(the_queue, host=host)
    while True:
        one.run(idle_s, leave)
        os.close(lock)  # who submits from now on starts another one; what came just before is this one's
        if one.stops or not the_queue.in_states(queue.WAITING):
            return 0
        if (lock := runner.only_one(the_queue.folder, host)) is None:  # type: ignore[assignment]
            return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, message, self.usage or "")


def _named(the_queue: Queue, word: str) -> list[Run]:
    """The runs of a number, a span of numbers, a key or a folder.

    Raises:
        UserError: there is none.
    """
    import os

    first, _, last = word.partition("-")
    if first.isdecimal() and (last.isdecimal() or not last):
        found = [the_queue.run(number) for number in range(int(first), int(last or first) + 1)]
    else:
        found = [the_queue.with_key(word) or the_queue.in_folder(os.path.abspath(word))]
    if runs := [run for run in found if run is not None]:
        return runs
    raise UserError(word, "there is no such run in the queue", f"{START} ps --all")


def _done(the_queue: Queue, verb: str, run: Run) -> str:
    """Do what ``cancel``, ``resume``, ``retry`` or ``show`` asks for; returns what to print.

    Raises:
        UserError: the run's state does not allow it.
    """
    from trainer.service import queue
    from trainer.service.engine import start_runner

    if verb == "show":
        return "\n".join(f"{name:<12}{value}" for name, value in _shown(run).items())
    if verb == "cancel":
        if the_queue.move(run.number, (*queue.WAITING, *queue.ALIVE), asked=queue.CANCEL):
            start_runner(the_queue.folder)
            return f"run {run.number} is asked to end"
        raise UserError(f"cancel {run.number}", f"it is {run.state}", f"{START} resume {run.number}")
    again = {"state": queue.QUEUED, "asked": "", "reason": "", "code": None, "ended": None, "lost": 0, "preempted": 0}
    if the_queue.move(run.number, queue.OVER, fresh=run.life + 1 if verb == "retry" else run.fresh, **again):
        start_runner(the_queue.folder)
        return f"run {run.number} is queued again" + (", from its newest checkpoint" if verb == "resume" else "")
    raise UserError(f"{verb} {run.number}", f"it is {run.state}", f"{START} logs -f {run.number}")


def _shown(run: Run) -> dict[str, object]:
    from trainer.config.redact import command

    def clock(seconds: float | None) -> str:
        return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

    return {
        "run": run.number,
        "state": f"{run.state}{f' ({run.reason})' if run.reason else ''}",
        "command": f"{START} {command(run.words)}",
        "user": run.user,
        "code": run.code_version,
        **({"runs on": f"OTHER CODE: {run.ran_on}"} if run.ran_on not in ("", run.code_version) else {}),
        "folder": run.folder,
        "log": run.log,
        "slots": f"{counted(run.gpus, 'GPU')}, {counted(run.cores, 'core')}, {run.memory >> 20} MiB of memory",
        "priority": run.priority,
        "lives": run.life,
        "submitted": clock(run.submitted),
        "began": clock(run.began),
        "ended": clock(run.ended),
        "exit code": "" if run.code is None else run.code,
    }


def _print_runs(the_queue: Queue, everything: bool) -> None:
    from trainer.service import queue

    over = [run for run in the_queue.newest(10**9 if everything else SHOWN) if run.state in queue.OVER]
    rows = [*over, *the_queue.in_states(queue.ALIVE), *the_queue.in_states(queue.WAITING)]
    if not rows:
        print(f"no runs in {the_queue.folder}")
        return
    print(f"{'run':>5}  {'state':<11}{'for':>8}  {'name':<24}{'slots':<20}why")
    now = time.time()
    for run in rows:
        since = (run.ended or now) - (run.began or run.submitted)
        slots = f"{counted(run.gpus, 'GPU')}, {counted(run.cores, 'core')}" if run.gpus else counted(run.cores, "core")
        print(f"{run.number:>5}  {run.state:<11}{_for(since):>8}  {run.name[:23]:<24}{slots:<20}{run.reason}".rstrip())


def _for(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _logs(the_queue: Queue, run: Run, follow: bool) -> int:
    """Print the lines of a run; with ``follow`` until it has ended, and return its exit code."""
    from trainer.launch.engines.engine_folder import LogReader
    from trainer.service import queue

    reader = LogReader(Path(run.log))
    while True:
        now = the_queue.run(run.number)
        over = now is None or now.state in queue.OVER
        for text in reader.lines():
            sys.stdout.write(text)
        sys.stdout.flush()
        if not follow or over:
            for text in reader.lines():  # a last line without an end
                sys.stdout.write(text)
            return 0 if not follow or now is None else now.code or 0
        time.sleep(0.3)
