"""Measure RecTools' HSTUModel on the lengths of a case; runs in RecTools' environment, without TurboGR.

The first of two epochs is the warm-up; tokens are real ones, without padding. The case is read as JSON from standard
input. With `keep_freed_memory` the C library keeps freed memory for the next tensors, as `turbogr train` makes it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

# Options of malloc.h, as in turbogr.ops.native.keep_freed_memory, which cannot be imported here.
_MMAP_MAX, _TRIM_THRESHOLD, _TOP_PAD, _ARENA_MAX = -4, -1, -2, -8
_KEEP = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**26), (_ARENA_MAX, 1))


def main() -> None:
    import numpy as np
    import pandas as pd
    import torch
    from pytorch_lightning import Callback, Trainer
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import HSTUModel

    case = json.load(sys.stdin)
    if case["keep_freed_memory"] and not all(ctypes.CDLL(None).mallopt(*option) == 1 for option in _KEEP):
        raise RuntimeError("the C library refuses to keep freed memory")
    if case["threads"]:
        torch.set_num_threads(case["threads"])
    model = case["model"]
    random = np.random.default_rng(0)
    count = 4 * case["batch_size"]
    lengths = case["median_length"] * np.exp(case["sigma"] * random.standard_normal(count))
    lengths = np.clip(lengths, case["shortest"], model["max_len"]).astype(np.int64) + 1
    total = int(lengths.sum())
    frame = pd.DataFrame(
        {
            Columns.User: np.repeat(np.arange(count), lengths),
            Columns.Item: random.integers(0, case["num_items"], total),
            Columns.Weight: 1,
            Columns.Datetime: pd.to_datetime(np.cumsum(random.integers(1, 5000, total)), unit="s"),
        }
    )
    ends: list[float] = []

    class Clock(Callback):
        def on_train_epoch_end(self, *args: object) -> None:
            ends.append(time.perf_counter())

    def make_trainer() -> Trainer:
        return Trainer(
            max_epochs=2,
            min_epochs=2,
            accelerator="cpu",
            callbacks=[Clock()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    hstu = HSTUModel(
        n_blocks=model["num_blocks"],
        n_heads=model["num_heads"],
        n_factors=model["dim"],
        dropout_rate=model["dropout"],
        session_max_len=model["max_len"],
        loss="sampled_softmax",
        n_negatives=case["num_negatives"],
        batch_size=case["batch_size"],
        get_trainer_func=make_trainer,
    )
    hstu.fit(Dataset.construct(frame))
    tokens = int((lengths - 1).sum())
    print(json.dumps({"tokens_per_second": tokens / (ends[1] - ends[0])}))


if __name__ == "__main__":
    main()
