"""What parameters are before training: the distribution of each, by name, so that none can be forgotten."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution, Normal, Uniform

from turbogr.config import ModelConfig
from turbogr.models import RetrievalModel
from turbogr.plugins import built_in_names
from turbogr.tables.table import LocalTable

# No two sizes are equal, and every parameter that is drawn has some thousand entries.
DIM, NUM_HEADS, QK_DIM, V_DIM, FFN_DIM, MAX_LEN, NUM_TIME_BUCKETS = 64, 2, 24, 40, 96, 1024, 2500

ZERO = torch.tensor(0.0)
ONE = torch.ones(1)
TABLE = Normal(0.0, 0.02)
DECAY = torch.tensor([0.02, math.log(math.expm1(0.25)), math.log(0.8 / 0.2)])
"""The free numbers of a = 0.02, β = 0.25 and γ = 0.8: a, softplus⁻¹(β), logit(γ)."""


def glorot_uniform(rows: int, columns: int) -> Uniform:
    bound = math.sqrt(6 / (rows + columns))
    return Uniform(-bound, bound, validate_args=False)


def glorot_normal(rows: int, columns: int) -> Normal:
    return Normal(0.0, math.sqrt(2 / (rows + columns)))


def fuxi(num_channels: int, time: Distribution | Tensor) -> dict[str, Distribution | Tensor]:
    return {
        "uvqk": TABLE,
        "position_weight": TABLE,
        "time_weight": time,
        "out_weight": glorot_uniform(num_channels * NUM_HEADS * V_DIM, DIM),
        "out_bias": ZERO,
        "ffn_gate": glorot_uniform(DIM, FFN_DIM),
        "ffn_up": glorot_uniform(DIM, FFN_DIM),
        "ffn_down": glorot_uniform(FFN_DIM, DIM),
    }


def fuxi_of_two(**time: Distribution | Tensor) -> dict[str, Distribution | Tensor]:
    """Of two channels, with parameters of time of other names."""
    return {**{key: value for key, value in fuxi(2, ZERO).items() if key != "time_weight"}, **time}


ANGLES = torch.arange(MAX_LEN)[:, None] * 10000 ** (-torch.arange(16) / 16)
WAVES = torch.cat([ANGLES.sin(), ANGLES.cos()], dim=1)

# Queries, keys and values of SASRec are drawn as one matrix of all their columns.
QKV = glorot_normal(DIM, NUM_HEADS * (2 * QK_DIM + V_DIM))

EXPECTED: dict[str, dict[str, Distribution | Tensor]] = {
    "hstu": {
        "uvqk": TABLE,
        "position_weight": TABLE,
        "time_weight": TABLE,
        "out_weight": glorot_uniform(NUM_HEADS * V_DIM, DIM),
        "out_bias": ZERO,
    },
    "sasrec": {
        "query_weight": QKV,
        "query_bias": ZERO,
        "key_value_weight": QKV,
        "key_value_bias": ZERO,
        "out_weight": glorot_normal(NUM_HEADS * V_DIM, DIM),
        "out_bias": ZERO,
        "ffn_up": glorot_normal(DIM, FFN_DIM),
        "ffn_up_bias": ZERO,
        "ffn_down": glorot_normal(FFN_DIM, DIM),
        "ffn_down_bias": ZERO,
    },
    "fuxi": fuxi(3, DECAY),
    "fuxi-alpha": fuxi(3, TABLE),
    "fuxi-beta": fuxi_of_two(time_amplitude=Uniform(-0.2, 0.2), time_exponent=Uniform(0.4, 0.8)),
    "fuxi-beta-days": fuxi(2, DECAY),
    "fuxi-gamma": fuxi_of_two(
        time_amplitude=Uniform(-0.1, 0.1), time_exponent=Uniform(0.5, 2.0), time_base=Uniform(0.5, 0.99)
    ),
    "fuxi-linear": {
        "uqkv": TABLE,
        "retention_decay": TABLE,
        "time_decay": TABLE,
        "time_value": Uniform(-(DIM**-0.5), DIM**-0.5),
        "time_share": TABLE,
        "time_own_share": ONE,
        "position_vectors": WAVES,
        "position_share": TABLE,
        "position_own_share": ONE,
        "position_value": Uniform(-(DIM**-0.5), DIM**-0.5),
        "out_weight": TABLE,
        "ffn_gate": TABLE,
        "ffn_up": TABLE,
        "ffn_down": TABLE,
    },
    "stu": {
        "input_norm_weight": ONE,
        "input_norm_bias": ZERO,
        "uvqk": glorot_uniform(DIM, 2 * NUM_HEADS * (V_DIM + QK_DIM)),
        "uvqk_bias": ZERO,
        "output_norm_weight": ONE,
        "output_norm_bias": ZERO,
        "out_weight": glorot_uniform(3 * NUM_HEADS * V_DIM, DIM),
    },
}
"""For every block and every parameter of it, where its values come from, or the values."""

POSITION = Normal(0.0, math.sqrt(1 / DIM))


def make_model(name: str, seed: int) -> RetrievalModel:
    config = ModelConfig(
        name=name,  # type: ignore[arg-type]
        dim=DIM,
        num_blocks=2,
        num_heads=NUM_HEADS,
        qk_dim=QK_DIM,
        v_dim=V_DIM,
        max_len=MAX_LEN,
        num_time_buckets=NUM_TIME_BUCKETS,
        ffn_multiplier=FFN_DIM / DIM,
    )
    model = RetrievalModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)  # so that one which stays as it was is seen
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


def assert_initial(values: Tensor, expected: Distribution | Tensor, name: str) -> None:
    """Judge by the spread, which tells a factor, and by the largest distance of the two cumulative distributions, which
    tells the shape and the mean; chance reaches that bound once in a thousand draws, and the seed is fixed."""
    values = values.detach()
    if isinstance(expected, Tensor):
        torch.testing.assert_close(values, expected.expand_as(values), msg=lambda text: f"{name}: {text}")
        return
    n = values.numel()
    if n < 20:  # a few numbers tell their range alone
        assert float((values - expected.mean).abs().max()) < 4 * float(expected.stddev), name
        assert n == 1 or float(values.std()) > 0.1 * float(expected.stddev), name
        return
    assert n >= 2000, name
    assert expected.support.check(values).all(), name  # type: ignore[union-attr]
    assert float(values.std()) == pytest.approx(float(expected.stddev), rel=0.05), name
    shares = (torch.arange(n) + 0.5) / n
    assert float((expected.cdf(values.flatten().sort().values) - shares).abs().max()) < 1.95 / math.sqrt(n), name


@pytest.mark.parametrize("name", built_in_names("block"))
def test_every_parameter_starts_as_expected(name: str) -> None:
    parameters = dict(make_model(name, seed=0).named_parameters())
    assert_initial(parameters.pop("position"), POSITION, "position")
    for number in range(2):
        prefix = f"blocks.{number}."
        own = {key: parameters.pop(key) for key in list(parameters) if key.startswith(prefix)}
        only_first = {"time_decay"} if number else set()
        assert {key.removeprefix(prefix) for key in own} == EXPECTED[name].keys() - only_first
        for key, values in own.items():
            assert_initial(values, EXPECTED[name][key.removeprefix(prefix)], key)
    assert not parameters, "parameters without an expectation"


def test_the_item_table_starts_as_expected() -> None:
    table = LocalTable(500, DIM)
    table.draw(0, 500, 0)
    assert_initial(table.weight, TABLE, "item table")


@pytest.mark.parametrize("name", built_in_names("block"))
def test_parameters_follow_the_generator_alone_and_no_two_blocks_are_alike(name: str) -> None:
    torch.manual_seed(1)
    first = dict(make_model(name, seed=0).named_parameters())
    torch.manual_seed(2)
    again = dict(make_model(name, seed=0).named_parameters())
    other = dict(make_model(name, seed=1).named_parameters())
    assert all(torch.equal(values, again[key]) for key, values in first.items())
    for key, values in first.items():
        drawn = key == "position" or isinstance(EXPECTED[name][key.rpartition(".")[2]], Distribution)
        assert torch.equal(values, other[key]) != drawn, key
        if drawn and key.startswith("blocks.0.") and not key.endswith("time_decay"):  # which only the first has
            assert not torch.equal(values, first[key.replace("blocks.0.", "blocks.1.")]), key
