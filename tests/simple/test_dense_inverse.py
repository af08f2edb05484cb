from __future__ import annotations

import numpy as np
import pytest
import torch

from turbogr.evaluation.job_pool import Interrupted
from turbogr.simple import dense_inverse
from turbogr.simple.dense_inverse import invert_in_place


def positive_definite(size, dtype=torch.float32, seed=0):
    factor = torch.from_numpy(np.random.default_rng(seed).standard_normal((size, 2 * size + 3)))
    return (factor @ factor.T / size + 0.5 * torch.eye(size)).to(dtype)


@pytest.mark.parametrize("block", [1, 7, 16, 64])
@pytest.mark.parametrize("size", [1, 2, 16, 33, 50])
def test_the_inverse(size, block, monkeypatch):
    monkeypatch.setattr(dense_inverse, "BLOCK", block)
    matrix = positive_definite(size, torch.float64)
    expected = torch.linalg.inv(matrix)
    found = invert_in_place(matrix)
    assert found is matrix
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_in_single_precision_with_the_block_of_production():
    matrix = positive_definite(700)
    expected = torch.linalg.inv(matrix.double())
    torch.testing.assert_close(invert_in_place(matrix).double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("size", "block"), [(700, 512), (150, 32)])
def test_the_digits_do_not_depend_on_the_number_of_threads(size, block, threads, monkeypatch):
    monkeypatch.setattr(dense_inverse, "BLOCK", block)
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(invert_in_place(positive_definite(size)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_it_can_be_stopped(monkeypatch):
    monkeypatch.setattr(dense_inverse, "BLOCK", 8)
    calls = iter([False, False, True])
    with pytest.raises(Interrupted):
        invert_in_place(positive_definite(40), lambda: next(calls, True))
