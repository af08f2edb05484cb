"""Collectives on an accelerator are issued by one thread of the process, in the order in which they are asked for.

The libraries of accelerators (NCCL, RCCL, HCCL) do not promise that communicators work when several threads use them,
and may hang when ranks start collectives in different orders. So on an accelerator the stages that exchange vectors run
in the order of the main thread (`turbogr.training.pipeline.workers.Streamed`), and what they start is started here.
The stream is the caller's. Ids and counts are in host memory and go over gloo, which has no such rule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from turbogr.streams import current_stream, on_stream

_T = TypeVar("_T")


def issue(device: torch.device, start: Callable[[], _T]) -> _T:
    """Return start(), which starts a collective on tensors of a device; on an accelerator the one thread calls it."""
    if device.type == "cpu":
        return start()
    result: _T = _issuer.call(device, start)
    return result


class _Issuer:
    """A thread that begins with the first call and never keeps the process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], torch.device, Any, Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, device: torch.device, start: Callable[[], Any]) -> Any:
        if threading.current_thread() is self._thread:
            return start()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="turbogr-collectives", daemon=True)
                self._thread.start()
        future: Future[Any] = Future()
        self._calls.put((future, device, current_stream(device), start))
        return future.result()

    def _run(self) -> None:
        while True:
            future, device, stream, start = self._calls.get()
            try:
                with on_stream(device, stream):
                    future.set_result(start())
            except BaseException as error:  # the caller must get every error: nobody sees this thread end
                future.set_exception(error)


_issuer = _Issuer()
