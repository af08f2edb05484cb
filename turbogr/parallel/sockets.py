"""Connections of this process that something else has opened and keeps, found by what the system lists.

gloo cannot be told to give a message up: a thread that waits for one waits until its time limit. But when the
connection is shut down under it, it fails at once, and so does whoever waits at the other end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

_LISTED = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Return the sockets that are open now, by file descriptor, with a name that no other socket gets; none where the
    system does not list them."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for name in os.listdir(_LISTED):
            with suppress(OSError):  # the descriptor of the listing itself is gone
                target = os.readlink(f"{_LISTED}/{name}")
                if target.startswith("socket:"):
                    found[int(name)] = target
    return found


def shut(sockets: Mapping[int, str]) -> None:
    """End the connections of `open_sockets` that are still the same; their owner must close them as usual."""
    now = open_sockets()
    for descriptor, name in sockets.items():
        if now.get(descriptor) == name:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # fails where one is waited for: gloo must not lose its listener
                connection.shutdown(socket.SHUT_RDWR)
