"""Fetches checkpoints of this run (``checkpoint.to``) or another (``resume=s3://...``) before a run resumes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint import durable_folder, store
from trainer.checkpoint.best_weights import put_back
from trainer.checkpoint.remote import Remote, Retired, Unreachable, address_of, is_address, named
from trainer.checkpoint.store import CHECKPOINTS
from trainer.config.run_config import RunConfig
from trainer.data.prepared import locked
from trainer.errors import UserError
from trainer.host.cache import cache_root
from trainer.host.engine_tasks import COPIES
from trainer.planning.find_checkpoint import AUTO, FRESH, instead, own
from trainer.planning.plan import Plan
from trainer.run_folder.reset_files import CARRIED
from trainer.terminal.status import read_status
from trainer.wording import quoted

Say = Callable[[str], None]


def fetched(config: RunConfig, plan: Plan, say: Say) -> RunConfig:
    """Return the config with ``resume`` naming a local folder; fetches the checkpoint from its address if need be.

    Raises:
        UserError: an address cannot be reached or written to.
    """
    path, each = config.resume.path, COPIES in os.environ  # each host has a folder of its own
    if config.mode != "train" or (plan.topology.node_rank and not each):
        return config
    remote, run_dir = _copies(config, plan), Path(plan.paths.run_dir)
    if remote is not None and not config.plan and not plan.topology.node_rank:
        remote.try_writing()
    if path is not None and is_address(path):
        return config.changed(resume={"path": str(_into_cache(path, say))})
    if remote is not None and path == AUTO and _fetch_newer(remote, run_dir, plan, config, say):
        return config.changed(resume={"path": FRESH})
    return config


def check_copies(config: RunConfig, plan: Plan, source: Path | None) -> None:
    """Refuse to give up copies of another run in a folder of the same name, as :func:`check_nothing_lost` does here.

    Raises:
        UserError: ``checkpoint.to`` holds checkpoints that this run does not continue.
    """
    path, run_dir = config.resume.path, Path(plan.paths.run_dir)
    if config.mode != "train" or plan.topology.node_rank or path == FRESH or (remote := _copies(config, plan)) is None:
        return
    if (source is not None and own(source, run_dir) is not None) or (path == AUTO and config.plan):
        return
    if path != AUTO:
        if read_status(run_dir).get("state") != "done":
            check_no_copies(config, remote, run_dir)
        return
    if found := remote.found():
        why = f"none of the copies at {remote.address} could be fetched; the newest is {found[0]}"
        raise UserError(
            "resume=auto", why, "the same command when they can be read, or resume=fresh to write over them"
        )


def check_no_copies(config: RunConfig, remote: Remote, run_dir: Path) -> None:
    """Refuse to give up copies of a run that could go on.

    Raises:
        UserError: there are some.
    """
    if found := remote.found():
        why = f"{remote.address} holds checkpoints of a run in a folder of that name; the newest is {found[0]}"
        raise UserError(f"hydra.run.dir={run_dir}", why, instead(config))


def _copies(config: RunConfig, plan: Plan) -> Remote | None:
    to = config.checkpoint.to
    return None if to is None else Remote(address_of(to, Path(plan.paths.run_dir), plan.paths.whole_path))


def _into_cache(address: str, say: Say) -> Path:
    """Fetch a checkpoint of another run, with its run's files, into the user's cache, unless the cache has it.

    One command fetches at a time; the others wait for it.
    """
    remote, step = named(address)
    source = cache_root() / "fetched" / hashlib.blake2b(f"{remote.address}/{step}".encode(), digest_size=8).hexdigest()
    checkpoints = source / CHECKPOINTS
    marker = checkpoints / step / durable_folder.MARKER

    def is_there() -> bool:
        return marker.is_file() and marker.read_bytes() == remote.marker(step)

    if is_there():
        return checkpoints / step
    with locked(source, lambda: say(f"waits for another command, which fetches from {remote.address}")):
        if not is_there():
            say(f"fetches {remote.address}/{step} ({remote.size(step) / 1e6:.1f} MB)")
            remote.fetch_run(step, source, CARRIED)
            remote.fetch(step, checkpoints)  # last, because ``is_there`` checks its marker
    return checkpoints / step


def _fetch_newer(remote: Remote, run_dir: Path, plan: Plan, config: RunConfig, say: Say) -> bool:
    """Fetch the newest copy that is whole, if it is newer than the newest whole checkpoint in the run's folder.

    Returns:
        Whether the plan must be that of a new run: ``plan=true`` fetches nothing, and no checkpoint is here.

    Raises:
        UserError: copies cannot be reached, or belong to the folder's other name.
    """
    here, found = store.newest_whole(run_dir / CHECKPOINTS, say), remote.found()
    if not (newer := [step for step in found if _is_newer(step, here)]):
        if here is None:
            _check_other_name(config, plan)
            say(f"resume=auto: there is no checkpoint at {remote.address}")
        return False
    place = f"{remote.address}/{newer[0]}"
    if config.plan:
        say(f"resume=auto: {place} is newer than what is here and would be fetched first; this plan is made without it")
        return here is None
    if plan.topology.nnodes > 1 and COPIES not in os.environ:
        raise UserError(
            "resume=auto",
            f"{place} is newer than what is here, and several hosts have to see it",
            f"python -m trainer.checkpoints fetch {quoted(remote.address)} {quoted(str(run_dir))}",
        )
    from trainer.job.claim_folder import alone

    durable_folder.make_folder(run_dir)
    names: Sequence[str] = CARRIED
    if COPIES in os.environ:  # what host 0 has copied since, is here
        names = () if plan.topology.node_rank else tuple(name for name in CARRIED if not (run_dir / name).exists())
    with alone(run_dir, say):
        _bring_newest(remote, newer, run_dir, say, names)
    return False


def _is_newer(step: str, here: Path | None) -> bool:
    return here is None or store.step_of(step) > store.step_of(here.name)


def _bring_newest(remote: Remote, steps: Sequence[str], run_dir: Path, say: Say, names: Sequence[str]) -> None:
    """Fetch the newest whole copy, unless another command has fetched it meanwhile.

    Args:
        steps: the newest first. names: as of :func:`bring`.

    Raises:
        Unreachable: the address fails. Retired: a run on another machine has removed one.
    """
    here = store.newest_whole(run_dir / CHECKPOINTS, say)
    for step in steps:
        if not _is_newer(step, here):
            return
        place = f"{remote.address}/{step}"
        try:
            say(f"fetches {place} ({remote.size(step) / 1e6:.1f} MB)")
            bring(remote, step, run_dir, names)
            return
        except (Unreachable, Retired):
            raise  # a run from an older copy would give up this one, which may be readable later
        except UserError as error:
            say(f"passed over: {place}: {error.what}: {error.why}")
    with contextlib.suppress(OSError):
        (run_dir / CHECKPOINTS).rmdir()  # where it was made for what could not be fetched


def _check_other_name(config: RunConfig, plan: Plan) -> None:
    """Refuse if copies exist under the folder's other name: its whole path, or the path from here."""
    run_dir = Path(plan.paths.run_dir)
    local, other = (
        Remote(address_of(str(config.checkpoint.to), run_dir, whole))
        for whole in (plan.paths.whole_path, not plan.paths.whole_path)
    )
    if local.address != other.address and (found := other.found()):
        why = (
            f"there is no copy at {local.address}, and {found[0]} is at {other.address}: hydra.run.dir was typed "
            f"in another way"
        )
        raise UserError(
            "resume=auto",
            why,
            (
                f"python -m trainer.checkpoints fetch {quoted(other.address)} "
                f"{quoted(str(run_dir))} first, or resume=fresh"
            ),
        )


def bring(remote: Remote, step: str, run_dir: Path, names: Sequence[str] = CARRIED) -> Path:
    """Fetch a checkpoint with its run's files into a run folder that the caller has locked; returns its folder.

    Args:
        names: of the run's files.

    Raises:
        UserError: it is damaged, or the address cannot be reached.
    """
    folder = remote.fetch(step, run_dir / CHECKPOINTS)
    remote.fetch_run(step, run_dir, names)
    if (folder / store.BEST).is_file():
        put_back(run_dir, folder, lambda line: None)
    return folder
