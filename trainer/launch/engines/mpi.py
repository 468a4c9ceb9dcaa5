"""launch=mpi: the command by mpirun, one task on each host, which is the launcher of its host.

mpirun kills all tasks when one ends with another exit code than 0, and gives them a few seconds on SIGTERM. So each
task is a shell that notes the exit code of its command in ``RUN/engine/ended.HOST``, where this side reads it, and ends
with 0. SIGTERM and SIGUSR1 are both handed to mpirun as SIGUSR1, which it passes on. One end does kill the others: that
of a host which is refused (exit code 2), since they would wait ``launch.timeout_s`` for it. Each task writes its lines
itself, into ``RUN/engine/host.HOST.log``: Open MPI gives host 0 a terminal.

Without a disk that the hosts share, :mod:`trainer.launch.engines.carried` is the command of a task, and these files of
each host come by the address ``checkpoint.to``.

Nothing starts a run again that mpirun has lost. The same command with ``resume=auto`` does.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from trainer.config.schema import MpiLaunch
from trainer.errors import UserError
from trainer.host.engine_tasks import CARRIED, MPI, RUN_DIR, SUBMITTED
from trainer.launch.engines.contract import ENDED, RUNNING, Handle, Job, State, Submitter
from trainer.launch.engines.copies import carried
from trainer.launch.engines.engine_folder import (
    LOG,
    SECRET,
    LogReader,
    ask,
    begin,
    failed_hosts,
    made_by,
    read_code,
    setup_lines,
    shell_words,
)
from trainer.planning.run_secret import VARIABLE

OPENMPI, WORDS = "openmpi", "TRAINER_WORDS"
SCRIPT = """\
#!/bin/sh
{made_by}# mpirun starts one task on each host; what each task does about its end: trainer/launch/engines/mpi.py.
export {submitted}=mpi TRAINER_RUN_DIR={folder}
{secret}=$(cat {secret_file}) && export {secret} || exit 1
{words}={command} && export {words} # no command line that other users of the hosts can see
exec {mpirun} {shell} -c {task} {engine}
"""
AWAY_SCRIPT = """\
#!/bin/sh
{made_by}# No disk is shared: the files of the hosts come by {copies}.
# What each task does: trainer/launch/engines/mpi.py.
export {submitted}=mpi
{secret}=$(cat {secret_file}) && export {secret} || exit 1
{words}={carried} && export {words} # no command line that other users of the hosts can see
exec {mpirun} {shell} -c {task} {started_in} {command}
"""
AWAY_TASK = """\
number=${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-${{MV2_COMM_WORLD_RANK:-0}}}}}}
{setup}trap : TERM USR1
cd "$0" 2>/dev/null || cd /
"$@" -m trainer.launch.engines.carried
code=$?
[ $code != 2 ] || [ "$number" = 0 ] || {{ sleep 5; exit 2; }}
exit 0"""
TASK = """\
number=${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-${{MV2_COMM_WORLD_RANK:-0}}}}}}
{setup}exec >>"$0/host.$number.log" 2>&1
trap : TERM USR1 # they are for the command, whose end this shell waits for
eval "set -- ${words}"
unset {words}
"$@"
code=$?
echo $code >"$0/ended.$number"
[ $code != 2 ] || [ "$number" = 0 ] || {{ sleep 5; exit 2; }}
exit 0"""
FAILED = (
    'echo "$sentence" >>"$0/host.$number.log"; [ "$number" = 0 ] || echo "host $number: $sentence"; '
    'echo "$code" >"$0/ended.$number"'
)
"""After a failed line of ``launch.setup``: mpirun then ends the other hosts."""
WITHOUT = ("cores", "memory", "gpus", "max_preemptions")
"""Keys for engines that share out machines."""


class Mpi(Submitter):
    """launch=mpi: mpirun's own options are ``launch.options``."""

    engine = MPI
    runs_apart = True
    schema = MpiLaunch
    options: MpiLaunch
    decides: ClassVar = {  # launch.master_addr helps where no variable says it
        "ips": "launch.hosts=HOST,HOST with launch.nnodes=2",
        "node_rank": Submitter.decides["node_rank"],
    }

    def render(self, job: Job) -> str:
        self._check(job)
        both = {
            "made_by": made_by(job),
            "submitted": SUBMITTED,
            "secret": VARIABLE,
            "secret_file": shlex.quote(str(job.engine_folder / SECRET)),
            "mpirun": shell_words(self._mpirun(job)),
            "shell": "bash" if job.setup else "sh",  # sh may know neither "source" nor "module"
        }
        setup = setup_lines(job.setup, "" if job.copies else FAILED)
        if job.copies:
            return AWAY_SCRIPT.format(
                **both,
                copies=job.copies,
                words=CARRIED,
                carried=shlex.quote(carried(job)[0].text()),
                task=shlex.quote(AWAY_TASK.format(setup=setup)),
                started_in=shlex.quote(job.started_in),
                command=shell_words(job.command),
            )
        return SCRIPT.format(
            **both,
            folder=shlex.quote(str(job.folder)),
            words=WORDS,
            task=shlex.quote(TASK.format(setup=setup, words=WORDS)),
            engine=shlex.quote(str(job.engine_folder)),
            command=shlex.quote(shell_words([*job.command, "-m", "trainer", *job.words])),
        )

    def submit(self, job: Job) -> Handle:
        version = ask([*shlex.split(self.options.mpirun), "--version"], "launch=mpi")
        found = OPENMPI if "Open MPI" in version or "Open RTE" in version else "mpich"
        if found != self.options.flavour:
            what = f"launch.flavour={self.options.flavour}"
            raise UserError(what, f"{self.options.mpirun} here has options of {found}", f"launch.flavour={found}")
        return MpiJob(job, begin(job, self.render(job)))

    def _check(self, job: Job) -> None:
        options = self.options
        for name in (name for name in WITHOUT if getattr(options, name) is not None):
            why = "mpirun neither shares out machines nor starts a run again"
            raise UserError(f"launch.{name}={getattr(options, name)}", why, f"the command without launch.{name}")
        if job.points:
            raise UserError("--multirun", "mpirun starts one run", "one command for each run of the sweep")
        job.refuse_range("mpirun ends all tasks when it loses a host")
        if job.copies and not options.wait:
            why = "the run's files are brought by the command that follows mpirun, which is a process of this machine"
            raise UserError("launch.wait=false", why, "nohup python -m trainer ... without launch.wait=false")
        if options.hosts and options.hostfile:
            raise UserError("launch.hosts", "launch.hostfile says where as well", "one of the two")
        if options.hosts and (count := len(options.hosts.split(","))) != job.hosts:
            raise UserError(f"launch.nnodes={job.hosts}", f"launch.hosts has {count}", f"launch.nnodes={count}")

    def _mpirun(self, job: Job) -> list[str]:
        """mpirun and its options, as Open MPI or hydra spells them."""
        options, count = self.options, str(job.hosts)
        started_in = "/" if job.copies else job.started_in  # the task itself goes where that is
        words = shlex.split(options.mpirun)
        if options.flavour == OPENMPI:
            words += ["-n", count, "--map-by", "ppr:1:node", "--bind-to", "none", "--wdir", started_in]
            names = (SUBMITTED, VARIABLE, CARRIED) if job.copies else (SUBMITTED, RUN_DIR, VARIABLE, WORDS)
            words += [word for name in names for word in ("-x", name)]
            hosts, file, dash = "--host", "--hostfile", "--"
        else:  # hydra hands on all variables by itself
            words += ["-n", count, "-ppn", "1", "-bind-to", "none", "-wdir", started_in]
            hosts, file, dash = "-hosts", "-f", "-"
        if options.hosts:
            words += [hosts, options.hosts]
        if options.hostfile:
            words += [file, options.hostfile]
        for name, value in job.options.items():
            if value is not None and value is not False:
                words += [f"{dash}{name}", *([] if value is True or value == "" else [str(value)])]
        return words


class MpiJob(Handle):
    """mpirun as a process of this machine, in a session of its own: Ctrl-C here does not reach its tasks."""

    def __init__(self, job: Job, script: Path) -> None:
        self.folder, self.hosts = job.engine_folder, job.hosts
        with (self.folder / LOG).open("wb") as log:
            self.process = subprocess.Popen(  # the script above  # nosec B603 B607
                ["sh", str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        number = self.process.pid
        first = self.folder / "host.0.log"
        self.name, self.cancels, self.log = f"mpirun (process {number})", f"kill {number}", str(first)
        self._readers = LogReader(first), LogReader(self.folder / LOG)
        self._within: LogReader | None = None  # whose line has not ended on the screen

    def state(self) -> State:
        if (own := self.process.poll()) is None:
            return State(RUNNING)
        codes = {
            host: found for host in range(self.hosts) if (found := read_code(self.folder, f"ended.{host}")) is not None
        }
        code = codes.get(0, max(codes.values(), default=abs(own) or 1))
        silent = [f"host {host} left no exit code" for host in range(self.hosts) if host not in codes]
        failed = failed_hosts(self.folder, codes)
        return State(ENDED, "; ".join([*silent, *failed][:3]) if code else "", code)

    def lines(self) -> Iterator[str]:
        """Yield what host 0 has printed, and mpirun itself."""
        for reader in self._readers:
            for text in reader.lines():
                yield "\n" + text if self._within not in (None, reader) else text
                self._within = None if text.endswith("\n") else reader

    def signal(self, number: int) -> None:
        self.process.send_signal(signal.SIGUSR1)

    def cancel(self) -> None:
        self.process.terminate()
