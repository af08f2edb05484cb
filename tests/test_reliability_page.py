"""Every test that docs/results/reliability.md names exists, and it names one for each of the thirteen proofs.

What it says about random faults follows from their record.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos_on_page import chaos_text, parts_of_page, read_record
from turbogr.chaos.fault_plan import KINDS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/results/reliability.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_of_the_page_exists() -> None:
    for path, name in NAMED.findall(PAGE):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_each_of_the_thirteen_proofs_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)$", PAGE, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 14))
    assert all(NAMED.search(row) for _, row in rows)


def test_what_is_said_of_random_faults_follows_from_the_record() -> None:
    """Without a record the page says that it is missing. `python -m tests.chaos_on_page` writes what is expected."""
    before, said, after = parts_of_page(PAGE)
    assert said == chaos_text(read_record())
    assert "chaos.json" not in before + after, "no other place speaks of the record's figures"


def test_the_sums_of_the_record_are_those_of_its_jobs() -> None:
    record = read_record()
    if record is not None:  # without one, the test above has looked for the sentence that it is missing
        assert sums(record) == {key: record[key] for key in sums(record)}
        assert record["faults"] >= 100 and record["by_kind"].keys() == KINDS.keys()
        assert min(record["by_kind"].values()) >= 15


def sums(record: dict[str, Any]) -> dict[str, Any]:
    jobs = record["jobs"]
    struck = [fault for job in jobs for fault in job["struck"]]
    return {
        "faults": len(struck),
        "by_kind": dict(sorted(Counter(fault["kind"] for fault in struck).items())),
        **{key: sum(job[key] for job in jobs) for key in ("lost_steps", "different_weights", "hangs")},
        "num_jobs": len(jobs),
        "num_lives": sum(job["lives"] for job in jobs),
        "lives_from_survivors": sum(job["from_survivors"] for job in jobs),
    }


def test_a_record_with_losses_is_not_praised() -> None:
    kill, stop = {"kind": "kill", "while": "saving"}, {"kind": "stop", "while": "training"}
    counts = {"lives": 3, "from_survivors": 1, "lost_steps": 1, "different_weights": True, "hangs": 2}
    record: dict[str, Any] = {"seed": 7, "steps_per_job": 75, "problems": ["job 0"], "jobs": []}
    record["jobs"].append({"struck": [kill, kill, stop], **counts})
    text = chaos_text(record | sums(record))
    assert "3 faults: 1 step lost, 1 job with different weights, 2 hangs** and 1 problem of any kind" in text
    assert "seed 7" in text and "1 job of 75 steps had 3 lives, of which 1 " in text
    assert f"| {KINDS['kill']} | 2 | 2 |" in text and f"| {KINDS['stop']} | 1 | 0 |" in text
    assert "missing" in chaos_text(None) and "missing" not in text
