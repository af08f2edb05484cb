"""Golden files of the public implementations through Triton's backend; TURBOGR_TEST_GOLDEN names their folder."""

from __future__ import annotations

import pytest

from tests.ops import test_golden_masks as golden

pytestmark = golden.pytestmark


@pytest.mark.parametrize("case", ["contextual_window_full_targets", "noncausal_window"])
def test_masks(case: str) -> None:
    golden.check_output_and_gradients(case, "triton")
