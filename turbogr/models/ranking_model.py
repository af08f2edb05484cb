"""Ranking: from a user, a history with actions, and items, to what the user would do with each item.

The model owns its dense parameters only. It computes from the vectors of ids and features, which the caller fetches
from wherever the tables live; `turbogr.tasks.ranking` says which rows a batch needs. `ranking_layout.py` says which
tokens there are and what they see.

Shape legend: T events and candidates, B users, S tokens of all sequences, N queries, A actions, D model width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from turbogr.config import ModelConfig, RankingConfig
from turbogr.errors import UserError
from turbogr.layers.block import Block
from turbogr.layers.tokens import Tokens
from turbogr.models.feature_tower import Feature, FeatureTower
from turbogr.models.ranking_layout import RankingLayout
from turbogr.models.ranking_parts import ActionVectors, head_mlp, reset_linears
from turbogr.ops import keyed_dropout
from turbogr.plugins import find

_INPUT_SITE, _FIRST_BLOCK_SITE, _HEAD_SITE = 0, 2, 0xEAD
_HOUR, _DAY = 3600, 86400
_CLOCK_FLOATS = 4


class RankingInput(NamedTuple):
    """`items` [T, width] and `users` [B, width] have the features' values by name, ids included.

    `actions` [T, A] is what was done, NaN where it is not known; it is read at history tokens alone. `times` [T] are
    those of events and requests in seconds, `keys` [T] and `user_keys` [B] name them for dropout.
    """

    items: Mapping[str, Tensor]
    users: Mapping[str, Tensor]
    actions: Tensor
    times: Tensor
    keys: Tensor
    user_keys: Tensor


class RankingModel(nn.Module):
    """The config must be resolved. Parameters have no values until `reset_parameters`.

    `item_features` are those of items and events, `user_features` those of users; ids are among them. `base` is the
    initial output of every task.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranking: RankingConfig,
        item_features: Sequence[Feature],
        user_features: Sequence[Feature],
        *,
        base: Sequence[float] = (),
        options: Mapping[str, Any] | None = None,
        recompute: bool = False,
        precision: str = "fp32",
    ) -> None:
        super().__init__()
        config = config.with_preset()
        assert config.dim and config.max_len and config.num_blocks, "resolve the config first"
        self.config, self.ranking, self.recompute, self.precision = config, ranking, recompute, precision
        self.dim, self.max_len, hidden = config.dim, config.max_len, ranking.hidden or config.dim
        self.base = list(base)
        self.items = FeatureTower(item_features, self.dim, hidden, _CLOCK_FLOATS)
        self.users = FeatureTower(user_features, self.dim, hidden)
        self.context = nn.Parameter(torch.empty(self.dim))
        self.actions = ActionVectors(len(ranking.input_actions), ranking.action_dim)
        self.action_weight = nn.Parameter(torch.empty(self.actions.dim, self.dim))
        component = find("block", config.name)
        if getattr(component.factory, "only_causal", False):
            raise UserError(
                f"model.name '{config.name}' cannot rank: candidates must not see each other, and it has no masks; "
                "choose a block with attention, such as hstu, stu, sasrec or fuxi"
            )
        section, num_sites = component.section(options), component.factory.num_sites
        self.blocks = nn.ModuleList(
            component.factory(_with_room(config), _FIRST_BLOCK_SITE + number * num_sites, section)
            for number in range(config.num_blocks)
        )
        for block in self.blocks:
            if isinstance(block, Block):
                block.join(self.blocks[0])  # type: ignore[arg-type]
        # Numbers also reach the outputs directly, as in a logistic regression: log-odds of rates add up.
        self.wide = nn.Linear(self.items.num_floats, len(ranking.tasks), bias=False)
        self.head = head_mlp(4 * self.dim + self.items.num_floats, 2 * hidden, len(ranking.tasks))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all parameters; the same generator state gives the same parameters."""
        self.items.reset_parameters(generator)
        self.users.reset_parameters(generator)
        nn.init.normal_(self.context, std=0.1, generator=generator)
        self.actions.reset_parameters(generator)
        nn.init.xavier_normal_(self.action_weight, generator=generator)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset_parameters(generator)
        reset_linears(self.head, generator, normal=False)
        nn.init.zeros_(self.wide.weight)
        with torch.no_grad():
            last = self.head[-1]
            assert isinstance(last, nn.Linear)
            last.bias.copy_(torch.tensor(self.base) if self.base else torch.zeros_like(last.bias))

    def forward(self, given: RankingInput, layout: RankingLayout, seed: int | None = None) -> Tensor:
        """Return the output of every task for every query, [N, tasks]: a logit, or a number. `seed` is dropout's."""
        tokens = self._tokens(given, layout, seed)
        rate = self.config.dropout
        items = self.items(given.items, _clock(given.times))
        users = self.users(given.users)
        users = self.context.expand(len(given.user_keys), -1) if users is None else users + self.context
        drop = tokens.dropout(rate, _INPUT_SITE)
        items = keyed_dropout(items, drop, given.keys)
        users = keyed_dropout(users.contiguous(), None if drop is None else tokens.dropout(rate, 1), given.user_keys)
        known = self._action_vectors(given.actions[layout.history])
        candidates = items[layout.queries]
        pool = torch.cat([users, items[layout.history] + known, candidates + self.actions.unknown @ self.action_weight])
        x_sd = pool.index_select(0, layout.order)
        x_sd = self._pass_through_blocks(x_sd.to(torch.bfloat16) if self.precision == "bf16" else x_sd, tokens)
        seen = _norm(x_sd[layout.query_rows].to(items.dtype))
        candidates, owners = _norm(candidates), _norm(users[layout.query_users])
        joined = torch.cat([seen, candidates, owners, seen * candidates], dim=1)
        floats = self.items.floats(given.items, _clock(given.times))[layout.queries]
        joined = keyed_dropout(joined, tokens.dropout(rate, _HEAD_SITE), given.keys[layout.queries])
        out: Tensor = self.head(torch.cat([joined, floats], dim=1)) + self.wide(floats)
        return out

    def _tokens(self, given: RankingInput, layout: RankingLayout, seed: int | None) -> Tokens:
        """Name every token for dropout, and say when it happens; the user's token is before everything."""
        history, queries = layout.history, layout.queries
        none = torch.zeros_like(given.user_keys)
        times = torch.cat([none, given.times[history], given.times[queries]])[layout.order]
        keys = torch.cat([4 * given.user_keys, 4 * given.keys[history] + 1, 4 * given.keys[queries] + 2])[layout.order]
        return Tokens(layout.offsets, times, times, keys, seed, layout.visible)

    def _action_vectors(self, values: Tensor) -> Tensor:
        everything_known = torch.ones(len(values), dtype=torch.bool, device=values.device)
        vectors: Tensor = self.actions(torch.nan_to_num(values), everything_known) @ self.action_weight
        return vectors

    def _pass_through_blocks(self, x_sd: Tensor, tokens: Tokens) -> Tensor:
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                x_sd = checkpoint(block, x_sd, tokens, use_reentrant=False, preserve_rng_state=False)
            else:
                x_sd = block(x_sd, tokens)
        return x_sd


def _with_room(config: ModelConfig) -> ModelConfig:
    """Return the blocks' config: a sequence is a user, at most max_len events, and as many queries."""
    assert config.max_len is not None
    return dataclasses.replace(config, max_len=1 + 2 * config.max_len, max_distance=None)


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _clock(times: Tensor) -> Tensor:
    """Return the hour of the day and the day of the week as points of a circle, [T, 4]."""
    hour = (times % _DAY).to(torch.float32) * (2 * math.pi / _DAY)
    week = (times % (7 * _DAY)).to(torch.float32) * (2 * math.pi / (7 * _DAY))
    return torch.stack([hour.cos(), hour.sin(), week.cos(), week.sin()], dim=1)
