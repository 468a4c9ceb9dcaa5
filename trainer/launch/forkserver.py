"""Starts the plan's processes on this host (usually from a forkserver), watches them, and ends all when one fails."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.errors import BY_CTRL_C, AskedToLeave, Died, Interrupted, RunFailed
from trainer.host import files, private, pulse
from trainer.host.addresses import free_port
from trainer.host.notes_board import FolderLost, NoNote, OwnBoard, SealedBoard
from trainer.host.parent_death import end_with
from trainer.host.patient_store import PatientStore
from trainer.host.signals import LEAVE, NUMBERS, Grace, StopRequest, requests, say_leaving, termination_raises
from trainer.launch.engine import Engine, Start
from trainer.launch.full_disk import FullDisk
from trainer.launch.hang import Hang
from trainer.launch.log_echo import LogEcho
from trainer.launch.meeting_place import Place, open_store
from trainer.launch.other_hosts import OtherHosts
from trainer.launch.preload import start_forkserver, why_ended
from trainer.launch.process import Child, resolve
from trainer.launch.process_reports import ProcessReports, tell
from trainer.launch.process_restarts import ProcessRestarts
from trainer.launch.rendezvous import Meeting, meet
from trainer.launch.silent_workers import SilentWorkers
from trainer.launch.started_process import Handle, Role, StartedProcess
from trainer.launch.supervisor import END_S, HostResults, Supervisor, end
from trainer.planning.deaths import Deaths
from trainer.run_folder.folder_lock import FolderLock
from trainer.run_folder.report import OWN
from trainer.strategies.contract import Seat
from trainer.strategies.lost_workers import new_life
from trainer.terminal import streams

LONGEST_FOLDER = 80
"""Bytes. The path of a Unix socket has 108 at most."""
LOG_NAMES = {"worker": "workerlog", "server": "serverlog"}


def launch(
    roles: Sequence[Role],
    payload: Any,
    log_dir: Path,
    meeting: Meeting,
    engine: Engine | None = None,
    verbosity: str = "normal",
    grace: Grace | None = None,
    hang_s: float | None = None,
    noted: ProcessReports | None = None,
    deaths: Deaths | None = None,
    restarts: bool = False,
) -> HostResults:
    """Start this host's processes of the plan, from a forkserver unless another engine is given, and watch them to
    their end.

    Args:
        roles: what to start here. payload: picklable, handed to every entry.
        log_dir: where ``workerlog.N`` and ``serverlog.N`` go; what is shown of them is ``verbosity``'s matter.
        meeting: where the processes meet. engine: starts each process; None: a forkserver does.
        verbosity: whose output is also shown on the screen: ``quiet`` nobody's, ``normal`` worker 0's, ``workers`` that
            and of the others the lines of their own values, ``debug`` everybody's.
        grace: SIGTERM and SIGUSR1 ask the workers to save and end, if they have something to save; None: they end all
        at once. hang_s: longest time in which no worker shows a sign of life; None: for ever. noted: takes down now and
        then, and once more at the end, what the processes have told. deaths: counts those of the run, and allows single
        processes to be started again; None: none is. restarts: all processes can be started again together, where they
        are on one host: those that others miss count as dead.

    Raises:
        RunFailed: a process died that the others cannot do without; the message names it, its own error and its log.
        AskedToLeave: SIGTERM or SIGUSR1 came here or on another host, and there was nothing new to save. Interrupted:
        SIGINT or SIGTERM came, and nothing can be saved or it took too long. Whatever comes, all processes end.
    """
    _place_sockets()
    scratch, kept, starts = private.scratch("trainer-"), dict[Path, int](), dict[str, Start]()
    members, shown = list[StartedProcess](), list[LogEcho]()
    here: list[Any] = []  # the stores: the frames of an error would keep them open
    try:
        (engine := engine or Forked()).prepare(scratch)
        begin = partial(_begin, engine, here)
        with termination_raises(grace.can_go_on if grace is not None else lambda: False):
            try:
                place = _place(meeting, scratch, here)
                for role in roles:
                    _start(role, payload, log_dir, scratch, meeting, place, begin, members, kept, starts)
                shown += _shown(members, verbosity, kept)
                singly = deaths if engine.again else None
                returned = ProcessRestarts(singly, starts, begin, members, noted)
                with _asked_to_leave(grace, here) as request:
                    others, disk = OtherHosts(here, meeting, roles), FullDisk(log_dir, partial(print, flush=True))
                    results = _watched(members, here, others, scratch, hang_s, returned, disk, restarts)
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
    """The first SIGTERM or SIGUSR1 is passed on to the workers.

    Raises:
        Interrupted: a process has died after it.
    """
    if grace is None:
        yield None
        return

    def tell(name: str) -> None:
        with suppress(NoNote):  # the launcher looks there as well, and says that host 0 is gone
            for board in here[:1]:
                board.clone().set(LEAVE, "")
            say_leaving(name, grace.seconds)  # when it is true: the workers are asked

    with requests(grace.begun, grace.seconds, tell) as request:
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
    returns: ProcessRestarts,
    disk: FullDisk,
    restarts: bool,
) -> HostResults:
    """The members' results, when all are done on all hosts. If they end otherwise, the other hosts are told.

    Raises:
        RunFailed: as ``launch``; or host 0 cannot be reached.
    """
    pulses = {str(m): pulse.of(scratch, m.role.name, m.rank) for m in members}

    def poll() -> Mapping[int, str]:
        hang.poll()
        disk.poll()
        if returns.noted is not None:
            returns.noted.poll(here[0])
        return others.poll()

    supervisor = Supervisor(members, here, multiprocessing.connection.wait, poll=poll, again=returns.again)
    elsewhere = _elsewhere(members, here, others.meeting)
    hang = Hang(supervisor.at_work, pulses, hang_s, elsewhere=elsewhere, unneeded=supervisor.unneeded)
    try:
        with hang.found_by_others(supervisor.running, restarts and others.meeting.hosts == 1):
            results = supervisor.watch()
        if returns.noted is not None:
            returns.noted.poll(here[0], now=True)
        others.leave(results.of)
        return results
    except FolderLost as error:
        raise RunFailed(str(error)) from error
    except NoNote as error:
        raise RunFailed(f"{others.meeting.name(0)} cannot be reached: {error}") from error
    except (RunFailed, Interrupted, KeyboardInterrupt) as error:
        if isinstance(error, Died):
            error.done = {name: pulse.read(path).update for name, path in pulses.items()}
            error.update = error.done.get(error.who, error.update)
        why = str(error) or BY_CTRL_C
        asked = isinstance(error, AskedToLeave)  # all hosts, as where there is something to save
        if supervisor.ends_all or asked or others.meeting.serves:  # without host 0 nobody goes on
            others.end(why, asked)
        else:
            others.lose([f"{m.role.name}/{m.rank}" for m in members if not m.handle.well], "its host has ended")
        raise


def _elsewhere(members: Sequence[StartedProcess], here: Sequence[Any], meeting: Meeting) -> SilentWorkers | None:
    """What launchers of several hosts tell each other of workers that do nothing; None: this host has none, or is the
    only one."""
    workers = [m for m in members if m.role.name == "worker"]
    if meeting.hosts == 1 or not workers:
        return None
    role = workers[0].role
    return SilentWorkers(
        here, role.size, [m.rank for m in workers], "" if meeting.labels else meeting.label(meeting.number), role.apart
    )


def _shown(members: Sequence[StartedProcess], verbosity: str, kept: Mapping[Path, int]) -> list[LogEcho]:
    """Who is seen on the screen, but for what logs have from before; where it is more than the first worker, all say
    who they are."""
    if verbosity == "quiet":
        return []
    if verbosity == "debug":
        return [LogEcho(m.handle.log, f"{m} | ", kept.get(m.handle.log, 0)) for m in members]
    workers = [m for m in members if m.role.name == "worker" and (not m.rank or verbosity == "workers")]
    return [LogEcho(m.handle.log, since=kept.get(m.handle.log, 0), only=OWN if m.rank else "") for m in workers]


def _place_sockets() -> None:
    """multiprocessing makes its folder of sockets (0700, until this process ends) in a path that is short enough."""
    before, tempfile.tempdir = tempfile.tempdir, private.temporary_root()
    try:
        multiprocessing.util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def _place(meeting: Meeting, scratch: Path, here: list[Any]) -> Place:
    """Where this run's processes meet; ``here`` gets this process's own board, and the store that it lies in."""
    if meeting.hosts == 1:
        place = Place(secrets.token_bytes(32), folder=str(scratch))
        place.make()
        here.append(place.open()[0])
        return place
    store = open_store(meeting)
    here.append(PatientStore(store, meeting.store, meeting.patience_s))
    place = Place(
        meet(here[0], meeting), host=meeting.host, port=store.port, name=meeting.store, patience_s=meeting.patience_s
    )
    here.insert(0, SealedBoard(here[0], place.secret))
    return place


def _start(
    role: Role,
    payload: Any,
    log_dir: Path,
    scratch: Path,
    meeting: Meeting,
    place: Place,
    begin: Callable[[Start], Handle],
    members: list[StartedProcess],
    kept: dict[Path, int],
    starts: dict[str, Start],
) -> None:
    """Start the role's processes here; each joins the members at once, so that it is ended whatever comes next.

    Args:
        kept: gets the bytes that each log has from the run's lives before. starts: what each process was told, by name.
    """
    base = {
        "MASTER_ADDR": meeting.host,
        "MASTER_PORT": str(place.port or meeting.port or free_port(meeting.host)),
        "WORLD_SIZE": str(role.size),
        "LOCAL_WORLD_SIZE": str(role.here),
        **({"GLOO_SOCKET_IFNAME": meeting.interface} if meeting.interface else {}),
        **meeting.env,
    }
    sockets = place.folder if len(os.fsencode(place.folder)) <= LONGEST_FOLDER else ""
    log_dir.mkdir(parents=True, exist_ok=True)
    for i in range(role.here):
        rank = role.first_rank + i
        log = log_dir / f"{LOG_NAMES[role.name]}.{rank}"
        kept[log] = files.start(log, getattr(payload, "goes_on", False))
        own = pulse.make(pulse.of(scratch, role.name, rank))
        environment = {**base, "RANK": str(rank), "LOCAL_RANK": str(i)}
        port = role.ports[i] if role.ports else 0
        start = Start(
            role,
            i,
            payload,
            place,
            meeting.here,
            os.getpid(),
            "" if port else sockets,
            environment,
            log,
            scratch,
            str(own),
            port,
            new_life(),
        )
        members.append(StartedProcess(role, rank, begin(start), start.life))
        starts[str(members[-1])] = start


def _begin(engine: Engine, here: Sequence[Any], start: Start) -> Handle:
    return engine.begin(start, here[0])


class Forked:
    """The forkserver engine: starts each process as a child of this process's forkserver.

    Args:
        preload: modules that the forkserver imports once for all processes.
    """

    again = True

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


def enter(start: Start) -> Any:
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
    tell(board, role.name, start.rank, start.host, start.life)
    seat = Seat(
        role.name,
        start.rank,
        role.size,
        start.index,
        role.here,
        role.devices[start.index],
        board,
        secret=start.place.secret,
        host=start.host,
        folder=start.sockets,
        group_store=store,
        pulse=start.pulse,
        port=start.port,
        life=start.life,
        returns=start.returns,
    )
    return resolve(role.entry)(seat, start.payload)
