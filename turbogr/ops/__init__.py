"""Operators on jagged tensors, each a contract over one or more backends (see `registry`)."""

from turbogr.ops.embedding import embed
from turbogr.ops.full_softmax import full_softmax
from turbogr.ops.gated_linear import gated_linear
from turbogr.ops.gated_mlp import gated_mlp
from turbogr.ops.jagged_attention import RelativeBias, hstu_attention
from turbogr.ops.jagged_attention.fuxi import DecayBias, InversePowerBias, SecondsDecayBias, fuxi_attention
from turbogr.ops.jagged_attention.masks import KeyRanges, causal_ranges, hstu_ranges
from turbogr.ops.jagged_attention.softmax import softmax_attention
from turbogr.ops.keyed_dropout import keyed_dropout
from turbogr.ops.linear_attention import periodic_attention, retention
from turbogr.ops.look_up import look_up_rows
from turbogr.ops.native import keep_freed_memory, prefer_huge_pages
from turbogr.ops.norm_linear import norm_linear, norm_linear_pieces
from turbogr.ops.plugin_operators import accept_plugins, operator, serves
from turbogr.ops.random_integers import random_integers
from turbogr.ops.registry import Backend, backend, backends, register_backend, register_operator, services, set_backend
from turbogr.ops.row_optimizer import row_adagrad_, row_adam_
from turbogr.ops.sampled_logits import sampled_logits
from turbogr.ops.sampled_softmax import sampled_softmax
from turbogr.ops.unique import unique_rows

__all__ = [
    "Backend",
    "DecayBias",
    "InversePowerBias",
    "KeyRanges",
    "RelativeBias",
    "SecondsDecayBias",
    "backend",
    "backends",
    "causal_ranges",
    "embed",
    "full_softmax",
    "fuxi_attention",
    "gated_linear",
    "gated_mlp",
    "hstu_attention",
    "hstu_ranges",
    "keep_freed_memory",
    "keyed_dropout",
    "look_up_rows",
    "norm_linear",
    "norm_linear_pieces",
    "operator",
    "periodic_attention",
    "prefer_huge_pages",
    "random_integers",
    "register_backend",
    "register_operator",
    "retention",
    "row_adagrad_",
    "row_adam_",
    "sampled_logits",
    "sampled_softmax",
    "serves",
    "services",
    "set_backend",
    "softmax_attention",
    "unique_rows",
]

accept_plugins()
