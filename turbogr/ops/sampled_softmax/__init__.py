"""The loss of retrieval: cross-entropy of each position's target against its own sampled negatives."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_choice, check_dtypes, check_filled, check_shape
from turbogr.ops.sampled_softmax import reference

NORM_EPS = reference.NORM_EPS

Precision = Literal["fp32", "fp16", "int8"]


def sampled_softmax(
    queries: Tensor,
    rows: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    temperature: float,
    normalize: bool = True,
    log_q: Tensor | None = None,
    groups: Tensor | None = None,
    precision: Precision = "fp32",
    keep: bool = True,
) -> Tensor:
    """Return the loss of every position, [T]: -log(e^{l+} / (e^{l+} + sum_j e^{l-_j})).

    queries [T, d], rows [R, d], positives [T] and negatives [T, n] index `rows`. A logit is the dot product of query
    and row divided by `temperature`; with `normalize` both are scaled to unit length first. A negative equal to its
    position's positive is left out. `log_q` [R], the log probability with which each row is drawn, is subtracted from
    the logits (for samplers that are not uniform).

    `groups` [G + 1] int64 are offsets of groups of positions, none empty, that share negatives [G, n]: scoring is then
    a matrix product per group instead of a matrix-vector product per position. `precision` is that of the negatives'
    vectors, after they are scaled to unit length: fp16, or int8 times a scale per row. Sums are fp32, and gradients
    ignore the rounding. Without `keep` the probabilities [T, n + 1] are not stored for the backward but computed again
    in portions; a backend may ignore it.

    Raises:
        ValueError: shapes that do not fit, an index outside `rows`, a temperature that is not positive, or an unknown
            precision.
    """
    check_shape("queries", queries, (None, None))
    check_shape("rows", rows, (None, queries.shape[1]))
    check_shape("positives", positives, (queries.shape[0],))
    check_shape("negatives", negatives, (queries.shape[0] if groups is None else groups.numel() - 1, None))
    check_filled("queries", queries, 1)
    check_dtypes(queries.dtype, rows=rows)
    if log_q is not None:
        check_shape("log_q", log_q, (rows.shape[0],))
    check_choice("precision", precision, get_args(Precision))
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    function = registry.choose("sampled_softmax", queries.device, queries.dtype)
    out: Tensor = function(queries, rows, positives, negatives, temperature, normalize, log_q, groups, precision, keep)
    return out


def reads_rows_in_place(queries: Tensor) -> bool:
    """Whether the backend for these queries reads rows in place; the reference builds a tensor [T, n, d] of them."""
    return registry.choose("sampled_softmax", queries.device, queries.dtype) is not reference.sampled_softmax


registry.register_operator("sampled_softmax", package=__name__)
