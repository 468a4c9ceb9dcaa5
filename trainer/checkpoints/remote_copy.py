"""Checkpoints at a remote address (``s3://...``): list those of a run, and fetch one into a local folder."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.remote import Remote, is_address, named, nothing_at
from trainer.checkpoints.show import cells, size, table_of
from trainer.errors import UserError
from trainer.job.fetching import bring
from trainer.run_folder.hold import Hold
from trainer.terminal.screen import Screen


def here(path: str) -> Path:
    """Return a checkpoint's path as a local one; refuse a remote address.

    Raises:
        UserError: it is an address.
    """
    if is_address(path):
        raise UserError(path, "it is not on this machine", f"python -m trainer.checkpoints fetch {path} FOLDER")
    return Path(path)


def listed(address: str) -> int:
    """Print a table of the checkpoints at a run's remote address, one line each. Returns exit code 0."""
    remote = Remote(address.rstrip("/"))
    if not (found := remote.found()):
        raise nothing_at(address)
    table = table_of("step", "epoch", "metric", "value", "size")
    for name in found:
        table.add_row(*cells(remote.about(name)), size(remote.size(name)))
    screen = Screen()
    screen.print(remote.address)
    screen.print(table)
    return 0


def fetched(address: str, run_dir: Path) -> int:
    """Fetch a checkpoint from its remote address, with its run's files, into a local run folder. Returns exit code 0.

    Raises:
        UserError: there is none, or a run still works in that folder.
    """
    remote, step = named(address)
    run_dir = run_dir.expanduser().absolute()
    hold = Hold(run_dir)
    try:
        if not hold.take():
            raise UserError(str(run_dir), "processes of a run still work in this folder", "another folder")
        screen = Screen()
        screen.print(f"fetches {remote.address}/{step} ({size(remote.size(step))})", soft_wrap=True)
        screen.print(str(bring(remote, step, run_dir)), soft_wrap=True)
    finally:
        hold.leave()
    return 0
