"""What Slurm does with a job that its user may not expect: compared with the job before it is submitted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from trainer.errors import UserError
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
    "JobHeldUser": "you hold it: scontrol release {number}",
    "JobHeldAdmin": "an administrator holds it",
    "InvalidAccount": "the account is none of yours: launch.options.account",
    "InvalidQOS": "the QOS is none of yours: launch.options.qos",
    "DependencyNeverSatisfied": "the job that it waits for has ended otherwise: launch.options.dependency",
}
"""Reasons of Slurm's that do not pass by themselves, and what decides about them."""
FITS = "launch.nnodes, launch.cores, launch.memory or launch.gpus as the partition has it (sinfo -o '%P %D %c %m %G')"
REFUSED = {
    r"accounting/qos policy": "launch.options.qos=NAME, or less launch.options.time and launch.nnodes",
    r"partition (name )?specified|partition is invalid": "launch.options.partition=NAME (sinfo -s lists them)",
    r"permission denied": "launch.options.partition=NAME and launch.options.account=NAME that you may use",
    r"\baccount\b": "launch.options.account=NAME",
    r"\bqos\b": "launch.options.qos=NAME",
    r"time limit": "launch.options.time=TIME within the partition's limit (sinfo -o '%P %l')",
    r"memory": "launch.memory=64G, as a host of the partition has it (sinfo -o '%P %m', in MB)",
    r"generic resource|\btres\b": "launch.gpus, or launch.options.gres=NAME:NUMBER of the hosts (sinfo -o '%P %G')",
    r"node count": "launch.nnodes",
    r"cpu count|processors": "launch.cores",
    r"node configuration|partition configuration": FITS,
    r"feature": "launch.options.constraint=NAME (sinfo -o '%P %f' lists them)",
    r"reservation": "launch.options.reservation=NAME (scontrol show reservation lists them)",
    r"license": "launch.options.licenses=NAME:NUMBER (scontrol show licenses lists them)",
    r"dependency": "launch.options.dependency=afterok:NUMBER",
    r"node name": "launch.options.nodelist or launch.options.exclude with names of sinfo -N",
    r"job array": "fewer points in one sweep (scontrol show config: MaxArraySize)",
}
"""What sbatch says when it refuses, and the key of ours that decides about it; the first that is found."""
SHORT = {
    "p": "partition",
    "A": "account",
    "q": "qos",
    "t": "time",
    "C": "constraint",
    "L": "licenses",
    "d": "dependency",
}
"""Short forms of options by which the user may have typed them."""


def what_to_change(words: str, options: Iterable[str], keys: Mapping[str, str]) -> str:
    """What to type instead of a command that sbatch refuses with these words.

    Args:
        options: as they were typed. keys: of ours, by options of sbatch.
    """
    if found := re.search(r"(?:unrecognized option '|Invalid |for )--([\w-]+)", words):
        text = keys.get(found[1].replace("-", "_"), f"launch.options.{found[1]}")
        text = f"the command without {text}" if "unrecognized" in words else f"another {text}"
    else:
        text = next((text for said, text in REFUSED.items() if re.search(said, words, re.I)), "")
    for typed in options:
        text = text.replace(f"launch.options.{SHORT.get(typed)}", f"launch.options.{typed}")
    return text or "what it names, in launch.options"


def explained(reason: str, number: str) -> str:
    """A reason why the job of this number waits; of one that does not pass by itself with what it means."""
    found = STUCK.get(reason, "").format(number=number)
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


def gpus_in_options(options: Mapping[str, Any], hosts: int) -> tuple[str, int] | None:
    """The option of sbatch that asks for GPUs, and how many each host gets by it; None: none does.

    They are ``gpus`` (of all hosts), ``gpus_per_node``, ``gpus_per_task`` (a host has one task), each as ``4``,
    ``a100:4`` or ``a100:2,v100:2``, and ``gres=gpu:4``, ``gpu:a100:4`` or ``gpu``.

    Raises:
        UserError: it says no number.
    """
    for name, value in options.items():
        kind, words = {"G": "gpus"}.get(name, name.replace("-", "_")), str(value).split(",")
        if kind == "gres":
            words = [word.partition("gpu")[2].lstrip(":") or "1" for word in words if re.match(r"gpu(:|$)", word)]
        elif kind not in ("gpus", "gpus_per_node", "gpus_per_task"):
            continue
        if not words:
            continue
        what, numbers = f"launch.options.{name}={value}", [word.rpartition(":")[2] for word in words]
        if kind == "gres":  # gpu:a100 is one of them
            numbers = [number if number.isdecimal() else "1" for number in numbers]
        if not all(number.isdecimal() for number in numbers):
            raise UserError(what, "says no number of GPUs", "launch.gpus=4")
        count = sum(map(int, numbers))
        return what, count // hosts if kind == "gpus" else count
    return None


def _preemption(job: Job) -> list[str]:
    """A sentence where a pre-empted job is killed before its checkpoint may be ready.

    Raises:
        Unreachable: Slurm does not answer.
    """
    config = query(["scontrol", "show", "config"])
    if re.search(r"PreemptType\s*=\s*preempt/qos", config):
        return _preemption_by_qos(job, config)
    partition = str(job.options.get("partition", job.options.get("p", "")))
    said = query(["scontrol", "show", "partition", *filter(None, [partition]), "-o"]).splitlines()
    line = next((one for one in said if partition or "Default=YES" in one), "")
    if not re.search("REQUEUE|CANCEL", field(line, "PreemptMode")):  # a suspended job is not ended
        return []
    return _too_short(f"the partition {field(line, 'PartitionName')}", field(line, "GraceTime"), config, job)


def _preemption_by_qos(job: Job, config: str) -> list[str]:
    """The same where the QOS decides, and not the partition.

    Raises:
        Unreachable: the accounting database does not answer.
    """
    if not (name := str(job.options.get("qos", job.options.get("q", "")))):
        return []  # it is the user's default, which may be another one in each account
    said = query(["sacctmgr", "-nP", "show", "qos", name, "format=GraceTime,PreemptMode"])
    grace, _, mode = said.strip().partition("|")
    if mode in ("", "cluster"):
        mode = (re.search(r"PreemptMode\s*=\s*(\S+)", config) or ["", ""])[1]
    return _too_short(f"the QOS {name}", grace, config, job) if re.search("requeue|cancel", mode, re.I) else []


def _too_short(who: str, grace: str, config: str, job: Job) -> list[str]:
    """A sentence where this grace time of Slurm is shorter than that of the run."""
    seconds, key = _seconds(grace), "GraceTime"
    if not seconds:  # then SIGKILL follows SIGTERM as after any other end of a job
        found = re.search(r"KillWait\s*=\s*(\d+)", config)
        seconds, key = int(found[1]) if found else 0, "KillWait"
    if seconds >= job.grace_s:
        return []
    return [
        f"{who} gives a pre-empted job {seconds:g} s ({key}), and checkpoint.grace_s={job.grace_s:g}: a checkpoint "
        "that takes longer is lost, and the run resumes from the one before"
    ]


def _seconds(text: str) -> float:
    """Seconds of ``90``, ``1-02:03:04`` or ``UNLIMITED``."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
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
