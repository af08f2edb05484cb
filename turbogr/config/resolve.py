"""Fill in what a config leaves open: sizes, duration and the sections of components, from the data."""

from __future__ import annotations

import dataclasses
import math

from turbogr.config.from_data import DataFacts, fill_from_data
from turbogr.config.load import with_options
from turbogr.config.schema import Config
from turbogr.errors import UserError
from turbogr.plugins import find


def resolve(
    config: Config,
    *,
    num_items: int,
    num_sequences: int,
    typical_length: int,
    longest_length: int,
    num_events: int = 0,
    covering_length: int = 1,
    popularity_strength: float | None = None,
    reachable_events: int | None = None,
    filter_seen: bool = True,
) -> Config:
    """Fill in everything that follows from the data.

    `typical_length` is a high quantile of the users' history lengths: the model's max_len is the next power of two,
    between 16 and 512, and no longer than the longest history. The width grows with the catalogue: 64 up to 100,000
    items, then 128. A batch is 128 sequences, or fewer where an epoch would have less than 40 batches, down to 16.
    `num_events` are those that train; `covering_length`, `popularity_strength` and `reachable_events` are those
    of `DataFacts`.
    `filter_seen` is whether seen items are left out of the candidates where the config does not say so.
    """
    facts = DataFacts(
        num_items, num_sequences, num_events, covering_length, longest_length, popularity_strength, reachable_events
    )
    config = fill_from_data(with_options(config), facts)
    model = config.model.with_preset()
    assert model.num_heads is not None
    max_len = model.max_len
    if max_len is None:
        wanted = 2 ** math.ceil(math.log2(max(1, typical_length)))
        max_len = max(2, min(max(16, min(512, wanted)), longest_length))
    dim = model.dim
    if dim is None:
        dim = 64 if num_items <= 100_000 else 128
        dim = math.ceil(dim / model.num_heads) * model.num_heads
    model = dataclasses.replace(
        model,
        max_len=max_len,
        max_distance=min(model.max_distance or max_len, max_len),
        dim=dim,
        qk_dim=model.qk_dim or dim // model.num_heads,
        v_dim=model.v_dim or dim // model.num_heads,
    )
    optimizer = config.optimizer
    if optimizer.table_lr is None:
        optimizer = dataclasses.replace(optimizer, table_lr=optimizer.lr)
    data = config.data
    if data.batch_size is None and data.batch_tokens is None:
        data = dataclasses.replace(data, batch_size=min(128, max(16, 2 ** int(math.log2(max(1, num_sequences / 40))))))
    resolved = dataclasses.replace(config, model=model, optimizer=optimizer, data=data)
    evaluate = config.evaluate
    if evaluate.metric is None:
        metric = find("task", config.task).factory.default_metric(resolved)
        evaluate = dataclasses.replace(evaluate, metric=metric)
    if evaluate.filter_seen is None:
        evaluate = dataclasses.replace(evaluate, filter_seen=filter_seen)
    resolved = _resolve_targets(dataclasses.replace(resolved, evaluate=evaluate))
    resolved = _resolve_duration(resolved, num_sequences, typical_length)
    resolved.check()
    return resolved


def _resolve_targets(config: Config) -> Config:
    """Fill in whether repeated items are trained on: where they are not recommended, they are no targets."""
    predicts_items = find("task", config.task).factory.predicts_items
    if config.data.repeated_targets == "skip" and not predicts_items:
        raise UserError(
            f"data.repeated_targets=skip is for tasks that rank items, and '{config.task}' does not; leave it out"
        )
    if config.data.repeated_targets is not None:
        return config
    skip = predicts_items and config.evaluate.excludes_seen
    data = dataclasses.replace(config.data, repeated_targets="skip" if skip else "train")
    return dataclasses.replace(config, data=data)


def _resolve_duration(config: Config, num_sequences: int, typical_length: int) -> Config:
    """Fill in how long to train, to warm up and between evaluations."""
    data, train = config.data, config.train
    sequences = data.batch_size or max(1, (data.batch_tokens or 1) // max(1, typical_length))
    batches = math.ceil(num_sequences / sequences)
    if train.epochs is None and train.steps is None:
        train = dataclasses.replace(train, epochs=min(200, max(5, math.ceil(1000 / batches))))
    steps = min(train.steps or math.inf, batches * (train.epochs or math.inf))
    optimizer, evaluate = config.optimizer, config.evaluate
    if optimizer.warmup_steps is None:
        optimizer = dataclasses.replace(optimizer, warmup_steps=min(100, int(0.05 * steps)))
    if evaluate.every is None:
        evaluate = dataclasses.replace(evaluate, every=max(1, int(steps / batches / 10)))
    return dataclasses.replace(config, train=train, optimizer=optimizer, evaluate=evaluate)
