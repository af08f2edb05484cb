"""Compares the lists that this folder gives with those that TurboGR gave when it was written: python check.py

It needs onnxruntime, numpy, safetensors and pyarrow. Exit status: 0 all lists are the same, 1 one is not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SCORE_TOLERANCE = 1e-4
TIE = 2e-6  # items may change places only where their expected scores are this close: rounding decides between them


def differences(recommender, cases):
    """Return a sentence for every history whose list is not the expected one."""
    found = []
    for number, case in enumerate(cases):
        (got,) = recommender.recommend([case["history"]], case["k"], at=case["at"])
        found += [f"history {number}: {what}" for what in compare(got, case["items"], case["scores"])]
    return found


def compare(got, items, scores):
    """Yield what is different between a list of (item, score) and the expected items and scores."""
    if len(got) != len(items):
        yield f"{len(got)} items instead of {len(items)}"
        return
    expected = dict(zip(items, scores, strict=False))
    for place, ((item, score), wanted, wanted_score) in enumerate(zip(got, items, scores, strict=False)):
        swapped = abs(expected.get(item, float("inf")) - wanted_score) <= TIE * max(1.0, abs(wanted_score))
        if item != wanted and not swapped:
            yield f"position {place + 1} is {item!r} instead of {wanted!r}"
        if abs(score - wanted_score) > SCORE_TOLERANCE * max(1.0, abs(wanted_score)):
            yield f"position {place + 1} has the score {score:.6f} instead of {wanted_score:.6f}"


def main():
    sys.path.insert(0, str(FOLDER))
    from recommender import Recommender, damages, read_facts

    problems = damages(FOLDER, read_facts(FOLDER))
    cases = json.loads((FOLDER / "check.json").read_text(encoding="utf-8"))["cases"]
    if not problems:
        problems = differences(Recommender(FOLDER), cases)
    for problem in problems:
        print(problem)
    print(
        f"check failed: {len(problems)} differences" if problems else f"check passed: {len(cases)} lists are the same"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
