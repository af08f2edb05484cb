"""Shut down connections that a library (gloo, a TCPStore) has opened in this process.

gloo cannot cancel a message: a thread that waits for one waits until the time limit. But if the connection is shut
down, the wait fails at once, on this rank and on the other one. The connections are found in the system's list of open
files.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

_OPEN_FILES = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Return {file descriptor: unique name} of the open sockets; empty if the system does not list them."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir(_OPEN_FILES):
            with suppress(OSError):  # the descriptor of the listing itself is closed by now
                target = os.readlink(f"{_OPEN_FILES}/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def shut_down(sockets: Mapping[int, str]) -> None:
    """Shut down those sockets of an earlier `open_sockets` that are still open; their owner must still close them."""
    now = open_sockets()
    for descriptor, name in sockets.items():
        if now.get(descriptor) == name:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # fails for a listening socket: gloo must keep its listener

                connection.shutdown(socket.SHUT_RDWR)


def remote_port(descriptor: int) -> int | None:
    """Return the port at the other end of a connected socket, None if it has none."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        address = connection.getpeername()
        return int(address[1]) if isinstance(address, tuple) else None
    return None
