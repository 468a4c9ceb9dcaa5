"""Copies of a run's checkpoints at an address of fsspec (``s3://bucket/runs``, ``file:///backup``).

ADDRESS/RUN/step-000000120/         the files of the checkpoint; COMPLETE is written last
ADDRESS/RUN/step-000000120/run/     the small files of the run's folder at that time
ADDRESS/RUN/step-000000120/ASIDE    marks a copy that was given up
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer.checkpoint import durable_folder, store
from trainer.errors import UserError, first_line, why
from trainer.host import json_text
from trainer.host.engine_tasks import COPIES
from trainer.host.files import PRIVATE

ASIDE = "ASIDE"
OF_RUN = "run"
PACKAGES = {
    "s3": "pip install 'trainer[s3]'",
    "s3a": "pip install 'trainer[s3]'",
    "gs": "pip install 'trainer[gs]'",
    "gcs": "pip install 'trainer[gs]'",
}
"""Commands that install the package of a protocol."""
USAGE = "s3://BUCKET/FOLDER or file:///FOLDER"
LOCAL = ("file", "local")


def is_address(path: str) -> bool:
    """Whether a path is an address of fsspec, and no folder of this machine."""
    return "://" in path


def address_of(to: str, run_dir: Path, whole: bool) -> str:
    """The address of the copies of a run's checkpoints.

    On a host that shares no disk with the others the folder is the host's own, and the job says the address.

    Args:
        whole: name the run by the absolute path of its folder; otherwise by its path from the working directory.

    Raises:
        UserError: ``to`` names no bucket or folder.
    """
    if of_job := os.environ.get(COPIES):
        return of_job
    here = Path.cwd()
    whole = whole or not run_dir.is_relative_to(here)
    name = run_dir.relative_to(run_dir.anchor if whole else here)
    scheme, place = _parts(to)
    return f"{scheme}://{place}/{name.as_posix()}"


def file_system(address: str, what: str, auto_mkdir: bool = False) -> tuple[Any, str]:
    """The file system of an address, and the path in it.

    Args:
        what: the key and its value, for a refusal.

    Raises:
        UserError: there is no such protocol, or its package is not installed.
    """
    import fsspec

    protocol = address.partition("://")[0]
    options = {"auto_mkdir": True} if auto_mkdir and protocol in LOCAL else {}
    try:
        files, root = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
    except (ImportError, ValueError) as error:
        raise UserError(what, first_line(error), PACKAGES.get(protocol, USAGE)) from error
    return files, str(root)


def _parts(address: str) -> tuple[str, str]:
    """Scheme and place of an address.

    Raises:
        UserError: the address names no bucket or folder.
    """
    scheme, _, place = address.partition("://")
    if not place.strip("/"):
        raise UserError(f"checkpoint.to={address}", "it names no bucket and no folder", USAGE)
    return scheme, place.rstrip("/")


class Unreachable(UserError):
    """The error for an address that does not answer now; its checkpoints may be whole."""


class Retired(UserError):
    """The error for a copy that its run has removed since it was found."""

    def __init__(self, place: str) -> None:
        super().__init__(
            place,
            "the run that wrote this copy has removed it since it was found",
            "the same command once more, or the run's newest one",
        )


class Remote:
    """The checkpoints at an address.

    Args:
        address: the folder of a run's copies.

    Raises:
        UserError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, address: str) -> None:
        protocol, _ = _parts(address)
        self.local = protocol in LOCAL
        self.address = address
        self.files, self.root = file_system(address, f"checkpoint.to={address}", auto_mkdir=True)

    def found(self) -> list[str]:
        """Names of the whole checkpoints, the newest first.

        Raises:
            UserError: the address cannot be reached.
        """
        with self._errors_explained():
            names = [path.rsplit("/", 1)[-1] for path in self._below("")]
            steps = [name for name in names if store.NAME.fullmatch(name)]
            return sorted(filter(self._is_whole, steps), key=store.step_of, reverse=True)

    def _is_whole(self, name: str) -> bool:
        files = {path.rsplit("/", 1)[-1] for path in self._below(name)}
        return durable_folder.MARKER in files and ASIDE not in files

    def marker(self, name: str) -> bytes:
        """The content of a checkpoint's COMPLETE, with the seal of each file; empty: there is none."""
        with self._errors_explained():
            try:
                return bytes(self.files.cat_file(self._at(name, durable_folder.MARKER)))
            except FileNotFoundError:
                return b""

    def about(self, name: str) -> store.About:
        """Read a checkpoint's ``checkpoint.json``.

        Raises:
            UserError: it cannot be read. Retired: the copy is gone.
        """
        with self._errors_explained(name):
            text = self.files.cat_file(self._at(name, store.ABOUT))
        return store.parse_about(text, f"{self.address}/{name}/{store.ABOUT}")

    def size(self, name: str) -> int:
        """Bytes of a checkpoint's own files.

        Raises:
            UserError: its COMPLETE cannot be read. Retired: the copy is gone.
        """
        if not (marker := self.marker(name)):
            raise Retired(f"{self.address}/{name}")
        try:
            return sum(int(seal.get("bytes", 0)) for seal in json_text.loads(marker).get("files", {}).values())
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.address}/{name}/{durable_folder.MARKER}", f"it cannot be read ({why(error)})"
            ) from error

    def put(self, folder: Path, run_dir: Path, names: Sequence[str], moves: Callable[[], None] = lambda: None) -> None:
        """Copy a whole checkpoint to the address; a copy of that name is replaced.

        Args:
            names: files of the run's folder that are copied as well, if they exist.
            moves: called while bytes are sent.

        Raises:
            Exception: any error of the file system; then there is no copy.
        """
        from fsspec import Callback

        step, progress = folder.name, Callback(hooks={"moves": lambda *_, **__: moves()})
        self.remove(step)
        for name in names:
            if (run_dir / name).is_file():
                self.files.put_file(str(run_dir / name), self._private(step, OF_RUN, name), callback=progress)
        for file in (*durable_folder.files(folder, store.FORMAT), durable_folder.MARKER):
            self.files.put_file(str(folder / file), self._private(step, file), callback=progress)
            moves()

    def _private(self, *names: str) -> str:
        """The place of a copy; on this machine an empty file that only its owner can read is made first."""
        place = self._at(*names)
        return _made(Path(place)) if self.local else place

    def fetch(self, step: str, checkpoints: Path) -> Path:
        """Copy a checkpoint from the address into a run's folder of checkpoints.

        Raises:
            UserError: it is damaged, or the address cannot be reached. Retired: the copy is gone.
        """
        folder = checkpoints / step
        unfinished = durable_folder.partial_of(durable_folder.begin(folder))
        durable_folder.make_folder(unfinished)
        try:
            with self._errors_explained(step):
                self.files.get_file(self._at(step, durable_folder.MARKER), _made(unfinished / durable_folder.MARKER))
                for file in durable_folder.files(unfinished, store.FORMAT):
                    self.files.get_file(self._at(step, file), _made(unfinished / file))
            durable_folder.whole(unfinished, store.FORMAT)
        except UserError:
            durable_folder.begin(folder)
            raise
        for path in unfinished.iterdir():
            durable_folder.sync(path)
        durable_folder.put_in_place(unfinished, folder)
        return store.check(folder, verify=False)

    def fetch_run(self, step: str, run_dir: Path, names: Sequence[str]) -> None:
        """Copy the files of the run's folder that were copied with a checkpoint.

        Raises:
            UserError: the address cannot be reached.
        """
        for name in names:
            with self._errors_explained(), contextlib.suppress(FileNotFoundError):
                content = bytes(self.files.cat_file(self._at(step, OF_RUN, name)))
                durable_folder.make_folder((run_dir / name).parent)
                durable_folder.durable(run_dir / name, partial(Path.write_bytes, data=content))

    def set_aside(self, name: str) -> None:
        """Mark a checkpoint as given up, so that it is no longer found."""
        with self._errors_explained():
            self.files.pipe_file(self._at(name, ASIDE), b"")

    def remove(self, name: str) -> None:
        """Remove a checkpoint. COMPLETE goes first, so that an interrupted removal leaves no checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self._at(name, durable_folder.MARKER))
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(self._at(name), recursive=True)

    def try_writing(self) -> None:
        """Write and remove a small file with a random name.

        Raises:
            UserError: the file cannot be written.
        """
        path = self._at(f".writable-{secrets.token_hex(8)}")
        with self._errors_explained():
            self.files.pipe_file(path, b"")
            self.files.rm_file(path)

    def _below(self, name: str) -> list[str]:
        try:
            return [str(path) for path in self.files.ls(self._at(name), detail=False)]
        except FileNotFoundError:
            return []

    def _at(self, *names: str) -> str:
        return "/".join(filter(None, (self.root, *names)))

    @contextlib.contextmanager
    def _errors_explained(self, step: str = "") -> Iterator[None]:
        """Context manager: any error of the file system becomes a UserError; each system has exceptions of its own.

        Args:
            step: the checkpoint that is read, which its run may remove meanwhile.
        """
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if step and isinstance(error, FileNotFoundError) and not self.marker(step):
                raise Retired(f"{self.address}/{step}") from error
            kind = UserError if isinstance(error, FileNotFoundError) else Unreachable
            raise kind(self.address, reason(error), "an address that can be reached with this account") from error


def _made(path: Path) -> str:
    """Make an empty file that only its owner can read, for a copy. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(PRIVATE)
    return str(path)


def reason(error: BaseException) -> str:
    """An error of a remote folder as one line."""
    if isinstance(error, UserError):
        return f"{error.what}: {error.why}"
    said = first_line(error)
    return said if said.startswith(type(error).__name__) else f"{type(error).__name__}: {said}"


def named(address: str) -> tuple[Remote, str]:
    """The :class:`Remote` of a run's copies, and the name of the checkpoint at an address; of a run's address, its
    newest one.

    Raises:
        UserError: there is no such checkpoint.
    """
    run, _, asked = address.rstrip("/").rpartition("/")
    if not store.NAME.fullmatch(asked):
        run, asked = address.rstrip("/"), ""
    remote = Remote(run)
    for name in remote.found():
        if asked in ("", name):
            return remote, name
    raise nothing_at(address)


def nothing_at(address: str) -> UserError:
    """The error for a remote address (``s3://...``) without a whole checkpoint."""
    return UserError(address, "there is no whole checkpoint", "the folder of a run there, as the run's plan tells it")
