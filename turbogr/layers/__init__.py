"""Layers of sequence models, on jagged tokens; nothing here knows of other processes."""

from turbogr.layers.attention_masks import Mask
from turbogr.layers.block import Block
from turbogr.layers.tokens import Tokens

__all__ = ["Block", "Mask", "Tokens"]
