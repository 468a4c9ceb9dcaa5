"""The files of a job whose hosts share no disk (``launch.shared_storage=false``), at the address ``checkpoint.to``.

ADDRESS/RUN/run/HOST/...   the run's folder on that host, without checkpoints; the number of the host, and
                           ``server-N`` for the pod of a parameter server
ADDRESS/RUN/run/job/...    files of the batch script, and of the command that follows the job
ADDRESS/RUN/step-N/...     checkpoints (:mod:`trainer.checkpoint.remote`)

A host copies what has changed there (:class:`Mirror`). The command that follows the job brings the files into its own
folder of the run (:class:`Copies`), where the engine's handle finds them as on a shared disk. A growing log is brought
piece by piece.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.remote import LOCAL, Remote, file_system, reason
from trainer.host.engine_tasks import ENGINE
from trainer.host.files import PRIVATE, is_part, replacing
from trainer.launch.engines.contract import ENDED, Handle, Job, State
from trainer.launch.engines.engine_folder import LEAVE, LOG

RUN, JOB = "run", "job"
FIRST = "0"
"""The host whose files count where several hosts have one of the same name."""
STAYS = re.compile(r"checkpoints/(latest|(aside-)?step-.*)|(.*/)?\.lock|.*\.(partial|previous|tmp)(/.*)?")
"""What is not copied here: checkpoints, which ``checkpoint.to`` copies, locks, and what is not whole."""
BRING_S = 2.0
"""Least time between two questions to the address."""
PATIENCE_S = 60.0
"""So long the last files are tried again."""


@dataclass(frozen=True)
class Carried:
    """What one host gets of the command, in a variable.

    Attributes:
        words, copies, config: as those of :class:`Job`.
        started_in, folder: the working folder, and the run's, where the command was typed. started_in '': the host's.
        sweep: the address of the sweep's copies.
    """

    words: tuple[str, ...]
    copies: str
    config: str
    started_in: str
    folder: str
    sweep: str = ""

    def text(self) -> str:
        """As JSON; :meth:`of` reads it."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Carried:
        """Read what :meth:`text` has written."""
        return Carried(**json.loads(text))


def carried(job: Job) -> list[Carried]:
    """What the hosts of a job get; of a sweep those of each of its jobs."""
    sweep = job.copies if job.points else ""
    return [
        Carried(tuple(one.words), one.copies, job.config, job.started_in, str(one.folder), sweep)
        for one in job.points or (job,)
    ]


class Mirror:
    """A folder, and its copy at an address.

    Raises:
        UserError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address
        self.files, self.root = file_system(address, f"checkpoint.to={address}", auto_mkdir=True)
        self.local = address.partition("://")[0] in LOCAL
        self.known: dict[str, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Copy what is at the address into the folder. Any error of the file system is raised."""
        for name in listed(self.files, self.root):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, PRIVATE) as part:
                self.files.get_file(f"{self.root}/{name}", str(part))
            self.known[name] = _stamp(path)

    def push(self) -> None:
        """Copy the files that have changed since the last call, and remove copies of those that are gone. Any error of
        the file system is raised, and one where the folder is gone."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is gone")
        found = dict(self._found())
        for name in self.known.keys() - found.keys():
            self.files.rm_file(f"{self.root}/{name}")
            del self.known[name]
        for name, stamp in found.items():
            if self.known.get(name) != stamp:
                self._put(self.folder / name, f"{self.root}/{name}")
                self.known[name] = stamp

    def left(self) -> list[str]:
        """The files that have changed since the last copy."""
        return sorted(name for name, stamp in self._found() if self.known.get(name) != stamp)

    def _put(self, path: Path, place: str) -> None:
        if not self.local:  # a store of objects shows the old or the new one
            self.files.put_file(str(path), place)
            return
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(place), PRIVATE) as part:
            self.files.put_file(str(path), str(part))

    def _found(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if not (STAYS.fullmatch(name) or is_part(path) or path.is_symlink()) and path.is_file():
                yield name, _stamp(path)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def listed(files: Any, root: str) -> dict[str, Any]:
    """The files below a path, by their names there, with what the file system says of them; {}: there are none."""
    try:
        found = files.find(root, detail=True)
    except FileNotFoundError:
        return {}
    names = {path[len(root) :].lstrip("/"): info for path, info in found.items()}
    return {name: info for name, info in names.items() if name and not is_part(name)}


class Copies:
    """The files of all hosts of a run at its address, and a folder on this machine into which they are brought.

    Raises:
        UserError: as of :class:`Mirror`.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.files, self.root = file_system(f"{address}/{RUN}", f"checkpoint.to={address}", auto_mkdir=True)
        self.seen: dict[str, str] = {}

    def begin(self) -> None:
        """Try to write to the address, and remove what an engine has left there of an earlier job.

        Raises:
            UserError: it cannot be written.
        """
        Remote(self.address).try_writing()
        for path in listed(self.files, self.root):
            if Path(path).parts[1:2] == (ENGINE,):
                self.files.rm_file(f"{self.root}/{path}")

    def state(self) -> str:
        """The state of the run in host 0's status file, such as ``done``; '': there is none."""
        try:
            return str(json.loads(self.files.cat_file(f"{self.root}/{FIRST}/status.json"))["state"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def give(self, name: str) -> None:
        """Copy a file of the folder to the address, for all hosts. Any error of the file system is raised."""
        if (path := self.folder / name).is_file():
            self.files.put_file(str(path), f"{self.root}/{JOB}/{name}")

    def leave(self) -> None:
        """Say to the batch script that the job is not to come again."""
        self.files.pipe_file(f"{self.root}/{JOB}/{ENGINE}/{LEAVE}", b"")

    def bring(self, whole: bool, without: Callable[[str], bool] = lambda path: False) -> None:
        """Copy what has changed into the folder. Any error of the file system is raised.

        Args:
            whole: all files; otherwise those of the engine alone.
            without: paths such as ``HOST/engine/log`` that are left out.
        """
        found = listed(self.files, self.root)
        for path in sorted(found, key=lambda path: (path.partition("/")[0] in (FIRST, JOB), path)):
            name = path.partition("/")[2]
            of_engine = name.startswith(f"{ENGINE}/")
            if (stamp := str(found[path])) == self.seen.get(path) or not (whole or of_engine) or without(path):
                continue
            place = self.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if of_engine and name.endswith(LOG) and path in self.seen and place.is_file():
                with place.open("ab") as log:
                    log.write(self.files.cat_file(f"{self.root}/{path}", start=place.stat().st_size))
            else:
                with replacing(place) as part:
                    self.files.get_file(f"{self.root}/{path}", str(part))
            self.seen[path] = stamp


class Away(Handle):
    """A job whose hosts share no disk with this machine: its files are brought here before each question about it.

    Args:
        handle: reads them as on a shared disk. places: of the run; of a sweep, those of all its runs.
    """

    def __init__(self, handle: Handle, places: Sequence[Copies], say: Callable[[str], None]) -> None:
        self.handle, self.places, self.say = handle, places, say
        self.name, self.cancels, self.log = handle.name, handle.cancels, handle.log
        self.held = handle.held
        self.brought_at, self.failed = -BRING_S, ""

    def state(self) -> State:
        if time.monotonic() - self.brought_at >= BRING_S:
            self._bring(whole=False)
            self.brought_at = time.monotonic()
        if (state := self.handle.state()).phase != ENDED:
            return state
        until = time.monotonic() + PATIENCE_S
        while not self._bring(whole=True) and time.monotonic() < until:
            time.sleep(BRING_S)
        for place in (place for place in self.places if not place.seen):
            lines = f". Their lines: {self.handle.early}" if self.handle.early else ""
            self.say(f"ATTENTION: nothing has come to {place.address} from the hosts{lines}")
        return self.handle.state()

    def _bring(self, whole: bool) -> bool:
        try:
            for place in self.places:
                place.bring(whole)
        except Exception as error:  # each file system has exceptions of its own
            if (why := reason(error)) != self.failed:
                self.say(f"ATTENTION: files of the hosts cannot be read from {place.address}: {why}")
            self.failed = why
            return False
        self.failed = ""
        return True

    def lines(self) -> Iterator[str]:
        return self.handle.lines()

    def signal(self, number: int) -> None:
        self._leave()
        self.handle.signal(number)

    def cancel(self) -> None:
        self._leave()
        self.handle.cancel()

    def release(self) -> None:
        self.handle.release()
        self.held = False

    def hurry(self) -> None:
        self.handle.hurry()

    def end_is_shown(self) -> None:
        self.handle.end_is_shown()

    def _leave(self) -> None:
        try:
            for place in self.places:
                place.leave()
        except Exception as error:  # each file system has exceptions of its own
            self.say(f"ATTENTION: {place.address} cannot be written: {reason(error)}. The job may come again")
