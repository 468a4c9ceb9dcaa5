"""Drives a headless Chromium over the DevTools protocol, through the pipes of ``--remote-debugging-pipe``."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_S = 60.0
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
"""Keys, and their codes for Windows, which the protocol wants."""


class Page:
    """A page of a browser.

    Args:
        write, read: the browser's pipes. Messages end with a zero byte.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest = write, read, b""
        self._number, self._session = 0, ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def send(self, method: str, **values: Any) -> Any:
        """Send a command; returns its result."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": values, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                more = os.read(self._read, 1 << 16)
                assert more, "the browser has ended"
                self._rest += more
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def size(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window in CSS pixels, and whether the user likes it ``dark`` or ``light``."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def go(self, url: str) -> None:
        """Open an address."""
        self.send("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true; returns its value."""
        end = time.monotonic() + PATIENCE_S
        while not (
            value := self.value(
                f"document.readyState === 'complete' && location.protocol !== 'about:' && ({expression})"
            )
        ):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        about = {"key": key, "windowsVirtualKeyCode": KEYS[key], "code": "Space" if key == " " else key}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.send("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


def _pipe() -> tuple[int, int]:
    """A pipe with numbers from 10 on: Chromium has 3 and 4."""
    pipe = os.pipe()
    found = fcntl.fcntl(pipe[0], fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(pipe[1], fcntl.F_DUPFD_CLOEXEC, 10)
    for one in pipe:
        os.close(one)
    return found


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a new browser, whose profile lies in a folder; the test is skipped where there is no browser."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} is installed")
    (reads, write), (read, writes) = _pipe(), _pipe()
    flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
    shell = f'exec "$0" {flags} --user-data-dir="$1" 3<&{reads} 4>&{writes} {reads}<&- {writes}>&-'
    process = subprocess.Popen(
        ["/bin/bash", "-c", shell, program, str(folder)],
        pass_fds=(reads, writes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(reads)
    os.close(writes)
    try:
        page = Page(write, read)
        yield page
        page.send("Page.close")
    finally:
        os.close(write)
        os.close(read)
        process.kill()
        process.wait()
