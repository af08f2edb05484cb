"""Where the time of a training step goes, by operator.

Every operator that PyTorch runs passes through a dispatch mode, which times it. That costs some microseconds a call,
needs nothing to be installed and prints nothing. The matrix products inside one of our operators count as that
operator's time. On an accelerator the times would be those of launching, so only steps on a CPU are profiled.
"""

from __future__ import annotations

import time
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

OTHERS = "all other operators"
OUTSIDE = "between operators"

_SHOWN = 12


class Profiler:
    """Times what runs inside `with profiler:`, any number of times."""

    def __init__(self) -> None:
        self.steps = 0
        self._seconds = 0.0
        self._clock = _Clock()

    def __enter__(self) -> Profiler:
        self._clock.__enter__()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self._seconds += time.perf_counter() - self._started
        self._clock.__exit__(*error)
        self.steps += 1

    def milliseconds(self) -> dict[str, float]:
        """Mean milliseconds of a step by operator, largest first; they add up to the whole step.

        Operators beyond the first twelve come together under `OTHERS`, and what is spent in Python and in PyTorch's
        own bookkeeping under `OUTSIDE`.
        """
        ranked = sorted(self._clock.seconds.items(), key=lambda entry: -entry[1])
        shares = dict(ranked[:_SHOWN])
        shares[OTHERS] = sum(seconds for _, seconds in ranked[_SHOWN:])
        shares[OUTSIDE] = self._seconds - sum(self._clock.seconds.values())
        return {name: 1e3 * seconds / max(1, self.steps) for name, seconds in shares.items() if seconds > 0}


class _Clock(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        seconds = time.perf_counter() - started
        name = str(func.name()).partition("::")[2].partition(".")[0]
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        return out
