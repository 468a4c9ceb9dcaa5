"""Copies of a run's checkpoints at an address of fsspec (``s3://bucket/runs``, ``file:///backup``).

ADDRESS/RUN/step-000000120/         the files of the checkpoint, COMPLETE of them last
ADDRESS/RUN/step-000000120/run/     the small files of the run's folder at that time
ADDRESS/RUN/step-000000120/ASIDE    this copy is of a training that was given up
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from trainer.checkpoint import durable_folder, store
from trainer.errors import UserError, first_line, why
from trainer.host import json_text
from trainer.host.files import PRIVATE

ASIDE = "ASIDE"
OF_RUN = "run"
PACKAGES = {"s3": "pip install 'trainer[s3]'", "s3a": "pip install 'trainer[s3]'"}
"""What brings the package of a protocol."""
USAGE = "s3://BUCKET/FOLDER or file:///FOLDER"
LOCAL = ("file", "local")


def is_address(path: str) -> bool:
    """Whether this names a place as fsspec does, and not a folder of this machine."""
    return "://" in path


def address_of(to: str, run_dir: Path, whole: bool) -> str:
    """Where the copies of a run's checkpoints are.

    Args:
        whole: by the whole path of its folder, as the user has named it; else by the path from the working directory.

    Raises:
        UserError: there is no such place.
    """
    here = Path.cwd()
    whole = whole or not run_dir.is_relative_to(here)
    name = run_dir.relative_to(run_dir.anchor if whole else here)
    scheme, place = _parts(to)
    return f"{scheme}://{place}/{name.as_posix()}"


def _parts(address: str) -> tuple[str, str]:
    """Scheme and place.

    Raises:
        UserError: it names no place.
    """
    scheme, _, place = address.partition("://")
    if not place.strip("/"):
        raise UserError(f"checkpoint.to={address}", "it names no bucket and no folder", USAGE)
    return scheme, place.rstrip("/")


class Unreachable(UserError):
    """The error for an address that fails for now; what is there may be whole."""


class Retired(UserError):
    """The error for a copy that was found, and that the run which wrote it has removed since."""

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
        UserError: there is no such protocol, or its package is not installed.
    """

    def __init__(self, address: str) -> None:
        import fsspec

        protocol, _ = _parts(address)
        self.local = protocol in LOCAL
        options = {"auto_mkdir": True} if self.local else {}
        self.address = address
        try:
            self.files, self.root = fsspec.core.url_to_fs(address, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise UserError(f"checkpoint.to={address}", first_line(error), PACKAGES.get(protocol, USAGE)) from error

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
        """The content of a checkpoint's COMPLETE, which tells each file's checksum; empty: there is none."""
        with self._errors_explained():
            try:
                return bytes(self.files.cat_file(self._at(name, durable_folder.MARKER)))
            except FileNotFoundError:
                return b""

    def about(self, name: str) -> store.About:
        """What a checkpoint's ``checkpoint.json`` tells.

        Raises:
            UserError: it cannot be read; Retired: it is gone.
        """
        with self._errors_explained(name):
            text = self.files.cat_file(self._at(name, store.ABOUT))
        return store.parse_about(text, f"{self.address}/{name}/{store.ABOUT}")

    def size(self, name: str) -> int:
        """Bytes of a checkpoint's own files.

        Raises:
            UserError: its COMPLETE cannot be read; Retired: it is gone.
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
        """Copy a whole checkpoint there; what is there of that name is replaced.

        Args:
            names: of the files of the run's folder that go with it, those that are there.
            moves: called now and then while bytes go there.

        Raises:
            Exception: whatever the file system raises; the copy then is none.
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
        """Where a copy goes; in a folder of this machine its file is there already, for its owner's eyes alone."""
        place = self._at(*names)
        return _made(Path(place)) if self.local else place

    def fetch(self, step: str, checkpoints: Path) -> Path:
        """Copy a checkpoint from there to its place among a run's checkpoints.

        Raises:
            UserError: it is damaged, or the address cannot be reached; Retired: it is gone.
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
        """Copy the files of the run's folder that went with a checkpoint, those that are there.

        Raises:
            UserError: the address cannot be reached.
        """
        for name in names:
            with self._errors_explained(), contextlib.suppress(FileNotFoundError):
                content = bytes(self.files.cat_file(self._at(step, OF_RUN, name)))
                durable_folder.make_folder((run_dir / name).parent)
                durable_folder.durable(run_dir / name, partial(Path.write_bytes, data=content))

    def set_aside(self, name: str) -> None:
        """A checkpoint of a training that is given up is no longer found."""
        with self._errors_explained():
            self.files.pipe_file(self._at(name, ASIDE), b"")

    def remove(self, name: str) -> None:
        """Remove a checkpoint; what is there of it, should the removal stop in between, is none."""
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self._at(name, durable_folder.MARKER))
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(self._at(name), recursive=True)

    def try_writing(self) -> None:
        """Write and remove a small file, which no other run that tries it has.

        Raises:
            UserError: that cannot be done.
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
        """What the file system raises is told as a UserError: each has exceptions of its own.

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
    """An empty file, into which a copy is written, for its owner's eyes alone as what is copied. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.touch(PRIVATE)
    return str(path)


def reason(error: BaseException) -> str:
    """Why a remote folder for checkpoints cannot be used, in one line."""
    if isinstance(error, UserError):
        return f"{error.what}: {error.why}"
    said = first_line(error)
    return said if said.startswith(type(error).__name__) else f"{type(error).__name__}: {said}"


def named(address: str) -> tuple[Remote, str]:
    """The :class:`Remote` of a run's copied checkpoints and the name of one: of the newest where the address is the
    run's.

    Raises:
        UserError: there is none.
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
