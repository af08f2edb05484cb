"""The sizes of the paper, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from turbogr.config import PRESETS, Config, ModelConfig, dump_config, load_config, resolve
from turbogr.errors import UserError
from turbogr.models import RetrievalModel
from turbogr.models.flops import block_parameters
from turbogr.plugins import built_in_names

SIZES = ["tiny", "small", "medium", "large", "long"]


def preset(name: str, size: str, **changes: int) -> ModelConfig:
    return ModelConfig(name=name, preset=size, **changes)  # type: ignore[arg-type]


def test_every_preset_has_a_name() -> None:
    assert list(PRESETS) == SIZES


@pytest.mark.parametrize(("size", "millions"), list(zip(SIZES, [0.17, 1.33, 10.52, 83.97, 83.97], strict=True)))
def test_hstu_has_the_paper_s_dense_parameters(size: str, millions: float) -> None:
    assert round(block_parameters(preset("hstu", size)) / 1e6, 2) == millions


@pytest.mark.parametrize(("size", "millions"), list(zip(SIZES, [0.41, 3.18, 25.22, 201.55, 201.55], strict=True)))
@pytest.mark.parametrize("name", ["fuxi-alpha", "fuxi"])
def test_fuxi_has_about_the_paper_s_dense_parameters(name: str, size: str, millions: float) -> None:
    """The published figures do not fit any block of 12 d² + O(d) to the last digit (see docs/models/fuxi.md)."""
    sizes = PRESETS[size]
    d, time = sizes["dim"], 33 if name == "fuxi-alpha" else 3
    count = block_parameters(preset(name, size))
    assert count == sizes["num_blocks"] * (12 * d * d + d + 2 * 2048 - 1 + time)
    assert abs(count / 1e6 - millions) / millions < (0.025 if size == "tiny" else 0.006)


@pytest.mark.parametrize("name", built_in_names("block"))
@pytest.mark.parametrize("size", SIZES)
def test_a_preset_is_a_whole_model(name: str, size: str) -> None:
    with torch.device("meta"):
        model = RetrievalModel(preset(name, size))
    sizes = PRESETS[size]
    assert len(model.blocks) == sizes["num_blocks"]
    assert model.num_parameters() == block_parameters(preset(name, size)) + sizes["max_len"] * sizes["dim"]


def test_a_recipe_names_a_preset_and_may_change_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: fuxi, preset: small, num_blocks: 3, max_len: 100}\n")
    config = resolve(load_config(recipe), num_items=9, num_sequences=6000, typical_length=5, longest_length=9)
    model = config.model
    assert (model.dim, model.num_blocks, model.num_heads, model.qk_dim, model.v_dim) == (256, 3, 8, 32, 32)
    assert (model.max_len, model.max_distance, model.num_time_buckets) == (100, 100, 32)
    again = tmp_path / "config.yaml"
    again.write_text(dump_config(config))
    assert resolve(load_config(again), num_items=9, num_sequences=6000, typical_length=5, longest_length=9) == config


def test_head_sizes_follow_what_is_set_over_a_preset() -> None:
    model = preset("hstu", "tiny", dim=64, num_heads=2).with_preset()
    assert (model.dim, model.num_heads, model.qk_dim, model.v_dim) == (64, 2, 32, 32)
    with pytest.raises(UserError, match=r"model.dim 60 does not divide into model.num_heads 8"):
        preset("hstu", "tiny", dim=60).check()


def test_without_a_preset_the_defaults_hold() -> None:
    model = resolve(Config(), num_items=9, num_sequences=6000, typical_length=50, longest_length=90).model
    assert (model.num_blocks, model.num_heads, model.num_time_buckets, model.max_distance) == (2, 1, 128, 64)


def test_a_misspelt_preset_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {preset: larg}\n")
    with pytest.raises(UserError, match=r"'larg'.*'large'"):
        load_config(recipe)
