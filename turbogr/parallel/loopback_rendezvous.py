"""A rendezvous of torch's elastic agent for ranks of one machine: its store listens on the loopback address alone.

torch's own rendezvous listens on all addresses of the machine, even if its endpoint is localhost. The store accepts
anybody who can connect, so a job of one machine should not be open to the network.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "turbogr-loopback"

_ADDRESS = "127.0.0.1"
_TIMEOUT = timedelta(minutes=5)


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of a single agent, which hosts the store of its ranks."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        with socket.create_server((_ADDRESS, 0), backlog=128) as listener:
            port = listener.getsockname()[1]
            self._server = dist.TCPStore(  # type: ignore[attr-defined]
                _ADDRESS,
                port,
                world_size=None,
                is_master=True,
                timeout=_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self._address = RendezvousStoreInfo(_ADDRESS, port)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Return at once: there is no other agent to wait for."""
        return RendezvousInfo(PrefixStore("agent", self._server), 0, 1, self._address)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: no other agent could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Make the rendezvous known to the elastic launcher by the name `BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
