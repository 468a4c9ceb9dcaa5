"""A submitted job of Kubernetes, asked for and followed by kubectl."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainer.errors import Interrupted, RunPreempted, UserError
from trainer.launch.engines.contract import ENDED, PENDING, REQUEUED, RUNNING, Handle, State, Unreachable
from trainer.launch.engines.engine_folder import CHUNK, query

INSTANCE = "app.kubernetes.io/instance"
"""Label of everything that belongs to one job."""
ATTEMPT, INDEX, ROLE_OF_POD = (
    "jobset.sigs.k8s.io/restart-attempt",
    "batch.kubernetes.io/job-completion-index",
    "jobset.sigs.k8s.io/replicatedjob-name",
)
CONTAINER = "node"
"""The name that Kubeflow wants."""
LAST_LINES_S = 10.0
"""Longest wait for the lines of a pod that has ended."""


def kubectl_of(namespace: str | None) -> list[str]:
    """The first words of each command."""
    return ["kubectl", *(["--namespace", namespace] if namespace else [])]


class KubernetesJob(Handle):
    """A job of Kubernetes, by its name and label. One question to kubectl gets the job and its pods."""

    def __init__(self, kind: str, name: str, namespace: str | None, folder: str) -> None:
        self.kubectl = kubectl_of(namespace)
        self.kind, self.label = kind, f"{INSTANCE}={name}"
        kinds = "trainjob,trainingruntime,secret" if kind == "TrainJob" else "jobset,secret"
        self.removes = [*self.kubectl, "delete", kinds, name]
        self.name, self.cancels = f"{kind} {name}", shlex.join(self.removes)
        self.log = f"{shlex.join(self.kubectl)} logs --selector {self.label},{INDEX}=0 (files in {folder})"
        self._if_gone = Interrupted.exit_code
        self._has_run = False
        self._lines = _PodLines(self.kubectl)

    def state(self) -> State:
        items = json.loads(query([*self.kubectl, "get", f"{self.kind.lower()},pods", "-l", self.label, "-o", "json"]))
        whole = next((one for one in items["items"] if one["kind"] == self.kind), None)
        pods = _newest([one for one in items["items"] if one["kind"] == "Pod"])
        ended = whole is None or _condition(whole, "Complete", "Completed", "Failed") is not None
        self._lines.follow(_first(pods), ended)
        if whole is None:
            return State(ENDED, "deleted", self._if_gone)
        if "deletionTimestamp" in whole["metadata"]:
            return State(RUNNING, "it is deleted, and ends")
        if ended:
            failed = _condition(whole, "Failed")
            return State(ENDED, failed.get("message", ""), _code(pods)) if failed else State(ENDED)
        waiting = [pod for pod in pods if pod["status"].get("phase") == "Pending"]
        if not pods or waiting:
            suspended = _condition(whole, "Suspended")
            reason = suspended["reason"] if suspended else _reason(waiting[0]) if waiting else ""
            return State(REQUEUED if self._has_run else PENDING, reason)
        self._has_run = True
        return State(RUNNING, ",".join(sorted({pod["spec"].get("nodeName", "?") for pod in pods})))

    def lines(self) -> Iterator[str]:
        return self._lines.lines()

    def signal(self, number: int) -> None:
        self._if_gone = RunPreempted.exit_code
        self.cancel()

    def cancel(self) -> None:
        """Delete the job. Its pods get SIGTERM, and have their grace; the job is there until the last has ended."""
        query([*self.removes, "--cascade=foreground", "--wait=false", "--ignore-not-found"])


def remove_earlier(earlier: KubernetesJob) -> None:
    """Remove an ended job of the same folder, which has the same name.

    Raises:
        UserError: it has not ended, or kubectl does not answer.
    """
    try:
        if (before := earlier.state()).phase == ENDED:
            query([*earlier.removes, "--cascade=foreground", "--ignore-not-found"])
            return
    except Unreachable as error:
        raise UserError("launch.apply=true", str(error), "launch.apply=false, which prints the manifest") from None
    raise UserError("hydra.run.dir", f"{earlier.name} is in this folder: {before.phase}", f"first: {earlier.cancels}")


def _condition(whole: Mapping[str, Any], *names: str) -> dict[str, Any] | None:
    """The first of these conditions that holds."""
    conditions: list[dict[str, Any]] = whole.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] in names and one["status"] == "True"), None)


def _newest(pods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pods of the newest life."""
    attempts = [int(pod["metadata"]["labels"].get(ATTEMPT, 0)) for pod in pods]
    return [pod for pod, attempt in zip(pods, attempts, strict=True) if attempt == max(attempts)]


def _first(pods: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The pod of host 0: of worker 0 where servers have pods."""
    labels = [pod["metadata"]["labels"] for pod in pods]
    first = [
        pod
        for pod, of in zip(pods, labels, strict=True)
        if of.get(INDEX) == "0" and of.get(ROLE_OF_POD, "worker") != "server"
    ]
    return first[-1] if first else None


def _container(pod: Mapping[str, Any], state: str) -> dict[str, Any]:
    """What a pod says of its container in one state, such as ``terminated``; {}: it is in another state."""
    statuses = pod["status"].get("containerStatuses", [])
    return next((one["state"][state] for one in statuses if state in one["state"]), {})


def _reason(pod: Mapping[str, Any]) -> str:
    """Why a pod has not started: the container's reason, such as ImagePullBackOff, or the scheduler's message."""
    scheduled = _condition({"status": pod["status"]}, "PodScheduled")
    refused = next((one for one in pod["status"].get("conditions", []) if one["status"] == "False"), {})
    waiting: str = _container(pod, "waiting").get("reason", "")
    return waiting if scheduled or waiting else refused.get("message") or refused.get("reason", "")


def _code(pods: Sequence[dict[str, Any]]) -> int:
    """The exit code of a failed job: that of host 0, else another one; those ended by the failure of others have 75."""
    first = _first(pods)
    codes = [int(_container(pod, "terminated").get("exitCode", 0)) for pod in ([first] if first else []) + list(pods)]
    return next((code for code in codes if code not in (0, RunPreempted.exit_code)), 1)


class _PodLines:
    """What the pod of host 0 prints: ``kubectl logs --follow`` writes it to a file, which is read as it grows. So the
    last lines come although the pod is deleted then. Where kubectl loses the pod, it begins again at the last line's
    time."""

    def __init__(self, kubectl: Sequence[str]) -> None:
        self.kubectl = kubectl
        self.pod, self.last, self.over = "", ("", ""), False
        self.process: subprocess.Popen[bytes] | None = None
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  closed with the handle
        self.position, self.rest = 0, b""

    def follow(self, pod: Mapping[str, Any] | None, ended: bool) -> None:
        """Follow this pod, unless it has not begun or is followed already.

        Args:
            ended: no line will come after those that are there.
        """
        self.over = ended
        if pod is None or pod["status"].get("phase") not in ("Running", "Succeeded", "Failed"):
            return
        name = pod["metadata"]["name"]
        if name == self.pod and (self.process is None or self.process.poll() is None or self._has_all(pod)):
            return
        if self.process is not None:
            self.process.wait(LAST_LINES_S)
        since = [f"--since-time={self.last[0]}Z"] if name == self.pod and self.last[0] else []
        self.pod = name
        command = [*self.kubectl, "logs", name, "--container", CONTAINER, "--follow", "--timestamps", *since]
        self.process = subprocess.Popen(command, stdout=self.file, stderr=subprocess.DEVNULL)

    def _has_all(self, pod: Mapping[str, Any]) -> bool:
        """Whether kubectl ended because the pod had ended."""
        return self.process is not None and self.process.returncode == 0 and pod["status"]["phase"] != "Running"

    def lines(self) -> Iterator[str]:
        """Yield the text since the last call."""
        if self.over and self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LAST_LINES_S)
        while piece := os.pread(self.file.fileno(), CHUNK, self.position):
            self.position += len(piece)
            *whole, self.rest = (self.rest + piece).split(b"\n")
            found = "".join(text for line in whole if (text := self._new(line.decode(errors="replace"))) is not None)
            if found:
                yield found

    def _new(self, line: str) -> str | None:
        """The line without its time; None if it was there before."""
        stamp, _, text = line.partition(" ")
        second, _, part = stamp.rstrip("Z").partition(".")
        if (time := (second, part.ljust(9, "0"))) <= self.last:
            return None
        self.last = time
        return f"{text}\n"
