"""SIGINT, SIGTERM and SIGHUP as a flag that long work looks at, so that a run ends between two steps, not in one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from turbogr.parallel.world import World


class StopRequest:
    """Inside `with`, the first signal sets `signal`; a second one ends the process the usual way.

    A SIGHUP that is ignored, as under nohup, stays so. Outside the main thread, where Python cannot set handlers,
    nothing is caught and `signal` stays None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


class AgreedStop:
    """A StopRequest that is true on all ranks or on none: `signal` changes only where ranks communicate.

    `own_signal` is the signal that this rank has received; a step sends it to the others (`agree`). Long work between
    steps polls `is_requested`, which also sees other ranks' signals; afterwards `agree_now` makes all ranks agree. With
    one rank a signal counts at once.
    """

    def __init__(self, world: World) -> None:
        self._world, self._own = world, StopRequest()
        self._agreed: signal.Signals | None = None
        self._others_requested, self._sent = world.stop_poller(), False

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def signal(self) -> signal.Signals | None:
        return self._own.signal if self._world.size == 1 else self._agreed

    @property
    def own_signal(self) -> int:
        """Number of the signal that this rank has received, 0 for none."""
        return int(self._own.signal or 0)

    def agree(self, number: int) -> None:
        """Take the signal that all ranks have agreed on, 0 for none."""
        if number:
            self._agreed = signal.Signals(number)

    def agree_now(self) -> None:
        """Agree on the signal of any rank; all ranks call it together."""
        self.agree(max(self._world.gather_objects(self.own_signal)))

    def is_requested(self) -> bool:
        """Return whether this rank or another one has received a signal."""
        if self._own and not self._sent:
            self._sent = True
            self._world.request_stop()
        return bool(self._own) or self._others_requested()

    def __enter__(self) -> AgreedStop:
        self._own.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._own.__exit__(kind, value, traceback)
