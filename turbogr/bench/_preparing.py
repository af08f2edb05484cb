"""Measure one preparation; a script with the arguments WHICH LOG OUT.

It is a script and not a module of the package, so that no other code is loaded and counted. It prints seconds, CPU
seconds of all threads, peak memory and the number of distinct ids as JSON. WHICH is turbogr, or a plain implementation
of the same task: check, map the ids in ascending order, sort by user, time and row, write the columns. Those in pandas
and polars hold the whole log in memory; DuckDB may use `DUCKDB_MEMORY` and puts the rest on disk.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

COLUMNS = ["user_id", "item_id", "timestamp"]
DUCKDB_MEMORY = "1GiB"


def with_turbogr(log: Path, out: Path) -> int:
    import warnings

    from turbogr.data.prepare.preparation import prepare

    warnings.simplefilter("ignore")
    store = prepare("parquet", [log], out)
    return store.num_users + store.num_items


def with_pandas(log: Path, out: Path) -> int:
    import pandas as pd  # type: ignore[import-untyped]

    frame = pd.read_parquet(log, columns=COLUMNS)
    if frame.isna().any().any() or (frame["timestamp"] < 0).any():
        raise ValueError("bad rows")
    frame["user"], users = pd.factorize(frame["user_id"], sort=True)
    frame["item"], items = pd.factorize(frame["item_id"], sort=True)
    frame = frame.sort_values(["user", "timestamp"], kind="stable")
    counts = np.bincount(frame["user"], minlength=len(users))
    return _save(out, frame["item"].to_numpy(np.int32), frame["timestamp"].to_numpy(), counts, users, items)


def with_polars(log: Path, out: Path) -> int:
    import polars as pl

    scan = pl.scan_parquet(log / "*.parquet" if log.is_dir() else log).select(COLUMNS).with_row_index("row")
    checks = scan.select(pl.any_horizontal(pl.all().is_null().any(), pl.col("timestamp").min() < 0)).collect()
    if checks.item():
        raise ValueError("bad rows")
    users = scan.select(pl.col("user_id").unique().sort()).collect(engine="streaming")
    items = scan.select(pl.col("item_id").unique().sort()).collect(engine="streaming").with_row_index("item")
    frame = (
        scan.join(items.lazy(), on="item_id", how="left")
        .sort("user_id", "timestamp", "row")
        .select("user_id", "item", "timestamp")
        .collect(engine="streaming")
    )
    counts = frame.group_by("user_id").len().sort("user_id")["len"].to_numpy()
    item, times = frame["item"].to_numpy().astype(np.int32), frame["timestamp"].to_numpy()
    return _save(out, item, times, counts, users["user_id"].to_numpy(), items["item_id"].to_numpy())


def with_duckdb(log: Path, out: Path) -> int:
    import duckdb  # type: ignore[import-not-found]

    out.mkdir()
    settings = {"memory_limit": DUCKDB_MEMORY, "temp_directory": str(out / "spilled")}
    with duckdb.connect(str(out / "database"), config=settings) as base:
        files = str(log / "*.parquet") if log.is_dir() else str(log)
        base.execute(
            f"CREATE VIEW log AS SELECT * FROM read_parquet('{files}', filename = true, file_row_number = true)"
        )
        bad = "user_id IS NULL OR item_id IS NULL OR timestamp IS NULL OR timestamp < 0"
        if base.execute(f"SELECT count(*) FROM log WHERE {bad}").fetchall() != [(0,)]:
            raise ValueError("bad rows")
        base.execute(
            "CREATE TABLE items AS SELECT item_id, (row_number() OVER (ORDER BY item_id) - 1)::INTEGER AS item "
            "FROM (SELECT DISTINCT item_id FROM log)"
        )
        users = base.execute("SELECT user_id, count(*) AS events FROM log GROUP BY ALL ORDER BY user_id").fetchnumpy()
        events = base.sql(
            "SELECT item, timestamp FROM log JOIN items USING (item_id) "
            "ORDER BY user_id, timestamp, filename, file_row_number"
        )
        with open(out / "items.raw", "wb") as item_file, open(out / "times.raw", "wb") as time_file:
            for batch in events.to_arrow_reader(1 << 20):
                item_file.write(batch["item"].to_numpy().tobytes())
                time_file.write(batch["timestamp"].to_numpy().tobytes())
        items = base.execute("SELECT item_id FROM items ORDER BY item").fetchnumpy()["item_id"]
    columns = {"offsets": np.append(0, np.cumsum(users["events"])), "users": users["user_id"], "ids": items}
    for name, values in columns.items():
        np.save(out / f"{name}.npy", values)
    return len(users["user_id"]) + len(items)


def _save(
    out: Path, item: np.ndarray, times: np.ndarray, counts: np.ndarray, users: np.ndarray, items: np.ndarray
) -> int:
    out.mkdir()
    columns = {"items": item, "times": times, "offsets": np.append(0, np.cumsum(counts)), "users": users, "ids": items}
    for name, values in columns.items():
        np.save(out / f"{name}.npy", values)
    return len(users) + len(items)


WAYS = {"turbogr": with_turbogr, "pandas": with_pandas, "polars": with_polars, "duckdb": with_duckdb}


def peak_memory() -> int:
    """Return the peak memory of this process, without that of its parent before the start."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    which, log, out = sys.argv[1:]
    importlib.import_module(
        {"turbogr": "turbogr.data.prepare.preparation"}.get(which, which)
    )  # before the clock starts
    start, cpu_start = time.perf_counter(), time.process_time()
    distinct_ids = WAYS[which](Path(log), Path(out))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    measured = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_memory": peak_memory()}
    print(json.dumps({**measured, "distinct_ids": distinct_ids}))


if __name__ == "__main__":
    main()
