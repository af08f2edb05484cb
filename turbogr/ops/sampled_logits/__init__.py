"""Logits of each position's own candidates, for losses that are formulas of logits."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_dtypes, check_filled, check_shape


def sampled_logits(
    queries: Tensor, rows: Tensor, index: Tensor, *, temperature: float, normalize: bool = True
) -> Tensor:
    """Return the logits [T, n] of every position's candidates.

    queries [T, d], rows [R, d]; index [T, n] indexes `rows`. A logit is the dot product of query and row divided by
    `temperature`; with `normalize` both are scaled to unit length first.

    Raises:
        ValueError: shapes that do not fit, an index outside `rows`, or a temperature that is not positive.
    """
    check_shape("queries", queries, (None, None))
    check_shape("rows", rows, (None, queries.shape[1]))
    check_shape("index", index, (queries.shape[0], None))
    check_filled("queries", queries, 1)
    check_dtypes(queries.dtype, rows=rows)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    function = registry.choose("sampled_logits", queries.device, queries.dtype)
    out: Tensor = function(queries, rows, index, temperature, normalize)
    return out


registry.register_operator("sampled_logits", package=__name__)
