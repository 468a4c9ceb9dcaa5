"""What a process prints passes a guard, also in the processes that are forked from it."""

from __future__ import annotations

import io
import os
import select
import threading

from trainer.terminal.streams import Guard


class Held(io.StringIO):
    """A stream whose writer stays in it until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.go.wait()
        return super().write(text)


def test_a_forked_process_prints_though_another_thread_was_printing_when_it_was_forked() -> None:
    held = Held()
    guard = Guard(held)
    guard.write("half a line of the parent's")
    printing = threading.Thread(target=guard.write, args=(", its end\n",))
    printing.start()
    held.entered.wait()
    there, here = os.pipe()
    if not (child := os.fork()):
        try:
            guard.stream = os.fdopen(here, "w")
            guard.write("the child's\n")
            guard.flush()
        finally:
            os._exit(0)
    os.close(here)
    held.go.set()
    printing.join()
    answered, _, _ = select.select([there], [], [], 60)
    told = os.read(there, 100) if answered else b""
    os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(there)
    assert told == b"the child's\n"
    assert held.getvalue() == "half a line of the parent's, its end\n"
