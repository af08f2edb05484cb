"""A connection to the job's store that can be opened again, and closed while a thread waits on it.

The time limit of a TCPStore does not hold for all of its calls: a store whose process is stopped never answers. And a
thread that is inside a call when Python ends makes the process abort. So another thread must be able to end the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from turbogr.parallel.sockets import open_sockets, remote_port, shut_down

_RECONNECT_SECONDS = 2.0


class StoreConnection:
    """A connection that nothing else uses. `open_store` connects, within so many seconds; `port`: the store's port."""

    def __init__(self, open_store: Callable[[float], Store], port: int | None = None) -> None:
        self._open_store, self._port = open_store, port
        self._opening = threading.Lock()
        self._store: Store | None = None
        self._closed = False
        self._others: set[str] = set()  # sockets that were there before this connection

    def store(self, seconds: float = _RECONNECT_SECONDS) -> Store:
        """Return the store; connect first, within `seconds`, where there is no connection.

        Raises:
            RuntimeError: it cannot be reached, or the connection is closed.
        """
        with self._opening:
            if self._closed:
                raise RuntimeError("the connection to the store is closed")
            if self._store is None:
                self._others = set(open_sockets().values())
                self._store = self._open_store(seconds)
            return self._store

    def drop(self) -> None:
        """Connect again in the next call of `store`."""
        self._store = None

    def close(self) -> None:
        """Interrupt, and never connect again."""
        self._closed = True
        self.interrupt()

    def interrupt(self) -> None:
        """Make the call in which another thread waits fail; a call that connects may try once more, so call it again.

        It needs a system that lists the open files of a process in /proc.
        """
        if self._port is not None:
            opened = {file: name for file, name in open_sockets().items() if name not in self._others}
            shut_down({file: name for file, name in opened.items() if remote_port(file) == self._port})
            self.drop()
