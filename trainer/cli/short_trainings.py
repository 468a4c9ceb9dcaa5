"""Short trainings that are only measured, each a command of its own: for mode=scaling and strategy=advise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.errors import BY_CTRL_C, Interrupted, RunFailed, UserError
from trainer.host.parent_death import killed_with_parent
from trainer.host.signals import termination_raises
from trainer.wording import override

APART = ("strategy=local_sgd", "strategy.k_steps=1000000000", "strategy.begin_step=0")
"""Overrides by which workers train beside each other and exchange nothing until the end."""
LEAVES_S = 20.0
"""Longest wait for the end of a training after a signal."""


def short(updates: int) -> list[str]:
    """Overrides of a training that is only measured."""
    log = max(1, updates // 6)
    return [
        f"max_steps={updates}",
        f"epochs={updates}",
        f"execution.log_every={log}",
        "validation=false",
        "test=false",
        "tracking=none",
        "checkpoint=none",
        "early_stop.metric=null",
        "best.metric=null",
        "ema.decay=null",
    ]


def start(words: Sequence[str], folder: Path | None, who: str) -> None:
    """Run a training as a command of its own, to its end.

    Args:
        folder: its run folder, and it prints nothing; None: it prints. who: asks for it, in messages.

    Raises:
        UserError, RunFailed: it was refused, or failed. Interrupted: by a signal, which it got as well.
    """
    own = [override("hydra.run.dir", str(folder)), "verbosity=quiet"] if folder is not None else []
    code, errors = _ended([sys.executable, "-m", "trainer", *words, *own], folder is not None, who)
    if code == 0:
        return
    said = errors.strip().splitlines() or [f"exit code {code}"]
    if code == UserError.exit_code:
        what, _, why = said[0].removeprefix("error: ").partition(": ")
        raise UserError(what, *why.split(". Type instead: ", 1))
    log = f"; its files are in {folder}" if folder is not None else ""
    raise RunFailed(f"{who}: a training failed: {said[0]}{log}")


def _ended(command: Sequence[str], is_captured: bool, who: str) -> tuple[int, str]:
    """Run a command to its end; returns its exit code, and what it has written to stderr.

    Args:
        is_captured: its lines are not shown.

    Raises:
        Interrupted: by a signal, which the command got as well; it has ended.
    """
    screen = subprocess.PIPE if is_captured else None
    with termination_raises():
        process = subprocess.Popen(  # this interpreter with the user's own words; no shell  # nosec B603
            command,
            stdout=subprocess.DEVNULL if is_captured else None,
            stderr=screen,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it once, from here
            preexec_fn=killed_with_parent(),
        )
        try:
            errors = process.communicate()[1]
            return process.returncode, errors or ""
        except (KeyboardInterrupt, Interrupted) as error:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=LEAVES_S)
            raise Interrupted(f"{who}: {error or BY_CTRL_C}; the training that ran has ended") from None
        finally:
            with suppress(ProcessLookupError):  # all that it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
