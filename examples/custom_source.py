"""A data source of your own in one file: register a function that yields blocks of columns.

    python examples/custom_source.py
    turbogr prepare sessions logs/*.log --plugins examples/custom_source.py --option separator=">" --out data/mine

The log here has one line per session: the user, the start in seconds, and the items seen, one a minute.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import turbogr
from turbogr.plugins import register


@dataclass(frozen=True)
class SessionOptions:
    separator: str = ">"
    seconds_per_item: int = 60


@register("source", "sessions", config=SessionOptions)
def read_sessions(paths: Sequence[Path], options: SessionOptions) -> Iterator[dict[str, list[object]]]:
    """Session logs, one line per session."""
    for path in paths:
        columns: dict[str, list[object]] = {"user_id": [], "item_id": [], "timestamp": []}
        for line in path.read_text().splitlines():
            user, start, seen = line.split(maxsplit=2)
            for number, item in enumerate(seen.split(options.separator)):
                columns["user_id"].append(user)
                columns["item_id"].append(item)
                columns["timestamp"].append(int(start) + options.seconds_per_item * number)
        yield columns


def write_log(path: Path, *, num_users: int = 400, num_sessions: int = 5) -> None:
    """Users walk through 300 items in small steps, a session a day."""
    draw = random.Random(0)
    with path.open("w") as file:
        for day, user in ((day, user) for day in range(num_sessions) for user in range(num_users)):
            item = draw.randrange(300)
            walk = [item := (item + draw.choice((1, 1, 1, 3))) % 300 for _ in range(6)]
            file.write(f"user-{user} {1_700_000_000 + 86_400 * day} {'>'.join(f'item-{item}' for item in walk)}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_log(folder / "sessions.log")
        store = turbogr.prepare("sessions", [folder / "sessions.log"], folder / "data", separator=">")
        turbogr.train("quickstart", store.path, folder / "run", overrides=["train.epochs=10", "model.dim=32"])
        for metric, value in turbogr.evaluate(folder / "run").metrics.items():
            print(f"{metric:8} {value:.4f}")
