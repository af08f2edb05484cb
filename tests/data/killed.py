"""Prepares over an existing store and dies by SIGKILL before its n-th act on the file system, for every n.

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

from turbogr.data import replacing
from turbogr.data.prepare import prepare
from turbogr.data.store import Store
from turbogr.errors import UserError

EVENTS = ("open", "os.", "shutil.", "tempfile.", "ctypes.dlsym", "fcntl.")


def prepare_and_die(folder: Path, last_act: int) -> None:
    acts = 0

    def count(event: str, args: tuple[object, ...]) -> None:
        nonlocal acts
        if event.startswith(EVENTS) and (event != "open" or str(folder) in str(args[0])):
            acts += 1
            if acts == last_act:
                os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda handle: None  # matters when the machine dies, not when the process does, and takes long
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
        replacing._exchange = lambda first, second: False
    prepare("csv", [folder / "new.csv"], folder / "warm-up", threads=1)  # the children share what this imports
    shutil.rmtree(folder / "warm-up")
    old = Store.open(folder / "store").manifest.content_hash
    for last_act in range(1, 10_000):
        child = os.fork()
        if child == 0:
            prepare_and_die(folder, last_act)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = content_hash(folder / "store")
        state = "aside" if found is None else "old" if found == old else "new"
        print(state, "killed" if os.WIFSIGNALED(status) else "done", flush=True)
        if not os.WIFSIGNALED(status):
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
