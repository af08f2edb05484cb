from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.parallel.ranks import run_ranks
from tests.parallel.training import train_run
from turbogr.config import Config
from turbogr.ops import native
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


def train_on_processors(
    config: Config, store: Path, out: Path, runnable: list[list[str]]
) -> tuple[dict[str, Any], str, list[str]]:
    """Train on ranks that can run these instruction sets; return how it ended, the one in use, and the notes."""
    with (
        mock.patch.object(native, "available_isas", return_value=runnable[int(os.environ["RANK"])]),
        warnings.catch_warnings(record=True) as noted,
    ):
        warnings.simplefilter("always")
        ended = train_run(config, store, out)
        return ended, native.isa(), [str(note.message) for note in noted]


@pytest.mark.skipif(native.BACKEND.problem is not None, reason="the kernels are not built")
def test_ranks_on_different_processors_use_the_best_kernels_that_all_can_run(
    config: Config, store_path: Path, tmp_path: Path
) -> None:
    runnable = [["avx512", "avx2", "generic"], ["avx2", "generic"]]
    if not {"avx512", "avx2"} <= set(native.available_isas()):
        runnable = [["generic"], ["generic"]]  # as good as this machine can show
    (first, *_), (second, *_) = found = run_ranks(2, train_on_processors, config, store_path, tmp_path / "a", runnable)
    assert first["status"] == second["status"] == "finished"
    assert [isa for _, isa, _ in found] == [runnable[1][0]] * 2
    if len(runnable[0]) > 1:
        notes = [[note for note in notes if "instruction sets" in note] for _, _, notes in found]
        assert len(notes[0]) == 1 and "(avx512: rank 0; avx2: rank 1); all use the kernels for avx2" in notes[0][0]
        assert not notes[1], "rank 0 prints for all"


@pytest.mark.skipif(native.BACKEND.problem is not None, reason="the kernels are not built")
def test_ranks_without_common_kernels_are_refused(config: Config, store_path: Path, tmp_path: Path) -> None:
    if "avx2" not in native.available_isas():
        pytest.skip("this machine has one instruction set")
    found = run_ranks(2, train_on_processors, config, store_path, tmp_path / "a", [["avx2"], ["generic"]])
    assert "no instruction set of the kernels in common (avx2: rank 0; generic: rank 1)" in found[0][0]["message"]
    assert not (tmp_path / "a").exists()
