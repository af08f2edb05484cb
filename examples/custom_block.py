"""A block of your own in one file: a gated convolution over the latest events, instead of attention.

    python examples/custom_block.py
    turbogr train RECIPE --data DIR --out RUN --plugins examples/custom_block.py \
        --set model.name=conv --set conv.kernel_size=12
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import turbogr
from turbogr.config import ModelConfig
from turbogr.layers import Block, Tokens
from turbogr.ops import keyed_dropout
from turbogr.plugins import register


@dataclass(frozen=True)
class ConvConfig:
    kernel_size: int = 8


@register("block", "conv", config=ConvConfig)
class ConvBlock(Block):
    """x + dropout(W_o · (SiLU(g) ⊙ conv(v))) with g, v = W · norm(x): a token mixes with the tokens before it."""

    title, num_sites = "Conv", 1  # it drops in one place

    def __init__(self, config: ModelConfig, site: int, options: ConvConfig) -> None:
        super().__init__(config, site, options)
        self.in_weight = nn.Parameter(torch.empty(self.dim, 2 * self.dim))
        self.kernel = nn.Parameter(torch.empty(options.kernel_size, self.dim))
        self.out_weight = nn.Parameter(torch.empty(self.dim, self.dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            nn.init.xavier_uniform_(parameter, generator=generator)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        gate, value = (nn.functional.layer_norm(x, (self.dim,)) @ self.in_weight).chunk(2, dim=1)
        position = tokens.positions()[:, None]  # of each token in its own sequence
        shifted = [torch.where(position >= back, value.roll(back, 0), 0) for back in range(len(self.kernel))]
        out = (nn.functional.silu(gate) * (torch.stack(shifted, 1) * self.kernel).sum(1)) @ self.out_weight
        return x + keyed_dropout(out, tokens.dropout(self.dropout, self.site), tokens.keys)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        turbogr.prepare("synthetic", [], data, num_users=600, num_items=300)
        for block in ("hstu", "conv"):
            run, settings = Path(folder, block), [f"model.name={block}", "train.epochs=5"]
            turbogr.train("quickstart", data, run, overrides=settings, plugins=[__file__])
            print(f"{block:5} hr@10 {turbogr.evaluate(run, plugins=[__file__]).metrics['hr@10']:.4f}")
