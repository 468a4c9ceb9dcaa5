"""What Slurm does with a job that its user may not expect: compared with the job before it is submitted."""

from __future__ import annotations

import re
from contextlib import suppress

from trainer.launch.engines.contract import Job, Unreachable
from trainer.launch.engines.engine_folder import query

SIGNAL_BEFORE_S = 30.0
"""So long before the time limit the checkpoint is to be ready."""
SIGNAL_EARLY_S = 60.0
"""So much earlier than asked for Slurm may send the signal (sbatch(1), --signal)."""
CORES = ("cpus_per_gpu", "exclusive", "cores_per_socket", "mincpus")
"""Options of sbatch by which a job has more cores than the default."""
START_S = 30.0
"""A run starts within this time."""
STUCK = {
    "PartitionNodeLimit": "the partition has or allows fewer hosts: launch.nnodes",
    "PartitionTimeLimit": "the partition allows less time: launch.options.time",
    "PartitionConfig": "no host of the partition has so much: launch.cores, launch.memory, launch.gpus",
    "BadConstraints": "no host has what is asked for: launch.options.constraint, cores, memory, gpus",
    "JobHeldUser": "you hold it: scontrol release NUMBER",
    "JobHeldAdmin": "an administrator holds it",
    "InvalidAccount": "the account is none of yours: launch.options.account",
    "InvalidQOS": "the QOS is none of yours: launch.options.qos",
    "DependencyNeverSatisfied": "the job that it waits for has ended otherwise: launch.options.dependency",
}
"""Reasons of Slurm's that do not pass by themselves, and what decides about them."""


def explained(reason: str) -> str:
    """A reason why a job waits; of one that does not pass by itself with what it means."""
    found = STUCK.get(reason)
    if not found and reason.startswith("Assoc") and "Max" in reason and "PerJob" in reason:
        found = "the job asks for more than your account may have in one job"
    return f"{reason}. ATTENTION: this does not pass by itself: {found}" if found else reason


def concerns(job: Job) -> list[str]:
    """Return sentences on what Slurm does with this job that the user may not expect."""
    found = []
    text = str(job.options.get("time", ""))
    least = round(job.grace_s + SIGNAL_BEFORE_S + SIGNAL_EARLY_S + START_S)
    if (limit := _limit_s(text)) is not None and limit <= least:
        found.append(
            f"launch.options.time={text} is less than {least + 1} s: Slurm may send SIGUSR1 at once, as it sends "
            f"it up to {SIGNAL_EARLY_S:g} s early. Then the job is requeued again and again before it has trained"
        )
    workers = job.workers // job.hosts if job.workers else job.needs.gpus or 1
    if job.needs.cores is None and workers > 1 and not any(name.replace("-", "_") in CORES for name in job.options):
        found.append(
            f"launch.cores is not set: Slurm gives a host its default of CPUs per task, often 1, for {workers} "
            f"workers. Type launch.cores={workers} for one core each, or more"
        )
    with suppress(Unreachable):
        found += _preemption(job)
    return found


def _preemption(job: Job) -> list[str]:
    """A sentence where a pre-empted job is killed before its checkpoint may be ready.

    Raises:
        Unreachable: Slurm does not answer.
    """
    partition = str(job.options.get("partition", ""))
    said = query(["scontrol", "show", "partition", *filter(None, [partition]), "-o"]).splitlines()
    line = next((one for one in said if partition or "Default=YES" in one), "")
    if not re.search("REQUEUE|CANCEL", field(line, "PreemptMode")):  # a suspended job is not ended
        return []
    seconds, key = _seconds(field(line, "GraceTime")), "GraceTime"
    if not seconds:  # then SIGKILL follows SIGTERM as after any other end of a job
        found = re.search(r"KillWait\s*=\s*(\d+)", query(["scontrol", "show", "config"]))
        seconds, key = int(found[1]) if found else 0, "KillWait"
    if seconds >= job.grace_s:
        return []
    return [
        f"the partition {field(line, 'PartitionName')} gives a pre-empted job {seconds} s ({key}), and "
        f"checkpoint.grace_s={job.grace_s:g}: a checkpoint that takes longer is lost, and the run resumes from the "
        "one before"
    ]


def _seconds(text: str) -> int:
    """Seconds of ``90`` or ``1-02:03:04``."""
    days, _, rest = text.rpartition("-")
    seconds = 0
    for part in rest.split(":"):
        seconds = seconds * 60 + (int(part) if part.isdecimal() else 0)
    return seconds + 86400 * (int(days) if days.isdecimal() else 0)


def _limit_s(text: str) -> int | None:
    """Seconds of a time limit as sbatch reads it: ``MIN``, ``MIN:S``, ``H:MIN:S``, ``D-H``, ``D-H:MIN`` or
    ``D-H:MIN:S``; None: none of these."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, *([days] if dash else [])]):
        return None
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))


def field(said: str, key: str) -> str:
    """A value of ``scontrol show job -o``."""
    found = re.search(rf"(?<!\S){key}=(\S*)", said)
    return found[1] if found else ""
