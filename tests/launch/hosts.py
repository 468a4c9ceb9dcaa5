"""Several hosts for real: network namespaces joined by a veth pair, each with its own address and folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.pace import patient
from tests.runs import environment, zygote
from tests.zygote import Started
from trainer.host import private
from trainer.strategies.pserver.worker.client import MARGIN_S

SECRET = "0123456789abcdef" * 4
ENDS_WITHIN_S = 20
PATIENCE_S = 1200
"""Test machines are shared."""


@dataclass
class Hosts:
    """Two namespaces; commands are started in them as on two machines, each in a folder of its own."""

    folder: Path
    names: tuple[str, str]
    started: list[Started] = field(default_factory=list)

    def start(self, number: int, *argv: str, secret: str = SECRET, screen: str = "screen.txt") -> Started:
        """``python -m trainer`` on that host; its output goes to a file in the host's folder."""
        folder = self.at(number)
        folder.mkdir(exist_ok=True)
        private.write(folder / "run.secret", secret)
        with (folder / screen).open("w") as file:
            out, command = file.fileno(), [*argv, "launch.secret_file=run.secret", "hydra.run.dir=run"]
            process = zygote().start(command, folder, environment(), out, out, network=self.names[number])
        self.started.append(process)
        return process

    def at(self, number: int) -> Path:
        """A host's folder."""
        return self.folder / f"at{number}"

    def screen(self, number: int) -> str:
        """What a host's command has shown."""
        return (self.at(number) / "screen.txt").read_text()

    def cut(self) -> None:
        """Pull host 1's cable."""
        ip("-n", self.names[1], "link", "set", "eth", "down")

    def close(self) -> None:
        """End everything that runs in the namespaces, and remove them."""
        for process in self.started:
            process.kill()
            process.wait()
        for name in self.names:
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in inside:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(int(pid)).kill()
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def running(self) -> list[str]:
        """Processes of all namespaces."""
        return [p for n in self.names for p in ip("netns", "pids", n).split()]


def end_in_time(started: Sequence[Started], cut: float, timeout_s: float) -> list[int]:
    """The exit codes of commands that have to end by themselves, since a host was cut off at that time.

    Each waits so long for the others (``strategy.timeout_s``), then says why and ends its processes.
    """
    codes = [process.wait(PATIENCE_S) for process in started]
    taken, allowed = time.monotonic() - cut, timeout_s + MARGIN_S + patient(ENDS_WITHIN_S)
    assert taken < allowed, f"they have ended after {taken:.0f} s, more than {allowed:.0f} s"
    return codes


def ip(*argv: str) -> str:
    return subprocess.run(["ip", *argv], check=True, capture_output=True, text=True).stdout


@contextmanager
def joined(folder: Path, addresses: Sequence[str]) -> Iterator[Hosts]:
    """Two hosts with these addresses, IPv4 or IPv6; skips the test where the machine allows no namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (iproute2) on this machine")
    names = (f"trainer-{os.getpid()}-0", f"trainer-{os.getpid()}-1")
    pair = Hosts(folder, names)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth", "netns", names[0], "type", "veth", "peer", "name", "eth", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            which = [f"{address}/64", "dev", "eth", "nodad"] if ":" in address else [f"{address}/24", "dev", "eth"]
            ip("-n", name, "addr", "add", *which)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth", "up")
            ip("netns", "exec", name, "true")
    except subprocess.CalledProcessError as error:
        pair.close()
        pytest.skip(f"this machine allows no network namespaces: {error.stderr.strip()}")
    try:
        yield pair
    finally:
        pair.close()
