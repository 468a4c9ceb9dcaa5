"""The errors that a user can meet, each with what is wrong, why, and what to type instead."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from trainer.visible import one_line, shortened

LONGEST = 500
"""Characters of what was typed that are said again."""
VERY_LONG = re.compile(r"\S{1000,}")
"""A word of a reason that is no word: a name that a file from outside gave."""


def first_line(error: BaseException) -> str:
    """An exception's message in one line; its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def why(error: BaseException) -> str:
    """The reason that an error gives, as the rest of a sentence, without a full stop; for an OSError, the system's own
    words."""
    reason = error.strerror if isinstance(error, OSError) else None
    return (reason or first_line(error)).rstrip(". ")


class UserError(Exception):
    """The error for a user's mistake, raised before anything starts. Exit code 2, no traceback.

    Args:
        what: the key and its value, e.g. ``data.batch_size=0``.
        why: the reason, as the rest of a sentence, e.g. ``must be at least 1 sample``.
        instead: what to type instead, e.g. ``data.batch_size=32``; empty when nothing can be proposed.
        unusable: keys that are fine by themselves, and that the options chosen beside them have no use for.
    """

    exit_code = 2

    def __init__(self, what: str, why: str, instead: str = "", unusable: Sequence[str] = ()) -> None:
        super().__init__(what, why, instead)
        self.unusable = tuple(unusable)
        self.what = what
        self.why = why
        self.instead = instead

    def __str__(self) -> str:
        what = self.what if len(self.what) <= LONGEST else f"{self.what[:LONGEST]}..."
        reason = VERY_LONG.sub(lambda word: shortened(word[0]), self.why)
        sentence = f"{what}: {reason}".rstrip(".")
        return one_line(f"{sentence}. Type instead: {self.instead}" if self.instead else f"{sentence}.")


class WrongValue(UserError):
    """The error for a value that its config key does not accept.

    Args:
        refused: the value.
        instead_of: what to type instead, of the value and of what the key is where nobody gives it.
    """

    def __init__(self, path: str, what: str, why: str, refused: Any, instead_of: Callable[[Any, Any], str]) -> None:
        super().__init__(what, why, instead_of(refused, None))
        self.path = path
        self.refused = refused
        self.instead_of = instead_of

    def usually(self, usual: Any) -> UserError:
        """This error, with the key's usual value proposed as the value to type instead."""
        return UserError(self.what, self.why, self.instead_of(self.refused, usual))


class RunFailed(Exception):
    """The error for a run that started and then failed. Exit code 1.

    Args:
        message: one or more lines: which process, its own error, where its log is.

    Attributes:
        ends_run: processes that could do without the one that raises it cannot go on either.
        follows: from the end of another process, which is the cause.
        asked: the signal that had asked this host to leave before that; empty: none had.
    """

    exit_code = 1
    ends_run = True
    follows = False
    asked = ""


class Died(RunFailed):
    """The error for a process of the run that was killed, ended silently, or hangs; it reported no error of its own.

    Args:
        who: e.g. ``worker 1``; update: how many updates it had done.

    Attributes:
        done: by name, how many updates each process of the run had done.
    """

    def __init__(self, message: str, who: str, update: int = 0) -> None:
        super().__init__(message)
        self.who, self.update = who, update
        self.done: dict[str, int] = {}


class Missing(RunFailed):
    """The error for processes of the run that did not come to a meeting, or did not answer, in time.
    Where all processes can be restarted, the launcher takes them for dead (:mod:`trainer.launch.hang`).

    Args:
        who: their names, e.g. ``["worker 1"]``.
    """

    def __init__(self, message: str, who: Sequence[str]) -> None:
        super().__init__(message)
        self.who = tuple(who)


class NotFinite(RunFailed):
    """The error for a loss, gradient or parameter that is NaN or infinite.

    Args:
        step: the run's update in which it is, from 1; epoch, update: the same as epoch and number in it, from 0.
    """

    def __init__(self, message: str, step: int, epoch: int, update: int) -> None:
        super().__init__(message)
        self.step, self.epoch, self.update = step, epoch, update


BY_CTRL_C = "got SIGINT"
"""How an interruption is told whose exception says nothing."""


class Interrupted(BaseException):
    """The error for a run that was ended from outside, by Ctrl-C or SIGTERM. Exit code 130.
    No ``Exception``: a signal raises it anywhere, also where any other error means something else."""

    exit_code = 130


class AskedToLeave(Interrupted):
    """The error for SIGTERM or SIGUSR1 to a run that can go on, while it trains nothing: there is nothing new to save.
    Exit code 75 (try again).

    Args:
        elsewhere: another host got the signal.
    """

    exit_code = 75

    def __init__(self, message: str, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.elsewhere = elsewhere


PREEMPTED = "preempted"
"""How a run ends that was asked to leave the machine, when it has saved a checkpoint or had nothing new to save."""
PRUNED = "pruned"
"""How a job of a search ends that others are better than: as a preempted one, and nobody resumes it."""


NOTHING_NEW = "{} while nothing was trained: there is nothing new to save"


class RunPreempted(Interrupted):
    """The error for a run that was asked to leave the machine and can go on later. Exit code 75 (try again)."""

    exit_code = 75


class Preempted(Exception):
    """Raised in a worker that ends with a saved checkpoint, because the run was asked to leave the machine."""


def failed(name: str, method: str, call: Any, error: BaseException) -> RunFailed:
    """Make the error for user code that broke a run: one sentence with file and line, then the traceback."""
    try:
        own = inspect.getsourcefile(inspect.unwrap(call))
    except TypeError:  # made in C
        own = None
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames) if f.filename == own), frames[-1])
    said = f"{name} broke in {method}, {frame.filename}:{frame.lineno}: {type(error).__name__}: {first_line(error)}"
    ours = error.__traceback__  # whose first frame is the one that calls the user's code
    lines = traceback.format_exception(type(error), error, ours.tb_next if ours and ours.tb_next else ours)
    return RunFailed(f"{said}\n{''.join(lines)}".rstrip())
