"""The command line of a run that takes a second."""

from __future__ import annotations

from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"

# Small and quick, but with more than one batch, epoch and checkpoint.
TINY = [
    *("model.dim=16", "model.max_len=16", "loss.num_negatives=8", "optimizer.warmup_steps=2", "data.batch_size=16"),
    *(
        "evaluate.every=1",
        "evaluate.patience=",
        "evaluate.baselines=[popularity,markov]",
        "train.epochs=2",
        "train.tensorboard=false",
        "train.log_every=2",
    ),
]


def train_arguments(data, out, *more):
    """The command line of a tiny run."""
    settings = [part for value in TINY for part in ("--set", value)]
    return ["train", str(RECIPE), "--data", str(data), "--out", str(out), *settings, *map(str, more)]
