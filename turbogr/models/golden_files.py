"""Reading a golden file of any kind."""

from __future__ import annotations

from pathlib import Path

from turbogr.models.golden import Golden, load_arrays
from turbogr.models.golden_masks import MaskGolden
from turbogr.models.golden_ranking import RankingGolden


def read_golden(path: Path | str) -> Golden | RankingGolden | MaskGolden:
    """Read and check a golden file; its keys say which kind it is.

    Raises:
        UserError: it cannot be read, or its content does not fit together.
    """
    arrays = load_arrays(path)
    if "cases" in arrays:
        return MaskGolden.of(arrays, path)
    if "config" in arrays and "features" in arrays:
        return RankingGolden.of(arrays, path)
    return Golden.of(arrays, path)
