"""A loss of your own in one file: Bayesian personalised ranking (Rendle et al., 2009), with a margin.

    python examples/custom_loss.py
    turbogr train RECIPE --data DIR --out RUN --plugins examples/custom_loss.py \
        --set loss.name=bpr --set bpr.margin=1.0 --set loss.sampler=popularity
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import turbogr
from turbogr.data.batching import Batch
from turbogr.negatives import Loss
from turbogr.ops import sampled_logits
from turbogr.plugins import register


@dataclass(frozen=True)
class BPRConfig:
    margin: float = 0.5


@register("loss", "bpr", config=BPRConfig)
class BPRLoss(Loss):
    """The mean of -log σ(score of the target - score of a negative - margin) over a position's negatives."""

    def loss(
        self,
        outputs: Tensor,
        rows: Tensor,
        positives: Tensor,
        negatives: Tensor | None,
        ids: Tensor,
        batch: Batch,
        step: int,
    ) -> Tensor:
        assert negatives is not None  # [T, n], drawn by loss.sampler
        candidates = torch.cat([positives[:, None], negatives], dim=1)
        scores = sampled_logits(outputs, rows, candidates, temperature=self.config.temperature)
        losses = F.softplus(scores[:, 1:] + self.options.margin - scores[:, :1])
        return losses.masked_fill(negatives == positives[:, None], 0.0).mean(dim=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        turbogr.prepare("synthetic", [], data, num_users=600, num_items=300)
        for loss in ("sampled-softmax", "bpr"):
            run, settings = Path(folder, loss), [f"loss.name={loss}", "train.epochs=5"]
            turbogr.train("quickstart", data, run, overrides=settings, plugins=[__file__])
            print(f"{loss:16} hr@10 {turbogr.evaluate(run, plugins=[__file__]).metrics['hr@10']:.4f}")
