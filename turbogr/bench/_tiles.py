"""Time attention at several shapes, read as JSON from standard input, with the kernels in TURBOGR_KERNELS.

Run as `python -m turbogr.bench._tiles`; prints the seconds of the fastest forward and backward of each shape.
"""

from __future__ import annotations

import json
import math
import sys
import time

import torch

from turbogr.ops import RelativeBias, hstu_attention, keep_freed_memory


def measure(head_dim: int, length: int, *, tokens: int, heads: int, repeats: int) -> float:
    """Return the seconds of the fastest forward and backward of a batch of `tokens` in sequences of `length`."""
    torch.manual_seed(0)
    count = max(1, tokens // length)
    total = count * length
    q, k, v = (torch.randn(total, heads, head_dim).requires_grad_() for _ in range(3))
    times = torch.randint(0, 30 * 86_400, (count, length)).sort(dim=1)[0].flatten()
    weights = [(0.02 * torch.randn(n)).requires_grad_() for n in (2 * length - 1, 33)]
    offsets = torch.arange(count + 1) * length
    grad = torch.randn(total, heads, head_dim)
    best = math.inf
    for _ in range(repeats + 1):
        start = time.perf_counter()
        out = hstu_attention(q, k, v, offsets, RelativeBias(times.roll(-1), times, *weights), max_len=length)
        torch.autograd.grad(out, [q, k, v, *weights], grad)
        best = min(best, time.perf_counter() - start)
        del out
    return best


def main() -> None:
    request = json.load(sys.stdin)
    keep_freed_memory()
    if request["threads"]:
        torch.set_num_threads(request["threads"])
    options = {key: request[key] for key in ("tokens", "heads", "repeats")}
    print(json.dumps([measure(head_dim, length, **options) for head_dim, length in request["shapes"]]))


if __name__ == "__main__":
    main()
