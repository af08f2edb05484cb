"""The config of a run that fits a simple method: what it uses of a recipe, and what has no meaning for it."""

from __future__ import annotations

import dataclasses

from turbogr.config.load import flat_config, with_options
from turbogr.config.schema import (
    Config,
    DataConfig,
    EvaluateConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from turbogr.errors import UserError
from turbogr.plugins import find

_USED_BY_TRAIN = ("seed", "threads", "backend", "copy_data", "device", "tensorboard", "profile", "timeline")
_USED_BY_EVALUATE = ("part", "ks", "baselines", "metric", "metrics", "filter_seen", "batch_size", "users", "users_seed")
_FOLLOW = ("data.repeated_targets", "defaults")  # what recipes for any log leave to the data, for networks


def resolve_method(config: Config, *, filter_seen: bool) -> Config:
    """Fill in what follows from the data, and set everything that a simple method has no use for to its default.

    `filter_seen` is whether seen items are left out of the candidates where the config does not say so. The method's
    own settings stay unset where they are to be chosen.
    """
    if config.task != "retrieval":
        raise UserError(
            f"model.name is '{config.method}', which recommends items, and the task is '{config.task}'; set "
            "task=retrieval or another model.name"
        )
    config = with_options(_stripped(config))
    evaluate = config.evaluate
    if evaluate.metric is None:
        evaluate = dataclasses.replace(evaluate, metric=find("task", config.task).factory.default_metric(config))
    if evaluate.filter_seen is None:
        evaluate = dataclasses.replace(evaluate, filter_seen=filter_seen)
    resolved = dataclasses.replace(config, evaluate=evaluate)
    resolved.check()
    return resolved


def ignored_settings(config: Config) -> list[str]:
    """Return the settings that are not at their defaults and have no meaning for the simple method of a config."""
    before, after = flat_config(config), flat_config(_stripped(config))
    return [key for key, value in before.items() if key not in _FOLLOW and after.get(key) != value]


def _stripped(config: Config) -> Config:
    """Return the config with defaults wherever a simple method has no use for a setting."""
    train = {name: getattr(config.train, name) for name in _USED_BY_TRAIN}
    evaluate = {name: getattr(config.evaluate, name) for name in _USED_BY_EVALUATE}
    return Config(
        plugins=config.plugins,
        task=config.task,
        model=ModelConfig(name=config.model.name),
        loss=LossConfig(),
        optimizer=OptimizerConfig(),
        data=DataConfig(split=config.data.split),
        evaluate=EvaluateConfig(**evaluate),
        deliver=config.deliver,
        train=TrainConfig(**train),
        parallel=ParallelConfig(timeout=config.parallel.timeout),
        pipeline=PipelineConfig(),
        options={name: section for name, section in config.options.items() if name == config.model.name},
    )
