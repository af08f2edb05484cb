"""The record of some training steps in metrics.jsonl, and what of it stands beside the progress bar."""

from __future__ import annotations

from typing import Any

from turbogr.progress import Progress
from turbogr.training.step_clock import time_shares


def training_record(
    progress: Progress, *, epoch: float, peak_flops: float | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the record of the steps in `progress.window`, which have trained on something, and what to show of it."""
    window = progress.window
    seconds = max(window.seconds, 1e-9)
    values = {
        "epoch": epoch,
        "loss": window.loss_sum / window.trained,
        "lr": window.lr,
        # Another quantity has another name: rows that are updated later are not summed yet when a step ends.
        "grad_norm" if window.grad_norm_summed else "grad_norm_of_parts": window.grad_norm,
        "tokens": progress.tokens,
        "tokens_per_second": window.tokens / seconds,
        "sequences_per_second": window.sequences / seconds,
        "elapsed": progress.seconds,
        **time_shares(window, seconds),
    }
    shown = {"loss": f"{values['loss']:.3f}", "tokens/s": f"{values['tokens_per_second']:,.0f}"}
    if peak_flops is not None:
        values["mfu_strict"] = window.strict_flops / seconds / peak_flops
        values["mfu_nominal"] = window.nominal_flops / seconds / peak_flops
        shown["mfu"] = f"{values['mfu_strict']:.1%}"
    return values, shown
