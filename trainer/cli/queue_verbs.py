"""``python -m trainer submit | ps | logs | cancel | resume | retry | show | runner``: the queue of this machine."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli.verb_parser import VerbParser, within
from trainer.errors import UserError
from trainer.terminal import streams
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
BEGINS_S = 10.0
"""So long after a submission its runner may need to begin."""
NAME = 24
"""Letters of a name that ``ps`` shows."""
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
    for flag, key in (("--priority", "launch.priority"), ("--key", "launch.once")):
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

    asked = parsed(verb, words)
    the_queue = queue.Queue()
    if verb == "ps":
        with streams.answering():
            _print_runs(the_queue, asked.all)
        return 0
    if verb == "runner":
        return _run_runner(the_queue, asked.idle, asked.leave, asked.host)
    refused: list[UserError] = []
    with streams.answering():
        for run in [run for word in asked.runs for run in _named(the_queue, word)]:
            if verb == "logs":
                return _logs(the_queue, run, asked.follow)
            try:
                print(done(the_queue, verb, run), flush=True)
            except UserError as error:  # the others of `cancel 3-5` are asked all the same
                refused.append(error)
    for other in refused[1:]:
        print(f"error: {other}", file=sys.stderr)
    if refused:
        raise refused[0]
    return 0


def parsed(verb: str, words: Sequence[str]) -> argparse.Namespace:
    """The words after a verb other than ``submit``.

    Raises:
        UserError: the verb takes other words.
    """
    parser = VerbParser(prog=f"{START} {verb}", usage=f"{START} {verb} {VERBS[verb]}")
    if verb == "ps":
        parser.add_argument("--all", action="store_true")
    elif verb == "runner":
        parser.add_argument("--idle", type=within(float, 0), default=None)
        parser.add_argument("--leave", action="store_true")
        parser.add_argument("--host", type=_host_name, default=None)
    else:
        if verb == "logs":
            parser.add_argument("-f", "--follow", action="store_true")
        parser.add_argument("runs", nargs="+" if verb in ("cancel", "resume", "retry") else 1)
    return parser.parse_args(words)


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


def _named(the_queue: Queue, word: str) -> list[Run]:
    """The runs of a number, a span of numbers, a key or a folder.

    Raises:
        UserError: there is none.
    """
    import os

    first, _, last = word.partition("-")
    if first.isdecimal() and (last.isdecimal() or not last):
        found = the_queue.between(int(first), int(last or first))
    else:
        one = the_queue.with_key(word) or the_queue.in_folder(os.path.abspath(word))
        found = [] if one is None else [one]
    if found:
        return found
    raise UserError(word, "there is no such run in the queue", f"{START} ps --all")


def done(the_queue: Queue, verb: str, run: Run) -> str:
    """Do what ``cancel``, ``resume``, ``retry`` or ``show`` asks for; returns what to print.

    Raises:
        UserError: the run's state does not allow it.
    """
    from trainer.service import queue
    from trainer.service.engine import start_runner

    if run.engine != queue.OWN and verb != "show":
        return _done_elsewhere(the_queue, verb, run)
    if verb == "show":
        run = _asked(the_queue, run)
        return "\n".join(f"{name:<12}{value}" for name, value in _shown(run).items())
    if verb == "cancel":
        if the_queue.move(run.number, (*queue.WAITING, *queue.ALIVE), asked=queue.CANCEL):
            start_runner(the_queue.folder)
            return f"run {run.number} is asked to end"
        raise UserError(f"cancel {run.number}", f"it is {run.state}", f"{START} resume {run.number}")
    again: dict[str, Any] = {
        "state": queue.QUEUED,
        "asked": "",
        "reason": "",
        "code": None,
        "ended": None,
        "lost": 0,
        "preempted": 0,
    }
    if the_queue.move(run.number, queue.OVER, fresh=run.life + 1 if verb == "retry" else run.fresh, **again):
        start_runner(the_queue.folder)
        return f"run {run.number} is queued again" + (", from its newest checkpoint" if verb == "resume" else "")
    raise UserError(f"{verb} {run.number}", f"it is {run.state}", f"{START} logs -f {run.number}")


def _done_elsewhere(the_queue: Queue, verb: str, run: Run) -> str:
    """Do what ``cancel`` asks for with a run that another engine has.

    Raises:
        UserError: it has ended, or the engine does not answer; or the verb is another one.
    """
    from trainer.config.redact import command
    from trainer.launch.engines.contract import Unreachable
    from trainer.service import elsewhere, queue

    now = elsewhere.asked(the_queue, run)
    if verb != "cancel":
        instead = f"{START} {command(run.words)} resume=auto"
        raise UserError(f"{verb} {run.number}", f"it is a run of {run.engine}, and {now.state}", instead)
    handle = None if now.state in queue.OVER else elsewhere.handle_of(the_queue, run)
    if handle is None:
        raise UserError(f"cancel {run.number}", f"it is {now.state}", f"{START} show {run.number}")
    the_queue.set(run.number, asked=queue.CANCEL)
    try:
        handle.cancel()
    except Unreachable as error:
        raise UserError(f"cancel {run.number}", f"{run.engine} does not answer: {error}", handle.cancels) from error
    return f"run {run.number} is cancelled: {handle.name}"


def _asked(the_queue: Queue, run: Run) -> Run:
    """A run with the state that its engine says, where that is not the queue."""
    from trainer.service import queue

    if run.state != queue.SUBMITTED:
        return run
    from trainer.service import elsewhere

    return elsewhere.asked(the_queue, run)


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
    import shutil

    from trainer.service import queue

    over = [run for run in the_queue.newest(10**9 if everything else SHOWN) if run.state in queue.OVER]
    elsewhere = [_asked(the_queue, run) for run in the_queue.in_states((queue.SUBMITTED,))]
    rows = [*over, *elsewhere, *the_queue.in_states(queue.ALIVE), *the_queue.in_states(queue.WAITING)]
    if not rows:
        print(f"no runs in {the_queue.folder}")
        return
    hosts, now = the_queue.hosts(), time.time()
    wide = sys.stdout.isatty() and shutil.get_terminal_size().columns
    of_users = len({run.user for run in rows}) > 1
    cells = [("run", "state", "for", "name", *(["user"] * of_users), "slots", "why")]
    for run in rows:
        since = max(0.0, (run.ended or now) - (run.began or run.submitted))
        silent = [host for host in run.parts if host not in hosts and run.state in queue.ALIVE]
        why = f"no runner on {', '.join(silent)}" if silent and not run.reason else run.reason
        if not hosts and run.state in queue.WAITING and now - run.submitted > BEGINS_S:
            why = f"no runner: {START} runner"
        name, slots = run.name if len(run.name) <= NAME else f"{run.name[: NAME - 3]}...", _slots_of(run)
        cells.append((str(run.number), run.state, _for(since), name, *([run.user] * of_users), slots, why))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  " + "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row[3:], widths[3:], strict=True)
        )
        line = line.rstrip()
        print(line if not wide or len(line) <= wide else f"{line[: wide - 3]}...")


def _slots_of(run: Run) -> str:
    from trainer.service import queue

    here = counted(run.cores, "core")
    slots = f"{counted(run.gpus, 'GPU')}, {here}" if run.gpus else here
    shown = slots if run.hosts == 1 else f"{counted(run.hosts, 'host')} of {slots}"
    return shown if run.engine == queue.OWN else f"{run.engine}: {shown}"


def _for(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _logs(the_queue: Queue, run: Run, follow: bool) -> int:
    """Print the lines of a run; with ``follow`` until it has ended, and return its exit code."""
    from trainer.launch.engines.engine_folder import LogReader
    from trainer.service import queue

    read = LogReader(Path(run.log)).lines
    if run.state == queue.SUBMITTED:
        from trainer.service import elsewhere

        if (handle := elsewhere.handle_of(the_queue, run)) is not None:
            read = handle.lines
    while True:
        now = the_queue.run(run.number)
        now = None if now is None else _asked(the_queue, now)
        over = now is None or now.state in queue.OVER
        for text in read():
            sys.stdout.write(text)
        sys.stdout.flush()
        if not follow or over:
            for text in read():  # a last line without an end
                sys.stdout.write(text)
            return 0 if not follow or now is None else now.code or 0
        time.sleep(0.3 if run.engine == queue.OWN else 2.0)
