from __future__ import annotations

import pytest
import torch

from turbogr.parallel.row_encoding import Precision, decode, empty_message, encode

_ERROR: dict[Precision, float] = {"fp16": 2.0**-11, "bf16": 2.0**-8}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("scale", [1e-38, 1e-12, 1.0, 1e12, 1e37])
def test_the_error_is_relative_to_the_row(precision: Precision, scale: float) -> None:
    rows = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)) * scale
    found = decode(encode(rows, precision), precision)
    error = (found - rows).abs().amax(1) / rows.abs().amax(1)
    assert error.max() <= _ERROR[precision]
    assert error.max() > 0.2 * _ERROR[precision], "half precision must show, or it is not what is sent"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_special_values_are_preserved(precision: Precision) -> None:
    rows = torch.tensor([[0.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0], [1.0, -0.5]])
    message = encode(rows, precision)
    assert message.shape == empty_message(4, 2, precision, rows.device).shape
    found = decode(message, precision)
    assert torch.equal(found.isnan(), rows.isnan()) and torch.equal(found.isinf(), rows.isinf())
    assert torch.equal(found[[0, 3]], rows[[0, 3]])
    assert decode(encode(rows[:0], precision), precision).shape == (0, 2)
    extremes = torch.tensor([[3e38, -1.0], [1e-42, 0.0]])
    assert decode(encode(extremes, precision), precision).isfinite().all()
