"""Submits a run for a user of the API: checks what they may, then starts ``python -m trainer submit``.

A process of its own composes the config, so a refusal is the command line's own sentence, and nothing of Hydra stays in
the service. One submission at a time: the quota counts what the one before has put into the queue.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from trainer.errors import UserError
from trainer.service import allowed, queue
from trainer.service.tokens import Caller

WAIT_S, LONGEST_S = 20.0, 120.0
"""Longest wait for the submission of somebody else, and longest time of one."""


class Busy(Exception):
    """The error for a submission that may work later: an HTTP status, and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Submitter:
    """Puts runs of the API into the queue.

    Args:
        home: folder of the queue. folder: in which runs have their folders, and from which paths lead. recipes: that
        may be chosen. flags: before the overrides (``--config-dir``). environment: of the runs. quota: runs of one
        token that wait or live; the owner has none.
    """

    def __init__(
        self,
        home: Path,
        folder: Path,
        recipes: Collection[str],
        flags: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        quota: int = 20,
    ) -> None:
        self.home, self.folder, self.recipes, self.flags, self.quota = home, folder, recipes, flags, quota
        self.environment = {**environment, queue.HOME: str(home)}
        self._alone = threading.Lock()

    def submit(self, caller: Caller, overrides: Sequence[str], key: str | None, priority: int) -> tuple[int, bool]:
        """Submit a run; returns its number, and whether it is new: the same key of the same caller is the same run.

        Raises:
            UserError: an override is not allowed, or the command line refuses it.
            Busy: the quota is used up, or others submit.
        """
        own_key = f"api/{caller.name}/{key or secrets.token_hex(8)}"
        if (before := self._with_key(own_key)) is not None:
            return before.number, False
        recipe = allowed.check(overrides, self.recipes, self.folder)
        if priority > 0 and not caller.owner:
            raise UserError(
                f"priority={priority}", "above 0 is for the owner, because others' runs make room", "priority=0"
            )
        if not self._alone.acquire(timeout=WAIT_S):
            raise Busy(503, "others submit at this moment")
        try:
            if (before := self._with_key(own_key)) is not None:
                return before.number, False
            self.check_quota(caller)
            self._start(recipe, overrides, own_key, priority)
        finally:
            self._alone.release()
        if (run := self._with_key(own_key)) is None:
            raise UserError("overrides", "submit no run: they show something only")
        return run.number, True

    def check_quota(self, caller: Caller) -> None:
        """Refuse one more run.

        Raises:
            Busy: the caller has as many as the quota already.
        """
        if caller.owner:
            return
        with closing(queue.Queue(self.home)) as the_queue:
            runs = the_queue.in_states((*queue.WAITING, *queue.ALIVE))
        own = sum((run.key or "").startswith(f"api/{caller.name}/") for run in runs)
        if own >= self.quota:
            raise Busy(429, f"{caller.name} has {own} runs that wait or live, of {self.quota}")

    def _with_key(self, key: str) -> queue.Run | None:
        with closing(queue.Queue(self.home)) as the_queue:
            return the_queue.with_key(key)

    def _start(self, recipe: str, overrides: Sequence[str], key: str, priority: int) -> None:
        run_dir = self.folder / f"{recipe}-{secrets.token_hex(4)}"
        own = ["--priority", str(priority), "--key", f"'{key}'", f"hydra.run.dir='{run_dir}'"]
        command = [sys.executable, "-m", "trainer", "submit", *self.flags, *overrides, *own]
        try:
            done = subprocess.run(  # no shell, and every word is checked  # nosec B603
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LONGEST_S,
            )
        except subprocess.TimeoutExpired as error:
            raise Busy(503, f"the submission took more than {LONGEST_S:g} s") from error
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            said = next((line for line in lines if line.startswith("error: ")), (lines or ["no reason"])[-1])
            raise Refused(said.removeprefix("error: "))


class Refused(UserError):
    """The error for a command line that was refused, in its own words."""

    def __init__(self, sentence: str) -> None:
        super().__init__("overrides", sentence)
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence
