"""The export that is served now, replaced by a newer one at the same place without stopping."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from turbogr.errors import UserError
from turbogr.exports import self_test, standalone


class LiveExport:
    """An opened export; `reload_if_changed` opens what has taken its place.

    A request keeps the export that it was started with, so replacing it disturbs nobody. A new export is used only when
    all its files have the hashes that it says and it gives its own expected lists; else the old one stays.
    """

    def __init__(self, folder: Path, *, search: str = "auto", threads: int | None = None) -> None:
        self.folder, self._search, self._threads = folder, search, threads
        self._seen = _signature(folder)
        try:
            self.current = self._open()
        except standalone.ExportError as error:
            raise UserError(str(error)) from None
        self.problem: str | None = None

    def reload_if_changed(self, *, again: bool = False) -> bool | None:
        """Open the export at the folder if it is another one than before.

        Returns True if it is served now, False if it was refused (`problem` says why), None if nothing changed. One
        that was refused is tried again when it changes, or if `again`.
        """
        found = _signature(self.folder)
        if found is None or (found == self._seen and not again):
            return None
        self._seen = found
        try:
            opened = self._open()
        except (standalone.ExportError, OSError, ValueError, KeyError) as error:
            self.problem = f"{self.folder} was replaced by an export that is not served: {error}"
            return False
        self.current, self.problem = opened, None
        return True

    def _open(self) -> Any:
        facts = standalone.read_facts(self.folder)
        opened = standalone.Recommender(self.folder, search=self._search, threads=self._threads)
        if opened.has_users:
            opened.open_users()
        found = standalone.damages(self.folder, facts)
        if not found:
            cases = json.loads((self.folder / "check.json").read_text(encoding="utf-8"))["cases"]
            found = self_test.differences(opened, cases) if opened.search == "exact" else []
        if found:
            raise standalone.ExportError("; ".join(found[:3]))
        return opened

    def wait_for_change(self, seconds: float) -> None:
        """Return when the folder has changed or the time is over; for tests and scripts."""
        end = time.monotonic() + seconds
        while _signature(self.folder) == self._seen and time.monotonic() < end:
            time.sleep(0.05)


def _signature(folder: Path) -> tuple[int, int, int] | None:
    """Return what changes when the folder is replaced, None while there is nothing."""
    try:
        facts = os.stat(folder / "model.json")
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size
