"""A submitted job of Kubernetes, asked for and followed by kubectl."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import Interrupted, RunPreempted, UserError
from trainer.launch.engines.contract import ENDED, PENDING, REQUEUED, RUNNING, Handle, State, Unreachable
from trainer.launch.engines.engine_folder import CHUNK, SHOWN, query

INSTANCE = "app.kubernetes.io/instance"
"""Label of everything that belongs to one job."""
LIFE, INDEX, ROLE_OF_POD = (
    "jobset.sigs.k8s.io/restart-attempt",
    "batch.kubernetes.io/job-completion-index",
    "jobset.sigs.k8s.io/replicatedjob-name",
)
CONTAINER = "node"
"""The name that Kubeflow wants."""
LEAVING = "it is deleted, and ends"
LAST_LINES_S = 10.0
"""Longest wait for the lines of a pod that has ended."""


def kubectl_of(namespace: str | None) -> list[str]:
    """The first words of each command."""
    return ["kubectl", *(["--namespace", namespace] if namespace else [])]


@dataclass(frozen=True)
class Condition:
    """What an object says of itself, such as ``Failed``, while it holds; of a pod also what does not hold."""

    kind: str
    holds: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Pod:
    """One pod, as kubectl describes it.

    Attributes:
        phase: ``Pending``, ``Running``, ``Succeeded`` or ``Failed``. life: so often all pods were started again before.
        waits: why it has not begun, in the words of its container or of the scheduler. code: its exit code.
    """

    name: str
    phase: str
    role: str
    index: str
    life: int
    host: str
    waits: str
    code: int

    @property
    def has_begun(self) -> bool:
        """Whether it has lines."""
        return self.phase in ("Running", "Succeeded", "Failed")

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Pod:
        """Read what kubectl says of a pod."""
        labels, status = _at(plain, "metadata", "labels"), _at(plain, "status")
        state = next(iter(_at(status, "containerStatuses") or [{}]))
        refused = next((one for one in _conditions(plain) if not one.holds and one.message), None)
        return Pod(
            _at(plain, "metadata", "name"),
            _at(status, "phase") or "Pending",
            _at(labels, ROLE_OF_POD),
            _at(labels, INDEX),
            int(_at(labels, LIFE) or 0),
            _at(plain, "spec", "nodeName") or "",
            _at(state, "state", "waiting", "reason") or (refused.message if refused else ""),
            _at(state, "state", "terminated", "exitCode") or 0,
        )


def _at(plain: Any, *path: str) -> Any:
    """The value at a path of nested mappings; None: it is not there."""
    for name in path:
        plain = plain.get(name) if isinstance(plain, Mapping) else None
    return plain


def _conditions(plain: Mapping[str, Any]) -> list[Condition]:
    listed = _at(plain, "status", "conditions") or []
    return [
        Condition(_at(one, "type"), _at(one, "status") == "True", _at(one, "reason") or "", _at(one, "message") or "")
        for one in listed
    ]


class KubernetesJob(Handle):
    """A job of Kubernetes, by its name and label. One question to kubectl gets the job and its pods.

    Args:
        kind: TrainJob or JobSet. kinds: of all objects with this name, as kubectl deletes them.
        place: of the run's files: its folder as the pods see it, or their address. folder: the engine's, on this
        machine.
    """

    def __init__(self, kind: str, name: str, kinds: str, namespace: str | None, place: str, folder: Path) -> None:
        self.kubectl = kubectl_of(namespace)
        self.kind, self.label = kind, f"{INSTANCE}={name}"
        self.removes = [*self.kubectl, "delete", kinds, name]
        self.name, self.cancels = f"{kind} {name}", shlex.join(self.removes)
        self.log = f"{shlex.join(self.kubectl)} logs --selector {self.label},{INDEX}=0 (files in {place})"
        self.folder = folder
        self._if_gone = Interrupted.exit_code
        self._has_run = False
        self._lines = _PodLines(self.kubectl)

    def state(self) -> State:
        state, first = self._found()
        self._lines.follow(first, state.phase == ENDED)
        return state

    def glance(self) -> State:
        """The state, without following the lines from now on.

        Raises:
            Unreachable: kubectl does not answer.
        """
        return self._found()[0]

    def _found(self) -> tuple[State, Pod | None]:
        """The state, and the pod of host 0."""
        listed = query([*self.kubectl, "get", f"{self.kind.lower()},pods", "-l", self.label, "-o", "json"])
        items = _at(json.loads(listed), "items") or []
        whole = next((one for one in items if _at(one, "kind") == self.kind), None)
        pods = [Pod.of(one) for one in items if _at(one, "kind") == "Pod"]
        pods = [pod for pod in pods if pod.life == max(one.life for one in pods)]
        return self._state_of(whole, pods), _first(pods)

    def _state_of(self, whole: Mapping[str, Any] | None, pods: Sequence[Pod]) -> State:
        holding = {one.kind: one for one in _conditions(whole or {}) if one.holds}
        failed = holding.get("Failed")
        ended = whole is None or failed is not None or not holding.keys().isdisjoint(("Complete", "Completed"))
        if whole is None:
            return State(ENDED, "deleted", self._if_gone)
        if ended:
            return State(ENDED, failed.message, _code(pods)) if failed else State(ENDED)
        if _at(whole, "metadata", "deletionTimestamp"):
            return State(RUNNING, LEAVING)
        waiting = [pod for pod in pods if not pod.has_begun]
        if not pods or waiting:
            suspended = holding.get("Suspended")
            reason = suspended.reason if suspended else waiting[0].waits if waiting else ""
            return State(REQUEUED if self._has_run else PENDING, reason)
        self._has_run = True
        return State(RUNNING, ",".join(sorted({pod.host for pod in pods})))

    def lines(self) -> Iterator[str]:
        return self._lines.lines()

    def signal(self, number: int) -> None:
        self._if_gone = RunPreempted.exit_code
        self.cancel()

    def cancel(self) -> None:
        """Delete the job. Its pods get SIGTERM, and have their grace; the job is there until the last has ended."""
        query([*self.removes, "--cascade=foreground", "--wait=false", "--ignore-not-found"])

    def end_is_shown(self) -> None:
        with suppress(OSError):
            (self.folder / SHOWN).touch()


def remove_earlier(earlier: KubernetesJob) -> None:
    """Remove an ended job of the same folder, which has the same name.

    Raises:
        UserError: it has not ended, or kubectl does not answer.
    """
    try:
        if (before := earlier.glance()).phase == ENDED:
            query([*earlier.removes, "--cascade=foreground", "--ignore-not-found"])
            return
    except Unreachable as error:
        raise UserError("launch.apply=true", str(error), "launch.apply=false, which prints the manifest") from None
    raise UserError("hydra.run.dir", f"{earlier.name} is in this folder: {before.phase}", f"first: {earlier.cancels}")


def _first(pods: Sequence[Pod]) -> Pod | None:
    """The pod of host 0: of worker 0 where servers have pods."""
    return next((pod for pod in pods if pod.index == "0" and pod.role != "server"), None)


def _code(pods: Sequence[Pod]) -> int:
    """The exit code of a failed job: that of host 0, else of another pod, but for those that were ended (75)."""
    first = _first(pods)
    codes = [pod.code for pod in ([first] if first else []) + list(pods)]
    return next((code for code in codes if code not in (0, RunPreempted.exit_code)), 1)


class _PodLines:
    """What the pod of host 0 prints: ``kubectl logs --follow`` writes it to a file, which is read as it grows. So the
    last lines come although the pod is deleted then. Where kubectl loses the pod, it begins again at the last line's
    time."""

    def __init__(self, kubectl: Sequence[str]) -> None:
        self.kubectl = kubectl
        self.pod, self.last, self.over = "", ("", ""), False  # last: the second, and its part
        self.process: subprocess.Popen[bytes] | None = None
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  closed with the handle
        self.position, self.rest = 0, b""
        self.said: list[str] = []

    def follow(self, pod: Pod | None, ended: bool) -> None:
        """Follow this pod, unless it has not begun or is followed already.

        Args:
            ended: no line will come after those that are there.
        """
        self.over = ended
        if pod is None or not pod.has_begun:
            return
        process, same = self.process, pod.name == self.pod
        if same and process is not None:
            code = process.poll()
            if code is None or (code == 0 and pod.phase != "Running"):
                return
        if process is not None:
            self._wait(process)
            self.said += self._whole_lines()
            if not same:
                self.said += self._last_line()
                self.last = ("", "")
            self.rest = b""  # of the same pod, the whole line comes again
        second, _ = self.last
        since = [f"--since-time={second}Z"] if same and second else []
        self.pod = pod.name
        command = [*self.kubectl, "logs", pod.name, "--container", CONTAINER, "--follow", "--timestamps", *since]
        # kubectl with words of its own answers; no shell
        self.process = subprocess.Popen(command, stdout=self.file, stderr=subprocess.DEVNULL)  # nosec B603

    @staticmethod
    def _wait(process: subprocess.Popen[bytes]) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAST_LINES_S)

    def lines(self) -> Iterator[str]:
        """Yield the text since the last call."""
        if self.over and self.process is not None:
            self._wait(self.process)
        said, self.said = self.said, []
        yield from said
        yield from self._whole_lines()
        if self.over and self.process is not None and self.process.poll() is not None:
            yield from self._last_line()

    def _whole_lines(self) -> Iterator[str]:
        while piece := os.pread(self.file.fileno(), CHUNK, self.position):
            self.position += len(piece)
            *whole, self.rest = (self.rest + piece).split(b"\n")
            found = "".join(text for line in whole if (text := self._new(line.decode(errors="replace"))) is not None)
            if found:
                yield found

    def _last_line(self) -> Iterator[str]:
        """What is left of a line without its end, of a pod that was killed while it wrote."""
        rest, self.rest = self.rest, b""
        if b" " in rest and (text := self._new(rest.decode(errors="replace"))) is not None:
            yield text

    def _new(self, line: str) -> str | None:
        """The line without its time; None if it was there before."""
        stamp, _, text = line.partition(" ")
        second, _, part = stamp.rstrip("Z").partition(".")
        time = second, part.ljust(9, "0")
        if time <= self.last:
            return None
        self.last = time
        return f"{text}\n"
