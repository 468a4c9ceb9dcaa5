"""What runs inside of a Ray cluster: on each host an actor, which starts that host's command and hands back its lines.

Ray gets this file by value, and runs it in the cluster's own Python, which need not have trainer. So nothing of trainer
is imported here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

CHUNK = 1 << 20
"""Bytes of the log that are handed back at once."""
PR_SET_PDEATHSIG = 1


class Host:
    """The actor of one host. None of its calls waits."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.log = Path()
        self.position: int | None = None
        self.held = 0  # bytes of a line without its end, that were not handed back by the last call
        self.kept: IO[bytes] | None = None

    def place(self) -> tuple[str, str, int]:
        """This host's node, its address, and a port that is free there."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            return ray.get_runtime_context().get_node_id(), address, free.getsockname()[1]

    def start(
        self,
        command: Sequence[str],
        log: str,
        started_in: str,
        variables: Mapping[str, str],
        without: Sequence[str],
        life: int,
        shown: bool,
    ) -> None:
        """Start the command, unless it was started: an answer may have been lost.

        Args:
            log: file of its lines; the first life begins it anew; '': a temporary one.
            started_in: working folder, if there is one here.
            without: variables that it is not to have, such as those of a launcher that has started Ray.
            shown: :meth:`news` hands back its lines.

        Raises:
            OSError: there is no such command, or the log cannot be written.
        """
        if self.process is not None:
            return
        if log:
            self.log = Path(log)
            self.log.parent.mkdir(parents=True, exist_ok=True)
        else:
            self.kept = tempfile.TemporaryFile()  # noqa: SIM115  gone with the actor
            self.log = Path(f"/proc/self/fd/{self.kept.fileno()}")
        environment = {name: value for name, value in os.environ.items() if name not in without}
        libc, actor = ctypes.CDLL(None), os.getpid()  # loaded here: the child may do next to nothing

        def die_with_the_actor() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != actor:  # it died before
                os.kill(os.getpid(), signal.SIGKILL)

        with self.log.open("ab" if life else "wb") as file:
            if shown:
                self.position = file.tell()
            self.process = subprocess.Popen(  # the user's own command  # nosec B603
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=started_in if os.path.isdir(started_in) else None,
                env={**environment, **variables},
                start_new_session=True,
                preexec_fn=die_with_the_actor,
            )

    def news(self) -> tuple[bytes, int | None, list[str]]:
        """The lines since the last call, the exit code once all lines are handed back, and the nodes that Ray is about
        to take away."""
        assert self.process is not None
        code = self.process.poll()
        text, is_rest = self._text(code is not None)
        return text, (code if code is None or code >= 0 else 128 - code) if is_rest else None, self._draining()

    def _text(self, has_ended: bool) -> tuple[bytes, bool]:
        """Whole lines, and whether nothing is left.

        At the end, or when nothing more has come from one call to the next, what is left of a line is among them.
        """
        if self.position is None:
            return b"", True
        try:
            with self.log.open("rb") as file:
                file.seek(self.position)
                piece = file.read(CHUNK)
        except OSError:  # not at the moment: a shared disk
            return b"", True
        is_rest = len(piece) < CHUNK
        end = piece.rfind(b"\n") + 1 or (0 if is_rest else len(piece))
        if is_rest and (has_ended or len(piece) == self.held):
            end = len(piece)
        self.position += end
        self.held = len(piece) - end
        return piece[:end], is_rest

    def _draining(self) -> list[str]:
        """Nodes that are pre-empted soon. Ray has no public call for it that works without its dashboard."""
        if self.position is None:
            return []  # one host asks for all
        try:
            from ray._private.state import state

            return list(state.get_draining_nodes())
        except Exception:
            return []

    def signal(self, number: int) -> None:
        """Send the command a signal; it hands it to its processes."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the command and its processes."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
