"""Prepares over an existing store and kills itself before its n-th file system call, for every n.

Run as a script of its own, because it forks: with one thread, preparing CSV starts no others. Prints one line per
death: what the target held afterwards, "aside" where it held nothing and the message names the old store beside it.
With the argument "no-exchange", names cannot be swapped, as on some network file systems.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

from turbogr.data import atomic_folder
from turbogr.data.prepare.preparation import prepare
from turbogr.data.store import Store
from turbogr.errors import UserError

EVENTS = ("open", "os.", "shutil.", "tempfile.", "ctypes.dlsym", "fcntl.")


def prepare_until_killed(folder: Path, last_call: int) -> None:
    calls = 0

    def count(event: str, args: tuple[object, ...]) -> None:
        nonlocal calls
        if event.startswith(EVENTS) and (event != "open" or str(folder) in str(args[0])):
            calls += 1
            if calls == last_call:
                os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda handle: None  # protects against a crash of the machine only, and takes long
    sys.addaudithook(count)
    prepare("csv", [folder / "new.csv"], folder / "store", overwrite=True, threads=1)


def content_hash(store: Path) -> str | None:
    try:
        return Store.open(store).manifest.content_hash
    except UserError as error:
        if "is the old store: rename it back" in str(error):
            return None
        raise


def main(folder: Path, *options: str) -> None:
    warnings.simplefilter("ignore")
    if options == ("no-exchange",):
        atomic_folder._exchange = lambda first, second: False
    prepare("csv", [folder / "new.csv"], folder / "warm-up", threads=1)  # the children share what this imports
    shutil.rmtree(folder / "warm-up")
    old = Store.open(folder / "store").manifest.content_hash
    for last_call in range(1, 10_000):
        child = os.fork()
        if child == 0:
            prepare_until_killed(folder, last_call)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = content_hash(folder / "store")
        state = "aside" if found is None else "old" if found == old else "new"
        print(state, "killed" if os.WIFSIGNALED(status) else "done", flush=True)
        if not os.WIFSIGNALED(status):
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
