"""What a run delivers and why, in sentences: the values on validation that decided, and what was not compared."""

from __future__ import annotations

from collections.abc import Mapping

from turbogr.evaluation.baseline_titles import TITLES, refusal_lines
from turbogr.simple.delivery import Delivered


def delivery_lines(delivered: Delivered, model_label: str, refused: Mapping[str, str]) -> list[str]:
    """Return what is delivered and why, then which methods were refused and why; nothing where there was no choice."""
    return [*_choice(delivered, model_label), *refusal_lines(refused)]


def _choice(delivered: Delivered, model_label: str) -> list[str]:
    if not delivered.chosen_on:
        return []
    if not delivered.values:
        return [f"Delivered: {delivered.label}. It was compared with {delivered.chosen_on}."]
    single = {name: value for name, value in delivered.values.items() if name in TITLES.values()}
    others = []
    if model_label in delivered.values and not delivered.is_model:
        others.append(f"{model_label} has {delivered.values[model_label]:.4f}")
    best = max(single, key=lambda name: single[name], default=None)
    if best is not None and best != delivered.label:
        others.append(f"the best simple method, {best}, {'' if others else 'has '}{single[best]:.4f}")
    own = f"{delivered.values[delivered.label]:.4f}"
    why = f"best on {delivered.chosen_on} with {own} (mean of NDCG@10 and NDCG@100)"
    return [f"Delivered: {delivered.label}, {why}{'; ' if others else ''}{', '.join(others)}."]
