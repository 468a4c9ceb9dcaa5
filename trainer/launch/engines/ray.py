"""launch=ray: the command on the nodes of a Ray cluster, one host on each, placed together and again after a loss.

Ray's placement group decides where the hosts are: as many bundles as there are hosts, each on a node of its own, with
the cores, memory and GPUs that a host needs. An actor in each bundle starts the host's command
(:mod:`trainer.launch.engines.ray_hosts`). This command owns the group, and the group ends with it; it watches the
actors, and decides what the end of a life means (:mod:`trainer.launch.engines.ray_job`).
"""

from __future__ import annotations

import importlib
import os
import secrets
from typing import Any, ClassVar

import yaml

from trainer.config.schema import RayLaunch
from trainer.errors import UserError, first_line
from trainer.host.engine_tasks import HOST, RAY
from trainer.launch.engines.contract import Handle, Job, Submitter
from trainer.launch.engines.engine_folder import memory_of
from trainer.launch.engines.ray_job import Bundle, RayJob, command_of, variables_of
from trainer.planning.run_secret import LEAST, VARIABLE

FORWARDED = ("TRAINER_", "MLFLOW_")
"""Variables of this command that all hosts get begin so."""
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
HEADER = """\
# What launch=ray asks Ray for, and what the actor of each host starts. Without launch.dry_run=true it is submitted.
"""


class Ray(Submitter):
    """launch=ray: custom resources of a host are ``launch.options``."""

    engine = RAY
    runs_apart = True
    schema = RayLaunch
    options: RayLaunch
    decides: ClassVar = {**Submitter.decides, "role": "the command without launch.role, with launch.nnodes"}

    def render(self, job: Job) -> str:
        self._check(job)
        places = [("<address of host 0>", "<free port of host 0>")]
        variables = dict.fromkeys(self._forwarded(), "<as here>") | variables_of(job, "<drawn at the start>", 0, places)
        variables[HOST] = f"<0 to {job.hosts - 1}>"
        plain = {
            "cluster": self.options.cluster,
            "placement_group": {"strategy": "STRICT_SPREAD", "bundles": job.hosts, "each": bundle(job).plain()},
            "command": command_of(job),
            "started_in": job.started_in,
            "environment": variables,
            "max_restarts": job.max_restarts,
            "max_preemptions": job.max_preemptions,
        }
        text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000)
        return HEADER + text

    def submit(self, job: Job) -> Handle:
        self._check(job)
        if not self.options.wait:
            why = "the hosts end with the command that has placed them"
            raise UserError("launch.wait=false", why, "ray job submit --no-wait -- python -m trainer ... launch=ray")
        try:
            ray = importlib.import_module("ray")
        except ImportError as error:
            raise UserError("launch=ray", "Ray is not installed here", "uv pip install 'trainer[ray]'") from error
        try:
            ray.init(address=self.options.cluster, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray has no class of its own for it, and gRPC and the client have theirs
            what, why = f"launch.cluster={self.options.cluster}", f"no Ray cluster answers: {first_line(error)}"
            instead = "launch.cluster=ADDRESS:6379 (or ray://ADDRESS:10001), after ray start --head on that machine"
            raise UserError(what, why.rstrip("."), instead) from error
        here = {name: os.environ[name] for name in self._forwarded() if name in os.environ}
        return RayJob(ray, job, bundle(job), {**here, VARIABLE: secrets.token_hex(LEAST)})

    def _forwarded(self) -> list[str]:
        """The names of this command's variables that all hosts get."""
        named: Any = self.options.variables
        more = [named] if isinstance(named, str) else named or []
        return sorted({*(name for name in os.environ if name.startswith(FORWARDED)), *more})

    def _check(self, job: Job) -> None:
        if job.points:
            raise UserError("--multirun", "a sweep is not one job of Ray", "one command for each of its runs")
        job.refuse_range("a placement group has a fixed number of hosts")
        bundle(job)


def bundle(job: Job) -> Bundle:
    """What one host reserves.

    Raises:
        UserError: an amount is no number, or is set elsewhere.
    """
    needs = job.needs
    for name, amount in job.options.items():
        if name in ("CPU", "GPU", "memory"):
            instead = {"CPU": "launch.cores", "GPU": "launch.gpus"}.get(name, "launch.memory")
            raise UserError(f"launch.options.{name}", "has a key of its own", f"{instead}={amount}")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount <= 0:
            why = "is no amount of a resource of the nodes"
            raise UserError(f"launch.options.{name}={amount}", why, f"launch.options.{name}=1")
    return Bundle(needs.cores or 1, needs.gpus or 0, _bytes(needs.memory) if needs.memory else 0, dict(job.options))


def _bytes(text: str) -> int:
    number, unit = memory_of(text)
    return round(float(number) * UNITS[unit])
