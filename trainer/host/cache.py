"""The user's cache folder: where it is, and checks that no other user can put anything into it.

Data are read from folders that belong to this user, or to root, and that no other user can write. For compiled code,
which is loaded and run, this must hold for every folder above as well.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from trainer.errors import UserError
from trainer.wording import quoted

ROOT = 0
OTHERS = stat.S_IRWXG | stat.S_IRWXO
COMPILED = "compiled"


def cache_root() -> Path:
    """The trainer's cache folder, absolute: $TRAINER_CACHE, else $XDG_CACHE_HOME/trainer, else ~/.cache/trainer."""
    if own := os.environ.get("TRAINER_CACHE"):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "trainer"
    return Path.home() / ".cache" / "trainer"


def check_data(folder: Path) -> None:
    """Refuse a folder for data if another user can write to it, or to a folder of the cache above it.

    Raises:
        UserError: another user can write there.
    """
    root = cache_root()
    inside = folder.is_relative_to(root)
    above = [one for one in folder.parents if one.is_relative_to(root)] if inside else [folder.parent]
    _check([*reversed(above), folder], "prepared data")


def make(folder: Path) -> None:
    """Make a folder in the cache; new folders are for this user alone.

    Raises:
        UserError: another user can write there, or this user cannot.
    """
    check_data(folder)
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    try:
        for new in reversed(missing):
            new.mkdir(mode=0o700, exist_ok=True)
    except PermissionError as error:
        raise read_only(folder) from error
    check_data(folder)  # another process may have made it meanwhile


def read_only(folder: Path) -> UserError:
    """The error for a cache folder that cannot be made."""
    return UserError(
        f"the cache {folder}",
        "cannot be written by this user, and does not hold what is asked for",
        "TRAINER_CACHE=FOLDER of your own",
    )


def check_code() -> Path:
    """Return the folder for compiled code, without making it; refuse it if another user can write there.

    Raises:
        UserError: another user can write there.
    """
    folder = cache_root() / COMPILED
    real = folder.resolve()
    _check([*reversed(real.parents), real], "compiled code", every=True)
    return folder


def _check(folders: Iterable[Path], what: str, every: bool = False) -> None:
    """Check folders from the top down; below a private folder nothing needs to be checked."""
    for folder in folders:
        try:
            found = folder.stat()
        except (FileNotFoundError, NotADirectoryError):  # whoever makes it reports that
            return
        except PermissionError as error:
            raise UserError(
                f"the cache {folder}", "cannot be entered by this user", "TRAINER_CACHE=FOLDER of your own"
            ) from error
        own = found.st_uid == os.geteuid()
        mode = stat.S_IMODE(found.st_mode)
        if not own and found.st_uid != ROOT:
            raise UserError(
                f"the cache {folder}",
                f"belongs to another user ({_name(found.st_uid)}), who could put {what} of theirs there",
                "TRAINER_CACHE=FOLDER of your own",
            )
        if _others_write(found) and not mode & stat.S_ISVTX:
            instead = f"chmod go-w {quoted(str(folder))}" if own else "TRAINER_CACHE=FOLDER of your own"
            raise UserError(
                f"the cache {folder}",
                f"can be written by other users (mode {mode:04o}), who could put {what} of theirs there",
                instead,
            )
        if own and not mode & OTHERS and not every:
            return


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found.st_gid)


def _is_private_group(number: int) -> bool:
    """Whether a group has this user alone; many systems make such a group for each user, and let it write."""
    import grp
    import pwd

    try:
        group, me = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_gid == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


def _name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
