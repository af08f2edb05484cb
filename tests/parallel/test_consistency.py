from __future__ import annotations

import torch

from turbogr.parallel.consistency import code_hash, hash_bits
from turbogr.parallel.world import first_difference


def test_the_hash_sees_one_bit_and_one_exchange() -> None:
    tensors = [torch.randn(3, 5), torch.randn(7)]
    before = hash_bits(tensors)
    assert hash_bits([tensor.clone() for tensor in tensors]) == before
    flipped = [tensors[0].clone(), tensors[1]]
    flipped[0].view(torch.int32)[2, 3] ^= 1
    assert hash_bits(flipped) != before
    exchanged = [tensors[0], tensors[1].flip(0)]
    assert hash_bits(exchanged) != before
    assert -(2**63) <= before < 2**63


def test_the_hash_weights_every_word_by_its_position() -> None:
    tensors = [torch.randn(70_000), torch.tensor(-3), torch.randn(5, 3)]
    bits = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors]).tolist()
    expected = sum(value * (2 * position + 1) for position, value in enumerate(bits))
    assert (hash_bits(tensors) - expected) % 2**64 == 0


def test_the_first_difference_names_the_rank_and_the_key() -> None:
    assert first_difference([{"a": 1, "b": 2}, {"a": 1, "b": 2}]) is None
    assert first_difference([{"a": 1}, {"a": 1}, {"a": 2}]) == (2, "a")
    assert first_difference([{"a": 1}, {"a": 1, "b": 0}]) == (1, "b")


def test_the_code_has_a_hash() -> None:
    assert len(code_hash()) == 12
