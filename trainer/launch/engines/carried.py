"""Runs the command on a host that shares no disk with the others: ``python -m trainer.launch.engines.carried``.

The command comes in the variable ``TRAINER_CARRIED`` (:class:`~trainer.launch.engines.copies.Carried`). It runs in a
run folder of this host's own, below the folder for temporary files. While it runs, what it writes there is copied to
the address, and once more at its end. In the next life of the job, on whichever host, the copies come first.

``... carried job FOLDER`` does the same for the files of a batch script, until there is a file ``over.tmp``; it also
brings the exit codes of the hosts. ``... carried once FOLDER`` does it once, and ``... carried begin FOLDER`` fetches
what earlier lives have left.

This module imports no torch.
"""

from __future__ import annotations

import base64
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.checkpoint.remote import Remote, file_system, reason
from trainer.errors import UserError
from trainer.host import addresses, private
from trainer.host.engine_tasks import (
    CARRIED,
    CARRIED_CONFIG,
    COPIES,
    ENGINE,
    KUBERNETES,
    LIFE,
    MPI,
    NAMED,
    RAY,
    ROLE,
    RUN_DIR,
    SUBMITTED,
    SWEEP_DIR,
    tasks_of,
)
from trainer.host.parent_death import killed_with_parent
from trainer.launch.engines.copies import FIRST, JOB, PATIENCE_S, RUN, Carried, Copies, Mirror
from trainer.launch.engines.engine_folder import LEAVE

OVER, POLL_S = "over.tmp", 0.2
"""The file by which a batch script ends what copies its files: a signal may not reach into a container."""
EVERY_S, SHARE = 3.0, 10
"""Between two copies: so many seconds, and ten times as long as the last copy took."""
MEETING, MEET_S = "meeting", 300.0
"""The file of host 0's address, and the longest wait for it."""
FORWARDING = (RAY, KUBERNETES)
"""Engines that signal this process alone; the others signal the command as well."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def host_of(environment: Mapping[str, str]) -> str:
    """The name of this host's files: its number, or that of the process where each has a pod.

    Raises:
        UserError: no variable of the engine says it.
    """
    for task in tasks_of(environment):
        return f"server-{task.host}" if environment.get(ROLE) == "server" else str(task.host)
    what = f"{SUBMITTED}={environment.get(SUBMITTED, '')}"
    raise UserError(what, "no variable of the engine says which host this is", "the command by the engine's own start")


def run(asked: Carried, environment: Mapping[str, str]) -> int:
    """Run the command on this host; returns its exit code, after its files are at the address.

    Raises:
        UserError: the address cannot be reached.
    """
    host, scratch = host_of(environment), private.scratch("trainer-run-")
    folder = scratch / "run"
    mirror = Mirror(folder, f"{asked.copies}/{RUN}/{host}")
    _fetch(mirror)
    variables = {
        **{name: value for name, value in environment.items() if name not in (CARRIED, CARRIED_CONFIG)},
        RUN_DIR: str(folder),
        COPIES: asked.copies,
        NAMED: asked.folder,
    }
    if asked.sweep:
        _fetch(Mirror(scratch / "sweep", f"{asked.sweep}/{RUN}/{JOB}"))
        variables[SWEEP_DIR] = str(scratch / "sweep")
    if environment.get(SUBMITTED) == MPI and not any(word.startswith("launch.master_addr=") for word in asked.words):
        variables |= _meeting_of(asked.copies, host)
    packed = asked.config or environment.get(CARRIED_CONFIG, "")
    words = [*_unpacked(packed, scratch / "config"), *asked.words]
    engine, out = folder / ENGINE, None
    if host != FIRST or environment.get(SUBMITTED) == MPI:  # the engine brings the lines of host 0
        engine.mkdir(parents=True, exist_ok=True)
        out = (engine / f"host.{host}.log").open("ab")
    with _Copying(mirror):
        code = _command(words, asked.started_in, scratch, variables, out)
        if LIFE in environment or environment.get(SUBMITTED) == MPI:
            engine.mkdir(parents=True, exist_ok=True)
            (engine / ".".join(["ended", *filter(None, [environment.get(LIFE)]), host])).write_text(f"{code}\n")
    if left := mirror.left():
        kept = scratch.rename(scratch.with_name(f"trainer.kept-{scratch.name.rpartition('-')[2]}"))
        _say(f"host {host}: not copied to {mirror.address}: {', '.join(left)}. The files are in {kept} there")
    else:
        private.discard(scratch)
    return code


def _fetch(mirror: Mirror) -> None:
    """Fetch what earlier lives have left at the address.

    Raises:
        UserError: it cannot be reached.
    """
    try:
        mirror.folder.mkdir(parents=True, exist_ok=True)
        mirror.fetch()
        Remote(mirror.address).try_writing()
    except Exception as error:  # each file system has exceptions of its own
        why = f"{mirror.address} cannot be read and written: {reason(error)}"
        raise UserError("checkpoint.to", why, "an address that all hosts can reach with this account") from error


def _meeting_of(copies: str, host: str) -> dict[str, str]:
    """Where hosts meet of which mpirun has no variable for it: host 0 leaves its address and a port for the others.

    Raises:
        UserError: it has left none.
    """
    files, place = file_system(f"{copies}/{RUN}/{JOB}/{ENGINE}/{MEETING}", f"checkpoint.to={copies}", auto_mkdir=True)
    if host == FIRST:
        own = addresses.address()
        files.pipe_file(place, f"{own} {addresses.free_port(own)}".encode())
    until = time.monotonic() + MEET_S
    while time.monotonic() < until:
        with suppress(FileNotFoundError):
            address, port = files.cat_file(place).decode().split()
            return {"MASTER_ADDR": address, "MASTER_PORT": port}
        time.sleep(EVERY_S / 3)
    why = f"host 0 has left no address at {copies} within {MEET_S:g} s"
    raise UserError(f"host {host} of mpirun", why, "launch.master_addr=ADDRESS")


def _unpacked(packed: str, folder: Path) -> list[str]:
    """Unpack the files of ``--config-dir``; returns the flag that names them."""
    if not packed:
        return []
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed)), mode="r:gz") as archive:
        archive.extractall(folder, filter="data")
    return ["--config-dir", str(folder)]


def _command(words: Sequence[str], started_in: str, scratch: Path, variables: Mapping[str, str], out: Any) -> int:
    """Run ``python -m trainer`` and wait for its end; returns its exit code, 128 and more for a signal."""
    there = started_in if os.path.isdir(started_in) else scratch
    process = subprocess.Popen(  # this product, with the user's words  # nosec B603
        [sys.executable, "-m", "trainer", *words],
        cwd=there if started_in else None,
        env=dict(variables),
        stdout=out,
        stderr=out,
        preexec_fn=killed_with_parent(),
    )

    def handle(number: int, frame: Any) -> None:
        if variables.get(SUBMITTED) in FORWARDING:
            process.send_signal(number)

    for number in SIGNALS:
        signal.signal(number, handle)
    code = process.wait()
    return code if code >= 0 else 128 - code


class _Copying:
    """Context manager: copies a folder's files in a thread, and says where that fails.

    Args:
        more: called after each copy.
    """

    def __init__(self, mirror: Mirror, more: Callable[[], None] = lambda: None) -> None:
        self.mirror, self.more, self.failed = mirror, more, ""
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._work, name="copies", daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.ends.set()
        self.thread.join()

    def _work(self) -> None:
        until = 0.0
        while True:
            ends, began = self.ends.is_set(), time.monotonic()
            until = until or (began + PATIENCE_S if ends else 0.0)
            self._copy()
            if ends and (not self.failed or time.monotonic() > until):
                return
            pause = max(EVERY_S, 0.0 if ends else SHARE * (time.monotonic() - began))
            self.ends.wait(pause) if not ends else time.sleep(pause)

    def _copy(self) -> None:
        try:
            self.mirror.push()
            self.more()
        except Exception as error:  # each file system has exceptions of its own
            if (why := reason(error)) != self.failed:
                _say(f"files cannot be copied to {self.mirror.address}: {why}. It is tried again")
            self.failed = why
        else:
            self.failed = ""


def _say(sentence: str) -> None:
    print(f"ATTENTION: {sentence}", file=sys.stderr, flush=True)


def keep_job(how: str, folder: Path, address: str) -> None:
    """Copy the files of a batch script (``job``, ``once``), or fetch them (``begin``).

    Raises:
        UserError: the address cannot be reached.
    """
    mirror = Mirror(folder, f"{address}/{RUN}/{JOB}")
    if how == "begin":
        return _fetch(mirror)
    hosts, own = Copies(address, folder), f"{JOB}/{ENGINE}/"
    for number in SIGNALS:  # Slurm sends SIGTERM to all processes when it takes the hosts away
        signal.signal(number, lambda number, frame: None)
    with _Copying(mirror, lambda: hosts.bring(False, lambda path: path.startswith(own) and path != f"{own}{LEAVE}")):
        while how == "job" and not (folder / OVER).exists():
            time.sleep(POLL_S)
    return None


def main(arguments: Sequence[str]) -> int:
    """See the module's text; returns the exit code."""
    asked = Carried.of(os.environ.get(CARRIED, ""))
    try:
        if arguments:
            how, folder = arguments
            keep_job(how, Path(folder), asked.copies)
            return 0
        return run(asked, os.environ)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
