"""Strict, frozen configs: schema (what there is), load (from and to YAML), resolve (what follows from the data)."""

from turbogr.config.load import (
    current_key,
    dump_config,
    flat_config,
    load_config,
    load_run_config,
    parse_config,
    with_options,
    with_overrides,
    with_plugins,
)
from turbogr.config.override_texts import Overrides, override_texts
from turbogr.config.ranking_section import RankingConfig, RankingTarget
from turbogr.config.recipe_lookup import find_recipe, recipe_file, recipe_names, recipe_summary
from turbogr.config.resolve import resolve
from turbogr.config.resolve_method import ignored_settings, resolve_method
from turbogr.config.schema import (
    HARD_DELAY,
    MAX_TIME_BUCKETS,
    PRESETS,
    Config,
    DataConfig,
    DeliverConfig,
    EvaluateConfig,
    FeatureConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    TableConfig,
    TrainConfig,
)
from turbogr.config.setting_names import meant_settings
from turbogr.config.values import convert, parse, read_value

__all__ = [
    "HARD_DELAY",
    "MAX_TIME_BUCKETS",
    "PRESETS",
    "Config",
    "DataConfig",
    "DeliverConfig",
    "EvaluateConfig",
    "FeatureConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Overrides",
    "ParallelConfig",
    "PipelineConfig",
    "RankingConfig",
    "RankingTarget",
    "TableConfig",
    "TrainConfig",
    "convert",
    "current_key",
    "dump_config",
    "find_recipe",
    "flat_config",
    "ignored_settings",
    "load_config",
    "load_run_config",
    "meant_settings",
    "override_texts",
    "parse",
    "parse_config",
    "read_value",
    "recipe_file",
    "recipe_names",
    "recipe_summary",
    "resolve",
    "resolve_method",
    "with_options",
    "with_overrides",
    "with_plugins",
]
