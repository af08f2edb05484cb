"""keyed_dropout: the same mask and gradient on every backend, and a mask that follows the keys."""

from __future__ import annotations

import pytest
import torch

from turbogr.ops import keyed_dropout, native, registry
from turbogr.random import Dropout

DROPOUT = Dropout(0.3, 12345678901234567)


def draw(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width))


@pytest.mark.parametrize(("rows", "width"), [(0, 5), (1, 1), (3, 7), (65, 64), (200, 33)])
def test_the_kernel_is_the_definition(rows: int, width: int) -> None:
    if (reason := native.BACKEND.problem) is not None:
        pytest.skip(reason)
    keys = torch.arange(rows) * 2**33 - 7
    results = []
    for backend in ("reference", "cpu"):
        x = draw(rows, width).requires_grad_()
        with registry.backend(backend):
            y = keyed_dropout(x, DROPOUT, keys)
        (y * draw(rows, width).cos()).sum().backward()
        results.append((y.detach(), x.grad))
    for expected, ours in zip(*results, strict=True):
        assert torch.equal(expected == 0, ours == 0)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


def test_the_operator_is_sound() -> None:
    if (reason := native.BACKEND.problem) is not None:
        pytest.skip(reason)
    arguments = (draw(4, 6).requires_grad_(), torch.arange(4), 0.3, 5)
    torch.library.opcheck(torch.ops.turbogr.keyed_dropout, arguments)


def test_a_row_s_mask_follows_its_key() -> None:
    x, keys = torch.ones(50, 40), torch.arange(50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    whole = keyed_dropout(x, DROPOUT, keys)
    assert torch.equal(keyed_dropout(x[order], DROPOUT, keys[order]), whole[order])
    assert 0.6 < (whole != 0).float().mean() < 0.8
    torch.testing.assert_close(whole.max(), torch.tensor(1 / 0.7))


def test_without_dropout_nothing_changes() -> None:
    x = draw(3, 4)
    assert keyed_dropout(x, None, torch.arange(3)) is x
    assert keyed_dropout(x, Dropout(0.0, 1), torch.arange(3)) is x


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="keys must have shape"):
        keyed_dropout(draw(3, 4), DROPOUT, torch.arange(4))
    with pytest.raises(ValueError, match="x must have shape"):
        keyed_dropout(torch.zeros(3), DROPOUT, torch.arange(3))
