"""Several nodes emulated on this machine: network namespaces, connected by a switch with links of a given rate.

A node is a namespace with its own loopback, so ranks of one node communicate through memory, and an interface whose
traffic passes a token bucket in both directions, like a full-duplex network card. The switch is a namespace too: the
machine's own network is not changed, and everything is gone when the namespaces are deleted. This needs Linux, iproute2
and root; without them the nodes are only names, and all ranks communicate over one loopback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from turbogr.errors import UserError

_PREFIX = "turbogr"
_INTERFACE = "eth0"
_BURST_SECONDS = 0.001  # this much of the rate may pass at once, but at least a segment of the largest size
_LARGEST_SEGMENT = 1 << 16
_QUEUE_BYTES = 1 << 26  # deep enough that nothing is dropped: a lost packet would cost TCP 200 ms
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Node:
    """An emulated machine: its address, and the namespace to start ranks in (None: the machine's own)."""

    address: str = "127.0.0.1"
    namespace: str | None = None

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs `arguments` on the node."""
        return list(arguments) if self.namespace is None else ["ip", "netns", "exec", self.namespace, *arguments]

    def environment(self) -> dict[str, str]:
        """Return the variables that keep gloo on the node's link."""
        return {} if self.namespace is None else {"GLOO_SOCKET_IFNAME": _INTERFACE}


@dataclass(frozen=True)
class Network:
    """`nodes`, and a note that says how they are connected."""

    nodes: tuple[Node, ...]
    note: str

    @property
    def is_emulated(self) -> bool:
        """Whether the nodes have links of their own."""
        return self.nodes[0].namespace is not None


LOOPBACK = Network((Node(),), "one machine")


@contextmanager
def emulated_network(num_nodes: int, megabits: float) -> Iterator[Network]:
    """Connect `num_nodes` nodes by links of `megabits` Mbit/s each during the `with` block.

    At its end, also after an exception, processes left on the nodes are killed and the namespaces removed. If a run was
    killed, the next one removes its namespaces. If namespaces cannot be created, all nodes are this machine and the
    note says why.
    """
    assert 0 < num_nodes < 255, num_nodes
    if megabits <= 0:
        raise UserError(f"a link of {megabits:g} Mbit/s carries nothing; give a positive rate")
    remove_leftovers()
    prefix = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-"
    try:
        try:
            network = _build(prefix, num_nodes, megabits)
        except (OSError, subprocess.CalledProcessError) as error:
            network = Network((Node(),) * num_nodes, _why_not(error))
        yield network
    finally:
        with _signals_blocked():
            for name in _namespaces(prefix):
                _remove(name)


def remove_leftovers() -> None:
    """Remove the namespaces of runs that have ended, and kill the processes that are still in them."""
    for name in _namespaces(f"{_PREFIX}-"):
        pid, _, started = name.removeprefix(f"{_PREFIX}-").rpartition("-")[0].partition("-")
        if started and started != _started(int(pid)):
            _remove(name)


def _build(prefix: str, num_nodes: int, megabits: float) -> Network:
    switch = f"{prefix}switch"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "switch", "up", "type", "bridge")
    nodes = tuple(Node(f"10.0.0.{index + 1}", f"{prefix}{index}") for index in range(num_nodes))
    for index, node in enumerate(nodes):
        name, port = str(node.namespace), f"port{index}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        pair = ["type", "veth", "peer", "name", port, "netns", switch]
        _run("ip", "link", "add", "name", _INTERFACE, "netns", name, *pair)
        _run("ip", "-n", name, "address", "add", f"{node.address}/24", "dev", _INTERFACE)
        _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
        _run("ip", "-n", name, "link", "set", _INTERFACE, "up")
        _limit(name, _INTERFACE, megabits)
        _limit(switch, port, megabits)
    return Network(nodes, f"{num_nodes} nodes in network namespaces, connected by links of {megabits:g} Mbit/s")


def _limit(namespace: str, interface: str, megabits: float) -> None:
    bits = round(megabits * 1e6)
    burst = max(2 * _LARGEST_SEGMENT, round(bits / 8 * _BURST_SECONDS))
    bucket = ["tbf", "rate", f"{bits}bit", "burst", str(burst), "limit", str(_QUEUE_BYTES)]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)


def _why_not(error: OSError | subprocess.CalledProcessError) -> str:
    reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (
        f"no network namespaces on this machine ({' '.join(reason.split())}), which need iproute2 and root: all nodes "
        "communicate over loopback, between nodes as fast as inside one"
    )


def _namespaces(prefix: str) -> list[str]:
    """Return the names of the namespaces that start with `prefix`; none if they cannot be listed."""
    try:
        listed = _run("ip", "netns", "list").splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [name for line in listed if (name := line.split()[0]).startswith(prefix)]


def _remove(name: str) -> None:
    """Kill the processes of a namespace and delete it, as far as permissions allow."""
    deadline = time.monotonic() + _END_SECONDS
    with suppress(OSError, subprocess.CalledProcessError):
        while (pids := _run("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.01)
    with suppress(OSError, subprocess.CalledProcessError):
        _run("ip", "netns", "delete", name)


def _started(pid: int) -> str:
    """Return when a process started, in ticks since boot, because process ids are reused; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Delay signals until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
