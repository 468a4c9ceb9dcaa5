"""Finds the address of host 0 of an engine's job, where its variables do not say it."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping

from trainer.host.engine_tasks import KUBERNETES, SLURM

ASK_S = 10.0
"""Longest wait for scontrol."""


def first_host(engine: str, host: int, environment: Mapping[str, str]) -> str:
    """The address of the job's first host as the others reach it; '' if the engine has no way to say it.

    Args:
        host: the number of this one.
    """
    if engine == SLURM:
        return _of_slurm(environment)
    return _of_service(host) if engine == KUBERNETES else ""


def _of_slurm(environment: Mapping[str, str]) -> str:
    """The NodeAddr that Slurm itself uses; where scontrol is not at hand, as in a container, the host's name."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    name = _first_name(hosts)
    said = _scontrol("show", "node", name, "-o") if name else ""
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else name


def _first_name(hosts: str) -> str:
    """The first name of a list such as ``n[1-3,7],login1``, without asking Slurm: containers lack scontrol."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)
    return "".join(part or "" for part in found.groups()) if found else ""


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(  # Slurm's own command, by the user's PATH  # nosec B603 B607
            ["scontrol", *words], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _of_service(host: int) -> str:
    """The name of pod 0 in the headless service of this pod: ``job-0.service...`` for ``job-3.service...``."""
    name, _, service = socket.getfqdn().partition(".")
    stem, _, index = name.rpartition("-")
    return f"{stem}-0.{service}" if stem and service and index == str(host) else ""
