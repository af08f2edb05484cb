"""Operators on jagged tensors, each a contract over one or more backends (see `registry`)."""

from turbogr.ops.embedding import embed
from turbogr.ops.gated_linear import gated_linear
from turbogr.ops.gated_mlp import gated_mlp
from turbogr.ops.jagged_attention import RelativeBias, hstu_attention
from turbogr.ops.jagged_attention.fuxi import DecayBias, fuxi_attention
from turbogr.ops.jagged_attention.softmax import softmax_attention
from turbogr.ops.keyed_dropout import keyed_dropout
from turbogr.ops.native import keep_freed_memory, prefer_huge_pages
from turbogr.ops.norm_linear import norm_linear, norm_linear_pieces
from turbogr.ops.random_integers import random_integers
from turbogr.ops.registry import backend, services, set_backend
from turbogr.ops.row_optimizer import row_adagrad_, row_adam_
from turbogr.ops.sampled_softmax import sampled_softmax
from turbogr.ops.unique import unique_rows

__all__ = [
    "DecayBias",
    "RelativeBias",
    "backend",
    "embed",
    "fuxi_attention",
    "gated_linear",
    "gated_mlp",
    "hstu_attention",
    "keep_freed_memory",
    "keyed_dropout",
    "norm_linear",
    "norm_linear_pieces",
    "prefer_huge_pages",
    "random_integers",
    "row_adagrad_",
    "row_adam_",
    "sampled_softmax",
    "services",
    "set_backend",
    "softmax_attention",
    "unique_rows",
]
