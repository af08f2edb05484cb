"""The loss of retrieval over the whole catalogue: cross-entropy of each position's target against all rows."""

from __future__ import annotations

from torch import Tensor

from turbogr.ops import registry
from turbogr.ops.checks import check_dtypes, check_filled, check_shape


def full_softmax(
    queries: Tensor, rows: Tensor, targets: Tensor, *, temperature: float, normalize: bool = True
) -> Tensor:
    """Return the loss of every position, [T]: log(sum_v e^{l_v}) - l_target.

    queries [T, d], rows [V, d]; targets [T] index `rows`. A logit is the dot product of query and row divided by
    `temperature`; with `normalize` both are scaled to unit length first. The compiled backend works in tiles and never
    holds [T, V] logits.

    Raises:
        ValueError: shapes that do not fit, a target outside `rows`, or a temperature that is not positive.
    """
    check_shape("queries", queries, (None, None))
    check_shape("rows", rows, (None, queries.shape[1]))
    check_shape("targets", targets, (queries.shape[0],))
    check_filled("queries", queries, 1)
    check_dtypes(queries.dtype, rows=rows)
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    function = registry.choose("full_softmax", queries.device, queries.dtype)
    out: Tensor = function(queries, rows, targets, temperature, normalize)
    return out


registry.register_operator("full_softmax", package=__name__)
