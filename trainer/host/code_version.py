"""The version of the code that a run is made of: a fingerprint of this package, and git's of the working folder."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from trainer.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
ASK_S = 5.0
"""Longest wait for git."""
SHOWN = 12
"""Digits of a commit."""


def own_sources() -> str:
    """A fingerprint of this package's own Python files, as they are now."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def code_version(started_in: str) -> str:
    """Describe the code of a run, such as ``trainer 0.1.0 (1f0c52a7d9e8b003), flowers at 5d21c0a7d9e8 with changes
    5c0d21``: equal texts are equal code, as far as git knows of the folder. One that is no checkout is not in it.

    Args:
        started_in: the run's working folder, which may hold the user's own classes.
    """
    found = f"trainer {__version__} ({own_sources()})"
    if len(place := _git(started_in, "rev-parse", "--show-toplevel", "HEAD").splitlines()) == 2:
        top, commit = place
        found += f", {Path(top).name} at {commit[:SHOWN]}{_changes(top)}"
    return found


def commit_of(folder: str) -> tuple[str, bool] | None:
    """Return the git commit of a folder, and whether anything has changed since; None: it is no checkout."""
    if not (commit := _git(folder, "rev-parse", "HEAD").strip()):
        return None
    return commit, bool(_git(folder, "status", "--porcelain").strip())


def _changes(top: str) -> str:
    """Changes since the commit: of files that git has, and Python files that it does not have yet."""
    text = _git(top, "diff", "HEAD")
    for name in filter(None, _git(top, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py").split("\0")):
        try:
            text += name + Path(top, name).read_text(errors="replace")
        except OSError:  # gone meanwhile
            continue
    return f" with changes {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:6]}" if text else ""


def _git(folder: str, *words: str) -> str:
    try:
        done = subprocess.run(  # the user's own git; no shell  # nosec B603 B607
            ["git", "-C", folder, *words], capture_output=True, text=True, errors="replace", timeout=ASK_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
