"""A problem on which Adam climbs and Adagrad and AMSGrad descend, with and without delay; see docs/theory/adagrad.md.

One coordinate, F(x; ξ) = c · (1 - cos x), where c is `_RARE` with probability `_PROB` and -1 otherwise. Its mean is
positive, so x = 0 is the minimum and x = π the maximum. The first batch has the rare slope: before it, no method can
know of it, and all would climb for about 1 / `_PROB` steps.
"""

from __future__ import annotations

from typing import Literal

import torch

from turbogr.ops import row_adagrad_, row_adam_

_RARE, _PROB, _START = 2000.0, 1e-3, 1.0
MEAN_SLOPE = _RARE * _PROB - (1 - _PROB)
_BETAS = (0.9, 0.98)
_LR = {"adam": 0.02, "amsgrad": 0.05, "adagrad": 0.5}


def last_values(
    optimizer: Literal["adam", "amsgrad", "adagrad"], *, delay: int, steps: int = 12_000, seeds: int = 64
) -> torch.Tensor:
    """Return x after training from 1 with gradients at the value `delay` steps ago, [S], by TurboGR's operators.

    AMSGrad is without momentum: the operators do not have it.
    """
    random = torch.Generator().manual_seed(0)
    x = torch.full((seeds, 1), _START, dtype=torch.float64)
    mean, square, largest = (torch.zeros_like(x) for _ in range(3))
    index, past = torch.arange(seeds), [x.clone() for _ in range(delay + 1)]
    lr = _LR[optimizer]
    for step in range(1, steps + 1):
        past = [*past[1:], x.clone()]
        rare = torch.rand(seeds, 1, generator=random, dtype=torch.float64) < (1.0 if step == 1 else _PROB)
        slope = torch.where(rare, _RARE, -1.0)
        grad = slope * torch.sin(past[0])
        if optimizer == "adam":
            row_adam_(x, mean, square, index, grad, step=step, lr=lr, betas=_BETAS, eps=1e-8)
        elif optimizer == "adagrad":
            row_adagrad_(x, square, index, grad, lr=lr, eps=1e-8)
        else:
            square.mul_(_BETAS[1]).addcmul_(grad, grad, value=1 - _BETAS[1])
            largest = torch.maximum(largest, square)
            x -= lr * grad / (largest.sqrt() + 1e-8)
    return x[:, 0]


def main() -> None:
    """Print the mean of cos x: 1 is the minimum, -1 the maximum."""
    for optimizer in _LR:
        for delay in (0, 1, 5):
            found = torch.cos(last_values(optimizer, delay=delay))  # type: ignore[arg-type]
            print(f"{optimizer:8} delay {delay}: cos x = {found.mean():.3f} ± {found.std() / len(found) ** 0.5:.3f}")


if __name__ == "__main__":
    main()
