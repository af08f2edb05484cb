"""A disk of a few megabytes that can be filled, and a loopback link that can be slowed, for this process alone.

Both are in namespaces of the kernel, which nobody else sees and which end with the last process in them. `enter` starts
this program again inside (`unshare` of util-linux), as root or with a user namespace of its own; so nothing of the
machine changes, and nothing is left, however the program ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from turbogr.errors import UserError

_INSIDE = "TURBOGR_CHAOS_INSIDE"
_NAMESPACES = ("--mount", "--net")
_AS_USER = ("--user", "--map-root-user")
_QUEUE_BYTES = 1 << 26  # nothing is dropped: a lost packet would cost TCP 200 ms
_MTU = 1500  # small packets, so that a few of them are as much as passes at once
_BURST_BYTES = 1 << 13
_TRIAL = """
set -e
mount -t tmpfs -o size=64k turbogr /mnt
ip link set lo up
tc qdisc add dev lo root tbf rate 1mbit burst 8k limit 1m
"""

NEEDS = {"disk": "a file system in memory", "link": "a network of its own with `tc`"}
"""The kinds of faults that need surroundings, and what."""


def is_inside() -> bool:
    """Whether this process has surroundings of its own."""
    return os.environ.get(_INSIDE) == "1"


def way_in() -> list[str] | None:
    """Return the command that starts a program with surroundings of its own; None where the system allows none."""
    if not all(shutil.which(program) for program in ("unshare", "mount", "ip", "tc")):
        return None
    for options in ([] if os.geteuid() else [_NAMESPACES], [(*_NAMESPACES, *_AS_USER)]):
        for chosen in options:
            command = ["unshare", *chosen]
            if subprocess.run([*command, "sh", "-c", _TRIAL], capture_output=True).returncode == 0:
                return command
    return None


def enter(arguments: Sequence[str], kinds: Sequence[str]) -> None:
    """Start `turbogr ARGUMENTS` again inside surroundings if one of the kinds needs them; return if that is done.

    Raises:
        UserError: this machine does not allow them.
    """
    needed = [kind for kind in kinds if kind in NEEDS]
    if is_inside() or not needed:
        return
    command = way_in()
    if command is None:
        others = ",".join(kind for kind in kinds if kind not in NEEDS)
        remedy = f", or leave these kinds out: --kinds {others}" if others else ""
        raise UserError(
            f"faults of the kinds {', '.join(needed)} need {' and '.join(NEEDS[kind] for kind in needed)}, and this "
            "machine gives this user no namespaces for them (Linux with util-linux and iproute2, as root or with user "
            f"namespaces); start it on such a machine{remedy}"
        )
    os.environ[_INSIDE] = "1"
    os.execvp(command[0], [*command, sys.executable, "-m", "turbogr", *arguments])


class Disk:
    """The disk of a job: inside surroundings a file system of `num_bytes` in memory, else a plain folder."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder, self._filler = folder, folder / "filler"
        folder.mkdir()
        if is_inside():
            _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "turbogr", str(folder))

    def fill(self) -> None:
        """Leave no byte free."""
        handle = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            for size in (1 << 16, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        os.write(handle, bytes(size))
        finally:
            os.close(handle)

    def free(self) -> None:
        """Undo `fill`."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        if is_inside():
            subprocess.run(["umount", "--lazy", str(self.folder)], capture_output=True)


class Link:
    """The loopback of these surroundings."""

    def __init__(self) -> None:
        if is_inside():
            _run("ip", "link", "set", "lo", "mtu", str(_MTU), "up")

    def slow(self, megabits: float) -> None:
        """Let all messages share so many Mbit/s."""
        rate = f"{round(megabits * 1e6)}bit"
        bucket = ["tbf", "rate", rate, "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES)]
        _run("tc", "qdisc", "replace", "dev", "lo", "root", *bucket)

    def delayed(self) -> int:
        """Return how many times a message has had to wait since `slow`."""
        found = json.loads(_run("tc", "-s", "-j", "qdisc", "show", "dev", "lo"))
        return sum(int(queue.get("overlimits", 0)) for queue in found if queue.get("kind") == "tbf")

    def restore(self) -> None:
        """Undo `slow`; messages that wait are sent at once."""
        _run("tc", "qdisc", "replace", "dev", "lo", "root", "pfifo")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise UserError(f"{command[0]} failed: {error.stderr.strip()}; start `turbogr chaos` as root") from error
