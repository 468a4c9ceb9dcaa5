"""A TCP port that can be closed to newcomers for a while; who is connected stays."""

from __future__ import annotations

import ctypes
import socket
import struct

from trainer.host import descriptors
from trainer.host.addresses import with_port

BACKLOG = descriptors.RESERVE // 2
"""Connections that wait to be accepted. Where the reserve is in use, each takes the descriptor of a file, so they are
fewer than the reserve."""
ATTACH_FILTER, DETACH_FILTER = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux (socket(7))."""
DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A program of the kernel's packet filter (BPF) of one instruction: of each packet, keep nothing."""


class Listener:
    """A TCP socket that listens. ZeroMQ takes it over by its number, see :meth:`handed_over`.

    Args:
        host: address to listen at; port: 0: a free one.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self.close()
            raise
        self.endpoint = f"tcp://{with_port(host, self._socket.getsockname()[1])}"

    def handed_over(self) -> int:
        """Return a descriptor of the socket, which its taker closes."""
        return self._socket.dup().detach()

    def let_in(self, newcomers: bool) -> None:
        """Let newcomers in again, or drop their packets, after which they try again themselves. Where the kernel has no
        such filter, they are let in."""
        try:
            if newcomers:
                self._socket.setsockopt(socket.SOL_SOCKET, DETACH_FILTER, 0)
            else:
                program = ctypes.create_string_buffer(DROP_ALL)
                one = struct.pack("@HP", 1, ctypes.addressof(program))
                self._socket.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, one)
        except OSError:  # no filter is there to be taken away, or none can be set
            return

    def close(self) -> None:
        """Close this descriptor of the socket."""
        self._socket.close()
