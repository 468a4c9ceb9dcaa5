"""Starts the plan's processes on this host (usually from a forkserver), watches them, and ends all when one fails.

States of a launch, in order; :func:`launch` moves from one to the next:

    scratch    a private temporary folder (pulses, notes, sockets) exists; the forkserver has imported the modules
    meeting    the board and torch's store are open; with several hosts, all have agreed on the run (``rendezvous``)
    started    each process is a ``StartedProcess`` in ``members``, with its log, its pulse and its life (random number)
    watched    the ``Supervisor`` polls; a signal is passed on by a note (``LEAVE``); ``ProcessRestarts`` replaces
    ended      results are returned, or the error is raised after the other hosts were told (``OtherHosts.end``)

A child of the forkserver goes through :func:`enter`: it ties its life to the launcher's (``end_with``), shares the lock
on the run's folder, opens the board, reports itself, and calls its role's entry.

What always holds: a process joins ``members`` as soon as it exists, and all ``members`` are killed on every way out, so
no process outlives ``launch``. The forkserver never becomes the parent of reading processes. Nothing but this process
and its children can write to the board.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.errors import BY_CTRL_C, AskedToLeave, Died, Interrupted, RunFailed
from trainer.host import files, private, pulse
from trainer.host.addresses import free_port, interface_of, interface_towards
from trainer.host.notes_board import FolderLost, NoNote, OwnBoard, SealedBoard
from trainer.host.parent_death import end_with
from trainer.host.patient_store import PatientStore
from trainer.host.signals import LEAVE, NUMBERS, Grace, StopRequest, requests, say_leaving, termination_raises
from trainer.launch.engine import Engine, Start
from trainer.launch.full_disk import FullDisk
from trainer.launch.hang import Hang
from trainer.launch.log_echo import LogEcho
from trainer.launch.meeting_place import MeetingPlace, open_store
from trainer.launch.other_hosts import OtherHosts
from trainer.launch.preload import start_forkserver, why_ended
from trainer.launch.process import Child, FailureReport, resolve
from trainer.launch.process_reports import ProcessReports, report_start
from trainer.launch.process_restarts import ProcessRestarts
from trainer.launch.rendezvous import Rendezvous, meet
from trainer.launch.silent_workers import SilentWorkers
from trainer.launch.started_process import Handle, Role, StartedProcess
from trainer.launch.supervisor import END_S, HostResults, Supervisor, end
from trainer.planning.launcher import Deaths
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.report import OWN
from trainer.strategies.lost_workers import new_life
from trainer.strategies.seat import Address, Life, Seat
from trainer.terminal import streams

LONGEST_FOLDER = 80
"""Bytes. The path of a Unix socket has 108 at most."""
GLOO = "GLOO_SOCKET_IFNAME"
LOG_NAMES = {"worker": "workerlog", "server": "serverlog"}


def launch(
    roles: Sequence[Role],
    payload: Any,
    log_dir: Path,
    rendezvous: Rendezvous,
    engine: Engine | None = None,
    verbosity: str = "normal",
    grace: Grace | None = None,
    hang_s: float | None = None,
    reports: ProcessReports | None = None,
    deaths: Deaths | None = None,
    restarts: bool = False,
) -> HostResults:
    """Start this host's processes of the plan, and watch them to their end. All processes have ended afterwards.

    Args:
        roles: the processes to start here.
        payload: handed to every entry; picklable.
        log_dir: folder of ``workerlog.N`` and ``serverlog.N``.
        rendezvous: where the processes of all hosts meet.
        engine: starts each process; None: a forkserver.
        verbosity: whose output is shown on the screen. ``quiet``: nobody's; ``normal``: worker 0's; ``workers``: also
            the lines of other workers' own values; ``debug``: everybody's.
        grace: with it, SIGTERM and SIGUSR1 ask the workers to save and end; None: these signals end all processes.
        hang_s: longest time without a sign of life of any worker; None: no limit.
        reports: collects the processes' reports into plan.json.
        deaths: counts the deaths of the run, and allows single processes to be restarted; None: none is restarted.
        restarts: all processes can be restarted together; then processes that others have missed count as dead.

    Raises:
        RunFailed: a process died that the others cannot do without; the message names it, its error and its log.
        AskedToLeave: SIGTERM or SIGUSR1 came here or on another host, and there was nothing new to save.
        Interrupted: SIGINT or SIGTERM came, and nothing could be saved, or saving took too long.
    """
    _place_sockets()
    scratch, members, shown = private.scratch("trainer-"), list[StartedProcess](), list[LogEcho]()
    here: list[Any] = []  # the board and its store; in a list, because the frames of an error would keep them open
    try:
        (engine := engine or Forked()).prepare(scratch)
        with termination_raises(grace.can_go_on if grace is not None else lambda: False):
            try:
                place = _place(rendezvous, scratch, here)
                starter = _Starter(engine, here, members, place, scratch, log_dir)
                for role in roles:
                    starter.start(role, payload, rendezvous)
                shown += _shown(members, verbosity, starter.kept)
                singly = deaths if engine.can_restart else None
                restarter = ProcessRestarts(singly, starter.starts, starter.begin, members, reports)
                with _asked_to_leave(grace, here) as request:
                    others, disk = OtherHosts(here, rendezvous, roles), FullDisk(log_dir, partial(print, flush=True))
                    results = _watched(members, here, others, scratch, hang_s, restarter, disk, restarts)
                    return replace(results, asked=request.name) if request else results
            except KeyboardInterrupt:
                raise Interrupted(BY_CTRL_C) from None
            finally:
                end([member.handle for member in members], END_S)
                for screen in shown:
                    screen.end()
                here.clear()
    finally:
        private.discard(scratch)


@contextmanager
def _asked_to_leave(grace: Grace | None, here: Sequence[Any]) -> Iterator[StopRequest | None]:
    """Context manager: the first SIGTERM or SIGUSR1 asks the workers to save and leave; yields the request.

    Raises:
        Interrupted: a process has died after the request.
    """
    if grace is None:
        yield None
        return

    def ask_workers(name: str) -> None:
        with suppress(NoNote):  # the launcher polls the board as well, and reports that host 0 is gone
            for board in here[:1]:
                board.clone().set(LEAVE, "")
            say_leaving(name, grace.seconds)

    with requests(grace.begun, grace.seconds, ask_workers) as request:
        try:
            yield request
        except Died as death:
            if not request:
                raise
            death.asked = request.name
            raise Interrupted(f"got {request.name}, and then {death}") from death
        except RunFailed as error:
            error.asked = request.name
            raise


def _watched(
    members: Sequence[StartedProcess],
    here: Sequence[Any],
    others: OtherHosts,
    scratch: Path,
    hang_s: float | None,
    restarter: ProcessRestarts,
    disk: FullDisk,
    restarts: bool,
) -> HostResults:
    """Watch the members until all are done on all hosts; returns their results.

    An error is announced to the other hosts before it is raised.

    Raises:
        RunFailed: as ``launch``; or host 0 cannot be reached.
    """
    pulses = {str(m): pulse.of(scratch, m.role.name, m.rank) for m in members}

    def poll() -> Mapping[int, str]:
        hang.poll()
        disk.poll()
        if restarter.reports is not None:
            restarter.reports.poll(here[0])
        return others.poll()

    supervisor = Supervisor(members, here, multiprocessing.connection.wait, poll=poll, restart=restarter.restart)
    elsewhere = _silent_workers(members, here, others.rendezvous)
    hang = Hang(supervisor.at_work, pulses, hang_s, elsewhere=elsewhere, unneeded=supervisor.unneeded)
    try:
        with hang.found_by_others(supervisor.running, restarts and others.rendezvous.hosts == 1):
            results = supervisor.watch()
        if restarter.reports is not None:
            restarter.reports.poll(here[0], now=True)
        others.leave(results.of)
        return results
    except FolderLost as error:
        raise RunFailed(str(error)) from error
    except NoNote as error:
        raise RunFailed(f"{others.rendezvous.name(0)} cannot be reached: {error}") from error
    except (RunFailed, Interrupted, KeyboardInterrupt) as error:
        if isinstance(error, Died):
            error.done = {name: pulse.read(path).update for name, path in pulses.items()}
            error.update = error.done.get(error.who, error.update)
        why = str(error) or BY_CTRL_C
        asked = isinstance(error, AskedToLeave)  # then all hosts leave, also those with nothing to save
        if supervisor.ends_all or asked or others.rendezvous.serves:  # no host can go on without host 0
            others.end(why, asked)
        else:
            others.lose([f"{m.role.name}/{m.rank}" for m in members if not m.handle.well], "its host has ended")
        raise


def _silent_workers(
    members: Sequence[StartedProcess], here: Sequence[Any], rendezvous: Rendezvous
) -> SilentWorkers | None:
    """The launchers' notes about silent workers; None: there is one host, or this host has no worker."""
    workers = [m for m in members if m.role.name == "worker"]
    if rendezvous.hosts == 1 or not workers:
        return None
    role = workers[0].role
    return SilentWorkers(
        here,
        role.size,
        [m.rank for m in workers],
        "" if rendezvous.labels else rendezvous.label(rendezvous.number),
        role.apart,
    )


def _shown(members: Sequence[StartedProcess], verbosity: str, kept: Mapping[Path, int]) -> list[LogEcho]:
    """Show logs on the screen, from this launch on; with more than worker 0's, each line names its process.

    Args:
        kept: the bytes that a log has from before.
    """
    if verbosity == "quiet":
        return []
    if verbosity == "debug":
        return [LogEcho(m.handle.log, f"{m} | ", kept.get(m.handle.log, 0)) for m in members]
    workers = [m for m in members if m.role.name == "worker" and (not m.rank or verbosity == "workers")]
    return [LogEcho(m.handle.log, since=kept.get(m.handle.log, 0), only=OWN if m.rank else "") for m in workers]


def _place_sockets() -> None:
    """Have multiprocessing make its folder of sockets now, in a folder whose path is short enough for sockets."""
    before, tempfile.tempdir = tempfile.tempdir, private.temporary_root()
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def _place(rendezvous: Rendezvous, scratch: Path, here: list[Any]) -> MeetingPlace:
    """Make the run's meeting place; ``here`` gets this process's board, and between hosts the store behind it."""
    if rendezvous.hosts == 1:
        place = MeetingPlace(secrets.token_bytes(32), folder=str(scratch))
        place.make()
        here.append(place.open()[0])
        return place
    store = rendezvous.store_opened or open_store(rendezvous)
    here.append(PatientStore(store, rendezvous.store, rendezvous.patience_s))
    place = MeetingPlace(
        meet(here[0], rendezvous),
        host=rendezvous.host,
        port=store.port,
        name=rendezvous.store,
        patience_s=rendezvous.patience_s,
    )
    here.insert(0, SealedBoard(here[0], place.secret))
    return place


class _Starter:
    """Starts the processes of this host, with one engine in one meeting place.

    Args:
        here: the run's board is its first value. members: each process joins at once, so that it is ended in any case.

    Attributes:
        starts: the :class:`Start` of each process, by name. kept: the bytes that each log has from earlier lives.
    """

    def __init__(
        self,
        engine: Engine,
        here: Sequence[Any],
        members: list[StartedProcess],
        place: MeetingPlace,
        scratch: Path,
        log_dir: Path,
    ) -> None:
        self.engine, self.here, self.members = engine, here, members
        self.place, self.scratch, self.log_dir = place, scratch, log_dir
        self.starts: dict[str, Start] = {}
        self.kept: dict[Path, int] = {}

    def begin(self, start: Start) -> Handle:
        """Start a process as described, and return its handle at once."""
        return self.engine.begin(start, self.here[0])

    def start(self, role: Role, payload: Any, rendezvous: Rendezvous) -> None:
        """Start the role's processes of this host."""
        place = self.place
        base = {
            "MASTER_ADDR": rendezvous.host,
            "MASTER_PORT": str(place.port or rendezvous.port or free_port(rendezvous.host)),
            "WORLD_SIZE": str(role.size),
            "LOCAL_WORLD_SIZE": str(role.here),
            **_gloo_interface(rendezvous),
        }
        sockets = place.folder if len(os.fsencode(place.folder)) <= LONGEST_FOLDER else ""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for i in range(role.here):
            rank = role.first_rank + i
            log = self.log_dir / f"{LOG_NAMES[role.name]}.{rank}"
            self.kept[log] = files.start(log, getattr(payload, "goes_on", False))
            life = Life(new_life(), pulse=str(pulse.make(pulse.of(self.scratch, role.name, rank))))
            port = role.ports[i] if role.ports else 0
            address = Address(place.secret, rendezvous.here, port, "" if port else sockets)
            environment = {**base, "RANK": str(rank), "LOCAL_RANK": str(i)}
            start = Start(role, i, payload, place, address, life, os.getpid(), environment, log, self.scratch)
            self.members.append(StartedProcess(role, rank, self.begin(start), life.number))
            self.starts[str(self.members[-1])] = start


def _gloo_interface(rendezvous: Rendezvous) -> dict[str, str]:
    """The variable that names the network interface for Gloo; {} if the user has set it, or if Gloo has to choose."""
    if rendezvous.hosts == 1:
        return {GLOO: "lo"}
    named = rendezvous.here if rendezvous.named_here else ""
    interface = None if GLOO in os.environ else interface_of(named) if named else interface_towards(rendezvous.host)
    return {} if interface is None else {GLOO: interface}


class Forked:
    """The forkserver engine: starts each process as a child of this process's forkserver.

    Args:
        preload: modules that the forkserver imports once for all processes.
    """

    can_restart = True

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self.preload = preload

    def prepare(self, scratch: Path) -> None:
        """Start the forkserver, which imports what the processes will need."""
        start_forkserver(self.preload, scratch)

    def begin(self, start: Start, board: OwnBoard) -> Handle:
        """Start a child of the forkserver and return its handle at once.

        Raises:
            RunFailed: the forkserver has ended.
        """
        try:
            return Child(enter, (start,), start.environment, start.log, start.scratch)
        except (EOFError, ConnectionError) as error:
            raise RunFailed(f"{start.role.name} {start.rank} was not started: {why_ended()}") from error


def enter(start: Start, report: FailureReport) -> Any:
    """The main function of a process from the forkserver: join the run's meeting place, then call its role's entry."""
    end_with(start.launcher)
    # A child of a forkserver would start reading processes from a forkserver of its own, and these, being no children
    # of this process, would not notice its death.
    multiprocessing.set_start_method("fork", force=True)
    streams.confide(start.payload)
    FolderLock(start.log.parent).share()  # until this process ends
    role = start.role
    for number in NUMBERS:  # of a scheduler, to the whole process group: workers save, and need the servers for that
        signal.signal(number, signal.SIG_DFL if role.name == "worker" else signal.SIG_IGN)
    board, store = start.place.open()
    report_start(board, role.name, start.rank, start.address.host, start.life.number)
    seat = Seat(
        role.name,
        start.rank,
        role.size,
        start.index,
        role.here,
        role.devices[start.index],
        board,
        store,
        start.address,
        start.life,
        send_failure=report,
    )
    return resolve(role.entry)(seat, start.payload)
