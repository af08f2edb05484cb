"""Every recipe loads and is a model; the published ones have the published sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from turbogr.config import load_config, resolve
from turbogr.models import RetrievalModel

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml"))

# max length, width, blocks, heads, head size, dropout, negatives, epochs
PUBLISHED = {
    "ml-1m/sasrec": (200, 50, 2, 1, 50, 0.2, 128, 101),
    "ml-1m/hstu": (200, 50, 2, 1, 50, 0.2, 128, 101),
    "ml-1m/hstu-large": (200, 50, 8, 2, 25, 0.2, 128, 101),
    "ml-1m/fuxi-alpha-large": (200, 50, 8, 2, 25, 0.2, 128, 101),
    "ml-20m/sasrec": (200, 256, 4, 4, 64, 0.2, 128, 101),
    "ml-20m/hstu": (200, 256, 4, 4, 64, 0.2, 128, 101),
    "ml-20m/hstu-large": (200, 256, 16, 8, 32, 0.2, 128, 101),
    "ml-20m/fuxi-alpha": (200, 256, 2, 4, 64, 0.2, 128, 101),
    "ml-20m/fuxi-alpha-large": (200, 256, 8, 8, 32, 0.2, 128, 101),
    "amazon-books/sasrec": (50, 64, 4, 4, 16, 0.5, 512, 201),
    "amazon-books/hstu": (50, 64, 4, 4, 16, 0.5, 512, 201),
    "amazon-books/hstu-large": (50, 64, 16, 8, 8, 0.5, 512, 201),
    "kuairand-27k/sasrec": (1024, 128, 4, 4, 32, 0.5, 128, 101),
    "kuairand-27k/hstu": (1024, 128, 4, 4, 32, 0.5, 128, 101),
    "kuairand-27k/fuxi-alpha": (1024, 128, 4, 4, 32, 0.5, 128, 101),
}

# The same, of the models that others have not published on these sets
OURS = {
    "amazon-books/fuxi-alpha-large": (50, 64, 16, 8, 8, 0.5, 512, 201),
    "kuairand-27k/hstu-large": (1024, 128, 16, 8, 16, 0.5, 128, 101),
    "kuairand-27k/fuxi-alpha-large": (1024, 128, 16, 8, 16, 0.5, 128, 101),
}


@pytest.mark.parametrize("folder", ["ml-1m", "ml-20m", "amazon-books", "kuairand-27k"])
def test_every_published_set_has_every_model(folder: str) -> None:
    assert {path.stem for path in (FOLDER / folder).iterdir()} >= {"sasrec", "hstu", "hstu-large", "fuxi-alpha-large"}


@pytest.mark.parametrize("recipe", [*PUBLISHED, *OURS])
def test_the_commands_in_a_recipe_are_its_own(recipe: str) -> None:
    text = (FOLDER / f"{recipe}.yaml").read_text()
    data, run = recipe.split("/")[0], recipe.replace("/", "-")
    assert f"# turbogr train recipes/{recipe}.yaml --data data/{data} --out runs/{run}\n" in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_a_model(recipe: str) -> None:
    config = resolve(
        load_config(FOLDER / recipe), num_items=1000, num_sequences=6000, typical_length=30, longest_length=300
    )
    with torch.device("meta"):
        model = RetrievalModel(config.model)
    assert model.num_parameters() > 0


@pytest.mark.parametrize("recipe", [*PUBLISHED, *OURS])
def test_recipes_have_the_settings_that_they_name(recipe: str) -> None:
    config = load_config(FOLDER / f"{recipe}.yaml")
    model = config.model
    assert recipe.split("/")[1].removesuffix("-large") == model.name
    assert model.qk_dim == model.v_dim
    sizes = (model.max_len, model.dim, model.num_blocks, model.num_heads, model.qk_dim, model.dropout)
    assert (*sizes, config.loss.num_negatives, config.train.epochs) == {**PUBLISHED, **OURS}[recipe]
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (1e-3, (0.9, 0.98), 0.0)
    assert (config.data.batch_size, config.data.split) == (128, "leave-one-out")
    assert (config.evaluate.metric, config.loss.temperature) == ("hr@10", 0.05)
