"""A Slurm of several nodes on this host: a controller and a daemon for each node, on loopback, below one folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIG = """
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
MinJobAge=600
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=node_reg_mem_percent=1,preempt_send_user_signal
MailProg=/bin/true
{nodes}
PartitionName=low Nodes=n[1-{count}] Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n[1-{count}] Default=NO State=UP PriorityTier=10 PreemptMode=OFF
"""
START_S = 60.0


def missing() -> str:
    """The programs of Slurm that are not installed here."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    return ", ".join(name for name in PROGRAMS if shutil.which(name, path=path) is None)


class Cluster:
    """The commands of a running cluster."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.count = root, count
        self.environment: Mapping[str, str] = {
            **os.environ,
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin",
        }

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command that finds this cluster."""
        return subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self) -> None:
        """Start all daemons, and wait until each node is idle."""
        for name in ("state", *(f"spool.n{i}" for i in range(1, self.count + 1))):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        key = self.root / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        munge = ["munged", "--force", f"--key-file={key}", f"--seed-file={self.root}/munge.seed"]
        files = [f"--socket={self.root}/munge.sock", f"--pid-file={self.root}/munged.pid"]
        self._daemon(*munge, *files, f"--log-file={self.root}/munged.log")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        nodes = [
            f"NodeName=n{i} NodeHostname=n{i} NodeAddr=127.0.0.{10 + i} Port={port + i} CPUs=2 RealMemory=4000"
            for i in range(1, self.count + 1)
        ]
        words = {"host": socket.gethostname(), "port": port, "user": getpass.getuser(), "root": self.root}
        text = CONFIG.format(**words, nodes="\n".join(nodes), count=self.count)
        (self.root / "slurm.conf").write_text(text)
        self._daemon("slurmctld", "-f", str(self.root / "slurm.conf"))
        for i in range(1, self.count + 1):
            self.start_node(f"n{i}")
        until = time.monotonic() + START_S
        while self.run("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D").stdout.strip() != str(self.count):
            assert time.monotonic() < until, (
                self.run("sinfo").stdout + (self.root / "slurmctld.log").read_text()[-2000:]
            )
            time.sleep(0.2)

    def configure(self, before: str, after: str) -> None:
        """Replace a line of the configuration, for all daemons."""
        path = self.root / "slurm.conf"
        path.write_text(path.read_text().replace(f"\n{before}\n", f"\n{after}\n"))
        assert self.run("scontrol", "reconfigure").returncode == 0

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._daemon("slurmd", "-N", name, "-f", str(self.root / "slurm.conf"))

    def _daemon(self, *command: str) -> None:
        done = self.run(*command)
        assert done.returncode == 0, done.stderr

    def kill_node(self, name: str) -> None:
        """Kill a node: its daemon and everything that runs there, at once. All are stopped first: none of them can say
        how another one has ended."""
        victims = {int((self.root / f"slurmd.{name}.pid").read_text())}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == name:
                    steps = [one for one in process.parents() if one.name().startswith("slurmstepd")]
                    victims |= {one.pid for one in (process, *steps)}
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, number)

    def stop(self) -> None:
        """Cancel all jobs and end all daemons."""
        self.run("scancel", "--user", getpass.getuser())
        time.sleep(1)
        for path in [*self.root.glob("slurmd.*.pid"), self.root / "slurmctld.pid", self.root / "munged.pid"]:
            with contextlib.suppress(OSError, ValueError):
                os.kill(number := int(path.read_text()), signal.SIGTERM)
                until = time.monotonic() + 10
                while Path(f"/proc/{number}").exists() and time.monotonic() < until:  # it still writes
                    time.sleep(0.1)


@contextlib.contextmanager
def cluster(root: Path, count: int) -> Iterator[Cluster]:
    """Context manager: a running cluster of so many nodes."""
    made = Cluster(root, count)
    try:
        made.start()
        yield made
    finally:
        made.stop()
