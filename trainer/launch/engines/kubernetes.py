"""launch=kubernetes: the command as pods of Kubernetes, which restart together until the run has ended.

====================================  ======================================================================
hosts (``launch.nnodes``)             a TrainJob of Kubeflow, with a TrainingRuntime of its own: a TrainJob
                                      alone can say neither which exit codes are failures nor how often pods
                                      restart. A pod is a host, and finds itself by ``PET_*``
servers (``launch.servers``) on one   a JobSet with a pod for each server and each worker, which have
host                                  different needs. A pod is one process (``launch.role``): its role and
                                      all endpoints are variables, since pods of a JobSet have known names
====================================  ======================================================================

With each goes a Secret with the run's secret, from which the pods have it as a variable. What the end of a pod means is
in the manifest: a Job fails at its first failed pod, says why, and the JobSet starts all pods again, or does not::

    exit code 75, or the pod was evicted --> PodFailurePolicy, rule "preempted": again, without counting
    exit codes 2 and 130                 --> PodFailurePolicy, rule "refused":   the end
    any other                            --> BackoffLimitExceeded:               again, launch.max_restarts times

Without a volume (``launch.shared_storage=false``) :mod:`trainer.launch.engines.carried` runs the command in each pod,
in a folder that ends with the pod, and copies its files to the address ``checkpoint.to``.

A pod resumes (``TRAINER_RESUME=auto``) where its folder has a checkpoint. It cannot go by the number of restarts: a job
that Kueue suspends, or whose name is applied again, has new pods with the number 0.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from trainer.config.schema import KubernetesLaunch
from trainer.errors import UserError
from trainer.host.engine_tasks import (
    CARRIED,
    CARRIED_CONFIG,
    KUBERNETES,
    RESUME,
    ROLE,
    RUN_DIR,
    SERVER_ENDPOINTS,
    SUBMITTED,
    WORKER_ENDPOINTS,
)
from trainer.launch.engines.contract import ENDED, Handle, Job, Living, Needs, Submitter, Unreachable
from trainer.launch.engines.copies import PATIENCE_S, carried
from trainer.launch.engines.engine_folder import SHOWN, SubmittedJob, ask, left_if_submitted, memory_of, setup_lines
from trainer.launch.engines.kubernetes_job import (
    CONTAINER,
    INSTANCE,
    LEAVING,
    KubernetesJob,
    kubectl_of,
    remove_earlier,
)
from trainer.planning.run_secret import LEAST, VARIABLE

TRAIN_JOB = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
SCRIPT = """\
{setup}{names}if ls -d "$TRAINER_RUN_DIR"/checkpoints/step-* >/dev/null 2>&1; then export TRAINER_RESUME=auto; fi
exec {python} -m trainer "$@"
"""
AWAY_SCRIPT = """\
{setup}{names}exec {python} -m trainer.launch.engines.carried
"""
NAMES = """\
for name in "$HOSTNAME.{subdomain}" {first}; do # a name comes soon after its pod
    timeout 120 sh -c 'until getent hosts "$0" >/dev/null; do sleep 1; done' "$name"
done
"""
QUEUE, STEP = "kueue.x-k8s.io/queue-name", "trainer.kubeflow.org/trainjob-ancestor-step"
SERVER_PORT, WORKER_PORT = 8000, 8100
"""Each pod has its own address, so that all may have one port."""
CONFIG_KEY = "config"
"""Of the files of ``--config-dir`` there."""
KEY = "value"
"""Of the run's secret in its Secret; under any other name the screen would hide it as a secret key."""
SLACK_S = 30
"""Between the end of the checkpoint's grace and the kill."""
OWN = ("containers", "volumes", "restartPolicy", "terminationGracePeriodSeconds", "subdomain", "hostname")
"""Fields of a pod that the job itself sets."""
BY_HAND = """\
# {kind} {name}. launch.apply=true applies it, and follows it. By hand, first its secret, then this text:
#   (umask 077; openssl rand -hex 32 > run.secret)
{config}#   {kubectl} create secret generic {name} --from-file {key}=run.secret{file}
#   {kubectl} apply -f -
"""
PACKS = "#   (umask 077; tar -cz -C FOLDER . | base64 -w0 > run.config) # FOLDER: that of --config-dir\n"
"""Packs what :attr:`Job.config` is; the files may hold secrets, as those of the run."""
"""A printed manifest has no secret: it is on nobody's screen."""


class Kubernetes(Submitter):
    """launch=kubernetes: fields of a pod's spec are ``launch.options``."""

    engine = KUBERNETES
    runs_apart = True
    schema = KubernetesLaunch
    options: KubernetesLaunch

    def sees(self, folder: Path) -> bool:
        volume = Path(self.options.volume_path)  # of the pods, which this machine may have as well
        return super().sees(folder) and volume in folder.parents and volume.exists()

    def holds(self, folder: Path) -> bool:
        return self.sees(folder) or Path(self.options.volume_path) not in folder.parents

    def render(self, job: Job) -> str:
        self._check(job)
        name, kind = name_of(job), kind_of(job)
        objects = self._job_set(job, name) if kind == "JobSet" else self._train_job(job, name)
        kubectl = shlex.join(kubectl_of(self.options.namespace))
        words = {"kind": kind, "name": name, "kubectl": kubectl, "key": KEY, "config": "", "file": ""}
        if job.config:
            words |= {"config": PACKS, "file": f" --from-file {CONFIG_KEY}=run.config"}
        return BY_HAND.format(**words) + _yaml(*objects)

    def printed(self, job: Job) -> str:
        return "" if self.options.apply and not self.options.dry_run else self.render(job)

    def submit(self, job: Job) -> Handle:
        text, name, kind = self.render(job), name_of(job), kind_of(job)
        place = job.copies or run_folder(job, self.options)
        remove_earlier(self._handle(kind, name, job.engine_folder, place))
        handle = self._handle(kind, name, job.engine_folder, place)
        drawn = {KEY: secrets.token_hex(LEAST), **({CONFIG_KEY: job.config} if job.config else {})}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": self._metadata(name), "stringData": drawn}
        with left_if_submitted([job.engine_folder]):
            ask([*handle.kubectl, "apply", "-f", "-"], "launch=kubernetes", f"{_yaml(secret)}---\n{text}")
        if self.holds(job.folder):
            with suppress(OSError):
                job.engine_folder.mkdir(parents=True, exist_ok=True)
                SubmittedJob(self.engine, f"{kind}/{name}", job.words).write(job.engine_folder)
        return handle

    def _handle(self, kind: str, name: str, folder: Path, place: str) -> KubernetesJob:
        kinds = "jobset,secret" if kind == "JobSet" else "trainjob,trainingruntime,secret"
        if self.options.runtime:
            kinds = "trainjob,secret"
        return KubernetesJob(kind, name, kinds, self.options.namespace, place, folder)

    def living(self, folders: Sequence[Path]) -> Living | None:
        before = SubmittedJob.of(folders[0])
        if before is None or before.engine != self.engine:
            return None
        kind, _, name = before.number.partition("/")
        handle = self._handle(kind, name, folders[0], "the run's folder")
        found = Living(handle, before.words, folders[0].parent)
        try:
            state = handle.glance()
        except Unreachable as error:
            why = f"{handle.name} may still run in this folder, and kubectl does not answer: {error}"
            raise UserError("launch=kubernetes", why, "the same command again") from error
        if state.phase != ENDED:
            return replace(found, leaves=state.reason == LEAVING)
        return None if (folders[0] / SHOWN).exists() else replace(found, is_over=True)

    def _check(self, job: Job) -> None:
        options = self.options
        if not options.image:
            raise UserError("launch.image", "is not set: pods start from an image", "launch.image=REGISTRY/trainer:TAG")
        if not options.volume and not job.copies:
            why = "is not set, and the run folder would end with its pod"
            raise UserError("launch.volume", why, "launch.volume=CLAIM (a PersistentVolumeClaim, ReadWriteMany)")
        if options.volume and job.copies:
            why = "the run's files are in no volume with launch.shared_storage=false"
            instead = f"launch.volumes={{{options.volume}: {options.volume_path}}}, if the pods need it for data"
            raise UserError(f"launch.volume={options.volume}", why, instead)
        if job.points:
            raise UserError("--multirun", "a sweep is not one job of Kubernetes", "one command for each of its runs")
        job.refuse_range("all pods of a job restart together")
        if job.max_preemptions is not None:
            what = f"launch.max_preemptions={job.max_preemptions}"
            raise UserError(what, "Kubernetes does not count pre-emptions", "launch.max_preemptions=null")
        if kind_of(job) == "JobSet" and options.nproc is not None:
            why = "each process of a run with servers has a pod of its own"
            raise UserError(
                f"launch.nproc={options.nproc}", why, f"launch.workers={options.nproc}, without launch.nproc"
            )
        if options.runtime and options.env_from:
            why = "a TrainJob on a runtime of the cluster cannot add them"
            raise UserError("launch.env_from", why, "the command without launch.runtime or without launch.env_from")
        for name in (name for name in job.options if name in OWN):
            raise UserError(f"launch.options.{name}", "is set by the job itself", f"the command without {name}")
        for key in ("memory", "server_memory"):
            value = getattr(options, key)
            if value is not None:
                memory_of(value, f"launch.{key}")

    def _metadata(self, name: str, queue: str | None = None) -> dict[str, Any]:
        space = {"namespace": self.options.namespace} if self.options.namespace else {}
        return {"name": name, **space, "labels": {INSTANCE: name, **({QUEUE: queue} if queue else {})}}

    def _train_job(self, job: Job, name: str) -> list[dict[str, Any]]:
        """A TrainJob, and the TrainingRuntime that has its pods, unless ``launch.runtime`` names one of the cluster."""
        needs = job.needs
        workers = job.workers // job.hosts if job.workers else needs.gpus or 1
        first = '"$PET_MASTER_ADDR"' if job.hosts > 1 else ""
        pod = self._pod(job, name, needs, first, [])
        wanted: dict[str, Any] = {"numNodes": job.hosts, "numProcPerNode": workers}
        if self.options.runtime:
            spec = {"runtimeRef": {"name": self.options.runtime}, **_patches(wanted, pod)}
            return [{**TRAIN_JOB, "metadata": self._metadata(name, self.options.queue), "spec": spec}]
        node = _replicated("node", job.hosts, {STEP: "trainer"}, pod)
        runtime = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": self._metadata(name),
            "spec": {
                "mlPolicy": {"numNodes": job.hosts, "torch": {}},
                "template": {"spec": {**_together(job), "replicatedJobs": [node]}},
            },
        }
        reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
        spec = {"runtimeRef": reference, "trainer": wanted}
        return [runtime, {**TRAIN_JOB, "metadata": self._metadata(name, self.options.queue), "spec": spec}]

    def _job_set(self, job: Job, name: str) -> list[dict[str, Any]]:
        """A JobSet with a pod for each process."""
        each, options = job.needs, self.options
        of_server = Needs(options.server_cores or each.cores, options.server_memory or each.memory)
        servers = [f"{name}-server-0-{number}.{name}" for number in range(job.servers)]
        workers = [f"{name}-worker-0-{number}.{name}" for number in range(job.workers or 1)]
        places = {
            SERVER_ENDPOINTS: ",".join(f"{host}:{SERVER_PORT}" for host in servers),
            WORKER_ENDPOINTS: ",".join(f"{host}:{WORKER_PORT}" for host in workers),
        }
        replicated = []
        for role, hosts, needs in (("server", servers, of_server), ("worker", workers, each)):
            variables = [{"name": key, "value": value} for key, value in {ROLE: role, **places}.items()]
            pod = self._pod(job, name, needs, workers[0], variables)
            replicated.append(_replicated(role, len(hosts), {}, pod))
        spec = {**_together(job), "replicatedJobs": replicated}
        return [
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": self._metadata(name, self.options.queue),
                "spec": spec,
            }
        ]

    def _pod(self, job: Job, name: str, needs: Needs, first: str, variables: list[dict[str, Any]]) -> dict[str, Any]:
        """The template of the pods of one role.

        Args:
            first: the name of host 0, as the shell reads it; '': there is no other host.
            variables: of this role alone.
        """
        options = self.options
        setup = setup_lines(job.setup)
        names = NAMES.format(subdomain=name, first=first) if first else ""
        text = AWAY_SCRIPT if job.copies else SCRIPT
        script = text.format(setup=setup, names=names, python=options.python or "python")
        words = [] if job.copies else [word for word in job.words if not word.startswith("hydra.run.dir=")]
        more = [options.env_from] if isinstance(options.env_from, str) else options.env_from or []
        claims = {} if job.copies else {"runs": (options.volume, options.volume_path)}
        claims |= {f"volume-{n}": entry for n, entry in enumerate(options.volumes.items())}
        volumes = [{"name": key, "persistentVolumeClaim": {"claimName": claim}} for key, (claim, _) in claims.items()]
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})  # the default has 64 MB
        mounts = [{"name": key, "mountPath": path} for key, (_, path) in claims.items()]
        own, of_config = {RUN_DIR: run_folder(job, options)}, {"secretKeyRef": {"name": name, "key": CONFIG_KEY}}
        if job.copies:
            volumes.append({"name": "runs", "emptyDir": {}})
            mounts.append({"name": "runs", "mountPath": options.volume_path})
            # The image has a working folder of its own; the files of --config-dir come from the Secret.
            asked = replace(carried(job)[0], started_in="", config="")
            own = {RESUME: "auto", CARRIED: _unexpanded(asked.text()), "TMPDIR": options.volume_path}
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": options.image,
            "command": ["sh", "-c", _unexpanded(script), "trainer"],
            "args": [_unexpanded(word) for word in words],
            "env": [
                {"name": SUBMITTED, "value": self.engine},
                *({"name": key, "value": value} for key, value in own.items()),
                {"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": KEY}}},
                *([{"name": CARRIED_CONFIG, "valueFrom": of_config}] if job.config else []),
                *variables,
            ],
            **({"envFrom": [{"secretRef": {"name": one}} for one in more]} if more else {}),
            "resources": _resources(needs),
            "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],  # nosec B108: of the pod
        }
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": round(job.grace_s + (PATIENCE_S if job.copies else 0)) + SLACK_S,
            **job.options,
            "containers": [container],
            "volumes": volumes,
        }
        return {"metadata": {"labels": {INSTANCE: name}}, "spec": spec}


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as such, and what is there twice, twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text_node)


def _yaml(*objects: Mapping[str, Any]) -> str:
    return "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120) for one in objects)


def kind_of(job: Job) -> str:
    """JobSet where servers and workers have pods of their own, else TrainJob."""
    return "JobSet" if job.servers and job.hosts == 1 else "TrainJob"


def name_of(job: Job) -> str:
    """The name of the job's objects: the same for the same folder, in which one job may run at a time."""
    stem = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:24].rstrip("-")
    stem = stem if stem[:1].isalpha() else f"run-{stem}".rstrip("-")
    return f"{stem}-{hashlib.sha256(str(job.folder).encode()).hexdigest()[:8]}"


def run_folder(job: Job, options: KubernetesLaunch) -> str:
    """The run folder as the pods see it: the same if it is on their volume here as well, else below the volume."""
    path = PurePosixPath(options.volume_path)
    if path in PurePosixPath(job.folder).parents:
        return str(job.folder)
    return str(path / job.name / job.folder.name)


def _replicated(role: str, count: int, labels: dict[str, str], pod: dict[str, Any]) -> dict[str, Any]:
    """One indexed Job of so many pods."""
    ends = [
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [75]}},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [2, 130]}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": ends},
        "template": pod,
    }
    return {
        "name": role,
        "replicas": 1,
        "template": {**({"metadata": {"labels": labels}} if labels else {}), "spec": spec},
    }


def _patches(wanted: dict[str, Any], pod: dict[str, Any]) -> dict[str, Any]:
    """The same pod as a TrainJob changes those of a runtime of the cluster: the container here, the rest there."""
    spec = dict(pod["spec"])
    (container,) = spec.pop("containers")
    del spec["restartPolicy"]
    spec["containers"] = [{"name": CONTAINER, "volumeMounts": container.pop("volumeMounts")}]
    trainer = {key: container[key] for key in ("image", "command", "args", "env")}
    if container["resources"]:
        trainer["resourcesPerNode"] = container["resources"]
    job = {"name": "node", "template": {"spec": {"template": {"metadata": pod["metadata"], "spec": spec}}}}
    patch = {"manager": "launch.kubernetes", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    return {"trainer": {**wanted, **trainer}, "runtimePatches": [patch]}


def _together(job: Job) -> dict[str, Any]:
    """How pods of a JobSet fail and start: all together, after the last of them has ended."""
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": ["exit code 75 ", "DisruptionTarget"],
    }
    refused = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": job.max_restarts,
            "restartStrategy": "BlockingRecreate",
            "rules": [preempted, refused],
        },
    }


def _resources(needs: Needs) -> dict[str, Any]:
    memory = None if needs.memory is None else "{}{}i".format(*memory_of(needs.memory))
    requests = {"cpu": needs.cores and str(needs.cores), "memory": memory}
    limits = {"memory": memory, "nvidia.com/gpu": needs.gpus and str(needs.gpus)}
    both = {"requests": requests, "limits": limits}
    kept = {kind: {name: value for name, value in amounts.items() if value} for kind, amounts in both.items()}
    return {kind: amounts for kind, amounts in kept.items() if amounts}


def _unexpanded(text: str) -> str:
    """Text of a command that Kubernetes hands on as it is: it would expand ``$(NAME)``."""
    return text.replace("$", "$$")
