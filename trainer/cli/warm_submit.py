"""The process in which ``serve`` submits: it has imported all that a submission needs, and forks for each one.

``python -m trainer submit`` imports torch and Hydra for two to three seconds, and then composes, checks and queues a
run in half a second. A fork of this process begins with the imports made. So nothing of one submission stays for the
next, and classes of the user's own are read anew.

The service sends a socket for each submission over the socket that the first argument names::

    service --> fork    the words, as JSON, to the end of the stream
    service <-- fork    what it prints to stderr; then a zero byte and its exit code

A fork that dies ends the stream without a code. This process ends when the service does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys

COMMAND = "trainer.__main__"
NEEDED = (
    *(COMMAND, "hydra.main", "trainer.cli.commands", "trainer.cli.submit", "trainer.cli.help"),
    *("trainer.service.engine", "trainer.worker.train", "torch._dynamo", "torch._inductor", "torch.onnx"),
)
"""Modules that a submission imports; the check of a model's optimizer has torch import its compiler."""
LONGEST_S = 120
"""Longest time of a submission."""


def main() -> None:
    """Fork for each submission, until the service ends."""
    for name in NEEDED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave no zombies
    with socket.socket(fileno=int(sys.argv[1])) as service:
        while True:
            message, found, _, _ = socket.recv_fds(service, 1, 1)
            if not message:
                return
            if not os.fork():
                service.close()
                _submit(socket.socket(fileno=found[0]))
            os.close(found[0])


def _submit(answers: socket.socket) -> None:
    """Be the process of one submission."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.alarm(LONGEST_S)
        with answers.makefile() as words:
            argv = json.load(words)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(answers.fileno(), 2)
        code = importlib.import_module(COMMAND).main(argv)
        sys.stderr.flush()
        answers.sendall(b"\0%d" % code)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
