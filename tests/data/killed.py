"""Prepares over an existing store and dies by SIGKILL before its n-th act on the file system, for every n.

Run as a script of its own, because it forks: with one thread, preparing CSV starts no others. Prints one line per
death: what the target held afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

from turbogr.data.prepare import prepare
from turbogr.data.store import Store

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


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    prepare("csv", [folder / "new.csv"], folder / "warm-up", threads=1)  # the children share what this imports
    shutil.rmtree(folder / "warm-up")
    old = Store.open(folder / "store").manifest.content_hash
    for last_act in range(1, 10_000):
        child = os.fork()
        if child == 0:
            prepare_and_die(folder, last_act)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = Store.open(folder / "store").manifest.content_hash
        print("old" if found == old else "new", "killed" if os.WIFSIGNALED(status) else "done", flush=True)
        if not os.WIFSIGNALED(status):
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
