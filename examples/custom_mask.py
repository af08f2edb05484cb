"""An attention mask of your own in one file: an event sees only the events of its own session.

    python examples/custom_mask.py
    turbogr train RECIPE --data DIR --out RUN --plugins examples/custom_mask.py \
        --set model.mask=session --set session.minutes=60
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import turbogr
from turbogr.layers import Mask, Tokens
from turbogr.ops import KeyRanges
from turbogr.plugins import register


@dataclass(frozen=True)
class SessionConfig:
    minutes: int = 30


@register("mask", "session", config=SessionConfig)
class SessionMask(Mask):
    """A session ends where nothing happens for `minutes`. Works with every block that has attention."""

    def ranges(self, tokens: Tokens) -> KeyRanges:
        position, index = tokens.positions(), torch.arange(tokens.times.numel(), device=tokens.times.device)
        pause = tokens.times - tokens.times.roll(1) > 60 * self.options.minutes
        starts = torch.where((position == 0) | pause, index, 0)
        session_start = starts.cummax(0).values  # index of the first event of the session
        return KeyRanges(position - (index - session_start), position + 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        turbogr.prepare("synthetic", [], data, num_users=600, num_items=300)
        for mask in ("causal", "session"):
            run, settings = Path(folder, mask), [f"model.mask={mask}", "train.epochs=5"]
            turbogr.train("quickstart", data, run, overrides=settings, plugins=[__file__])
            print(f"{mask:8} hr@10 {turbogr.evaluate(run, plugins=[__file__]).metrics['hr@10']:.4f}")
