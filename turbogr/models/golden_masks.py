"""Golden files of attention masks: HSTU's attention alone, in cases of candidates, prefixes, windows and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.errors import UserError
from turbogr.models.golden import Difference, largest_error
from turbogr.models.golden_ranking import OUTPUT_TOLERANCE
from turbogr.ops import hstu_attention, hstu_ranges

_NEEDED = (
    "q", "k", "v", "lengths", "max_seq_len", "alpha", "causal", "contextual_seq_len", "max_attn_len",
    "min_full_attn_seq_len", "output", "cotangent", "grad/q", "grad/k", "grad/v",
)  # fmt: skip


@dataclass(frozen=True)
class MaskGolden:
    """The cases of a file by name."""

    cases: Mapping[str, Mapping[str, Tensor]]

    @property
    def title(self) -> str:
        return f"HSTU's attention with {len(self.cases)} masks"

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], path: Path | str) -> MaskGolden:
        """Take over the arrays of a file.

        Raises:
            UserError: a case misses something.
        """
        cases: dict[str, dict[str, Tensor]] = {str(name): {} for name in arrays["cases"]}
        for name, array in arrays.items():
            case, _, key = name.partition("/")
            if case in cases and key:
                cases[case][key] = torch.from_numpy(array)
        if not cases:
            raise UserError(f"{path}: 'cases' names none")
        for case, tensors in cases.items():
            for key in _NEEDED:
                if key not in tensors:
                    raise UserError(f"{path}: '{case}/{key}' is missing. See docs/models/conformance.md for the layout")
        return cls(cases)

    def compare(self, *, device: torch.device | str = "cpu") -> list[Difference]:
        """Run our attention on every case; return the difference of the output and the three gradients.

        Errors of outputs are absolute, those of gradients relative to the largest entry of their tensor.
        """
        found = []
        for case, given in self.cases.items():
            try:
                ours = _run(given, torch.device(device))
            except ValueError as error:
                raise UserError(f"the case '{case}' cannot be computed: {error}") from error
            for name, value in ours.items():
                is_gradient = name.startswith("grad/")
                error_of = largest_error(value.cpu(), given[name], relative=is_gradient)
                limit = None if is_gradient else OUTPUT_TOLERANCE
                found.append(Difference(f"{case}/{name}", tuple(value.shape), error_of, limit))
        return found


def _run(given: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    lengths, targets = given["lengths"].long(), given.get("num_targets")
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    visible = hstu_ranges(
        offsets,
        num_targets=None if targets is None else targets.long(),
        num_contextual=int(given["contextual_seq_len"]),
        window=int(given["max_attn_len"]),
        full_tail=int(given["min_full_attn_seq_len"]),
        causal=bool(given["causal"]),
    )
    scale = given.get("attn_scale")
    q, k, v = (given[part].detach().float().to(device).requires_grad_() for part in ("q", "k", "v"))
    output = hstu_attention(
        q,
        k,
        v,
        offsets.to(device),
        max_len=int(given["max_seq_len"]),
        visible=type(visible)(*(ends.to(device) for ends in visible)),
        row_scale=None if scale is None else float(scale) if scale.dim() == 0 else scale.to(device),
        alpha=float(given["alpha"]),
    )
    gradients = torch.autograd.grad(output, [q, k, v], given["cotangent"].to(device))
    names = ("grad/q", "grad/k", "grad/v")
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}
