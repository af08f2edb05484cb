"""HSTU attention with the public code's masks: outputs and gradients that the public code itself has written.

`hstu_masks.npz` holds 15 combinations of contextual tokens, targets, windows, full tails and scales. Set
TURBOGR_TEST_GOLDEN to its folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.judging import needs_kernels
from tests.ops.masked_attention import dense_mask
from turbogr.ops import backend, hstu_attention, hstu_ranges

FOLDER = os.environ.get("TURBOGR_TEST_GOLDEN")
CASES = (
    "causal",
    "targets",
    "contextual",
    "contextual_targets",
    "contextual1_targets",
    "window",
    "window_targets",
    "window_full",
    "window_full_targets",
    "contextual_window_targets",
    "contextual_window_full",
    "contextual_window_full_targets",
    "targets_scalar_scale",
    "contextual_targets_row_scale",
    "noncausal_window",
)

pytestmark = pytest.mark.skipif(FOLDER is None, reason="TURBOGR_TEST_GOLDEN does not name the folder of golden files")


def read(case: str) -> dict[str, Any]:
    with np.load(Path(FOLDER or "") / "hstu_masks.npz") as file:
        assert set(CASES) == set(file["cases"].tolist())
        return {name.partition("/")[2]: torch.from_numpy(file[name]) for name in file if name.startswith(f"{case}/")}


def offsets_and_ranges(golden: dict[str, Any]) -> tuple[Any, Any]:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), golden["lengths"].long().cumsum(0)])
    targets = golden.get("num_targets")
    return offsets, hstu_ranges(
        offsets,
        num_targets=None if targets is None else targets.long(),
        num_contextual=int(golden["contextual_seq_len"]),
        window=int(golden["max_attn_len"]),
        full_tail=int(golden["min_full_attn_seq_len"]),
        causal=bool(golden["causal"]),
    )


@pytest.mark.parametrize("case", CASES)
def test_the_ranges_are_the_mask(case: str) -> None:
    golden = read(case)
    offsets, visible = offsets_and_ranges(golden)
    for start, n, expected in zip(offsets.tolist(), golden["lengths"].tolist(), golden["mask"], strict=False):
        assert torch.equal(dense_mask(visible, start, n), expected[:n, :n])


@needs_kernels
@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case: str, name: str) -> None:
    check_output_and_gradients(case, name)


def check_output_and_gradients(case: str, name: str) -> None:
    """Compare a backend with what the public code has written."""
    golden = read(case)
    offsets, visible = offsets_and_ranges(golden)
    scale = golden.get("attn_scale")
    q, k, v = (golden[part].requires_grad_() for part in ("q", "k", "v"))
    with backend(name):
        out = hstu_attention(
            q,
            k,
            v,
            offsets,
            max_len=int(golden["max_seq_len"]),
            visible=visible,
            row_scale=float(scale) if scale is not None and scale.dim() == 0 else scale,
            alpha=float(golden["alpha"]),
        )
        grads = torch.autograd.grad(out, [q, k, v], golden["cotangent"])
    torch.testing.assert_close(out, golden["output"], rtol=1e-5, atol=1e-6)
    for part, grad in zip(("q", "k", "v"), grads, strict=True):
        torch.testing.assert_close(grad, golden[f"grad/{part}"], rtol=1e-4, atol=1e-6)
