"""Copies a run's checkpoints to ``checkpoint.to`` during the training, in the launcher's process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.remote import Remote, address_of, reason
from trainer.checkpoint.store import CHECKPOINTS
from trainer.job.ready import Ready
from trainer.job.result import Result
from trainer.planning.find_checkpoint import AUTO, FRESH
from trainer.run_folder.reset_files import CARRIED
from trainer.wording import counted

POLL_S = 0.5
AGAIN_S = (5.0, 60.0)
"""The first and the longest wait after a failed copy; each wait is twice the last one."""
PATIENCE_S = 60.0
"""Longest time without progress at the end of the run."""


class Uploads:
    """Copies a run's whole checkpoints to a remote address, newest first; deletes copies of those retired here.

    Args:
        run_dir: the run's folder.
        remote: the run's copies.
        say: shows a line to the user.
        keep: number of the newest copies that stay, also if this folder never had them.

    Attributes:
        failed: why the last copy failed; empty: it succeeded.
    """

    def __init__(
        self,
        run_dir: Path,
        remote: Remote,
        say: Callable[[str], None],
        keep: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_dir, self.remote, self.say, self.keep, self.clock = run_dir, remote, say, keep, clock
        self.there = {name: remote.marker(name) for name in remote.found()}
        self.failed = ""
        self.again_at, self.wait_s = 0.0, AGAIN_S[0]
        self.moved_at = clock()
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def left(self) -> list[Path]:
        """The checkpoints that are not copied yet, newest first."""
        marked = [(folder, durable_folder.marker_of(folder)) for folder in store.found(self.run_dir / CHECKPOINTS)]
        return [folder for folder, marker in marked if marker and self.there.get(folder.name) != marker]

    def close(self, patience_s: float = PATIENCE_S) -> list[str]:
        """Wait until everything is copied, or until no progress for ``patience_s``; returns what is not copied."""
        self.moved_at, self.again_at, self.wait_s = self.clock(), 0.0, AGAIN_S[0]
        self.ends.set()
        warned = False
        while self.thread.is_alive() and self.clock() - self.moved_at < patience_s:
            self.thread.join(POLL_S)
            if self.thread.is_alive() and not warned and self.clock() - self.moved_at > 2 * POLL_S:
                self.say(f"waits until the checkpoints are at {self.remote.address}")
                warned = True
        if left := self.left():
            names, why = ", ".join(folder.name for folder in left), self.failed or "it takes too long"
            self.say(
                f"ATTENTION: not copied to {self.remote.address}: {names} ({why}). The next resume=auto "
                f"copies what is left"
            )
        return [folder.name for folder in left]

    def _work(self) -> None:
        while True:
            ends = self.ends.is_set()
            if self.clock() >= self.again_at:
                self.step()
            if ends and not self.left():
                return
            time.sleep(POLL_S)

    def _moves(self) -> None:
        self.moved_at = self.clock()

    def step(self) -> None:
        """Copy the checkpoints that are left, and remove retired copies."""
        try:
            for folder in self.left():
                self._copy(folder)
        except Exception as error:  # each file system has exceptions of its own
            self._failed(reason(error))

    def _copy(self, folder: Path) -> None:
        began, marker = self.clock(), durable_folder.marker_of(folder)
        try:
            held = (folder / store.BEST).is_file()  # with the checkpoint's own files
            names = [name for name in CARRIED if not (held and name.endswith(store.BEST))]
            self.remote.put(folder, self.run_dir, names, self._moves)
        except Exception:
            if durable_folder.marker_of(folder):
                raise
            self.remote.remove(folder.name)  # it was retired meanwhile
            return
        if durable_folder.marker_of(folder) != marker:
            return
        first = not self.there
        self.there[folder.name] = marker
        self._moves()
        if first or self.failed:
            size = sum(seal.get("bytes", 0) for seal in durable_folder.files(folder, store.FORMAT).values()) / 1e6
            self.say(
                f"{folder.name} is copied to {self.remote.address} ({size:.1f} MB in {self.clock() - began:.1f} s)"
            )
        self.failed, self.again_at, self.wait_s = "", 0.0, AGAIN_S[0]
        self._retire(folder)

    def _retire(self, newest: Path) -> None:
        """Remove older copies of checkpoints that this folder no longer has."""
        for name in sorted(self.there, key=store.step_of, reverse=True)[self.keep :]:
            if store.step_of(name) < store.step_of(newest.name) and not (newest.parent / name).is_dir():
                self.remote.remove(name)
                del self.there[name]

    def _failed(self, why: str) -> None:
        if why != self.failed:
            left = counted(len(self.left()), "checkpoint")
            self.say(f"ATTENTION: {left} cannot be copied to {self.remote.address}: {why}. It is tried again")
        self.failed = why
        self.again_at, self.wait_s = self.clock() + self.wait_s, min(2 * self.wait_s, AGAIN_S[1])


@contextlib.contextmanager
def uploading(ready: Ready, result: Result, say: Callable[[str], None]) -> Iterator[None]:
    """Context manager: copies checkpoints as they appear; ``result.not_copied`` gets those that failed.

    Raises:
        UserError: the address cannot be reached.
    """
    config, plan = ready.checked.config, ready.plan
    to, run_dir = config.checkpoint.to, Path(plan.paths.run_dir)
    assert to is not None
    remote = Remote(address_of(to, run_dir, plan.paths.whole_path))
    _give_up_others(ready, remote)
    uploads = Uploads(run_dir, remote, say, config.checkpoint.keep_last)
    uploads.thread.start()
    try:
        yield
    finally:
        result.not_copied = uploads.close()


def _give_up_others(ready: Ready, remote: Remote) -> None:
    """Remove or rename the copies of a training that this run does not continue."""
    resume, path = ready.plan.resume, ready.checked.config.resume.path
    for name in remote.found():
        if path == FRESH:
            remote.remove(name)
        elif (resume is None and path != AUTO) or (
            resume is not None and (not resume.here or store.step_of(name) > store.about(Path(resume.folder)).step)
        ):
            remote.set_aside(name)
