"""What torchrun starts in `test_elastic.py`: `turbogr train` with steps that take some time."""

from __future__ import annotations

import sys
import time
from typing import Any

from turbogr.cli import main
from turbogr.training.step import Stepper

_SECONDS_PER_STEP = 0.2


def _slow_down() -> None:
    compute = Stepper.compute

    def slow(self: Stepper, batch: Any, sets: Any, step: int) -> Any:
        time.sleep(_SECONDS_PER_STEP)
        return compute(self, batch, sets, step)

    Stepper.compute = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    _slow_down()
    sys.exit(main(sys.argv[1:]))
