"""Serving under load: requests a second and latency of `turbogr serve` on loopback, by the number of connections.

Claim: one process answers with a latency of milliseconds, and more connections raise the throughput without errors.
Compared with: nothing; the figures are absolute and belong to the machine that the record names.
Keys: `<case>_c<connections>_requests_per_second`, `..._p50_ms`, `..._p99_ms`, `..._errors`; `hnsw_recall`.

Every request has one history of random items and asks for ten. `exact` scores the whole catalogue, `hnsw`
searches the index. The client is wrk, on the same cores as the service; without wrk it is Python, which
is slower and is named in the notes. Items are made up around random centres, the model is an untrained HSTU: the cost
depends on sizes alone, the recall on real vectors may be another. `exports` names a folder in which the made-up exports
are kept for the next run, because an index of millions of items takes minutes to build.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from turbogr.bench._serving_export import made_up_export
from turbogr.bench.record import Cell, Result, Table
from turbogr.errors import UserError

SETTINGS: dict[str, Any] = {
    "exact_items": 100_000,
    "hnsw_items": 10_000_000,  # 0: leave the case out
    "connections": [1, 8, 64],
    "seconds": 10,  # whole ones: wrk takes no others
    "dim": 32,
    "max_len": 50,
    "blocks": 2,
    "history": 20,
    "neighbours": 16,
    "build_breadth": 40,
    "ef_search": 64,
    "seed": 0,
    "exports": "",  # where made-up exports are kept; empty: nowhere
}

_BODIES = 512
_SCRIPT = """
local bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
local number = 0
request = function()
  number = number %% #bodies + 1
  return wrk.format(nil, "/recommend", nil, bodies[number])
end
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %%d %%d %%d %%d %%d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def run(settings: Mapping[str, Any]) -> Result:
    """Serve a made-up export per case and load it.

    Raises:
        UserError: what serving needs is not installed.
    """
    if settings["seconds"] < 1:
        raise UserError(f"seconds is {settings['seconds']}; give at least 1")
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    notes = [] if shutil.which("wrk") else ["the client is Python, because wrk is not installed: figures are lower"]
    with tempfile.TemporaryDirectory(prefix="turbogr-serving-") as beside:
        for case, num_items in (("exact", settings["exact_items"]), ("hnsw", settings["hnsw_items"])):
            if not num_items:
                notes.append(f"{case} was left out")
                continue
            folder = made_up_export(Path(settings["exports"] or beside), num_items, settings, index=case == "hnsw")
            if case == "hnsw":
                figures["hnsw_recall"] = json.loads((folder / "model.json").read_text())["index"]["recall@10"]
            bodies = Path(beside) / f"{case}.jsonl"
            bodies.write_text("".join(f"{body}\n" for body in _bodies(num_items, settings)))
            with _serving(folder, case) as port:
                _load_with_python(port, bodies, 2, 1)  # what is only done once is not measured
                for connections in settings["connections"]:
                    load = _load_with_wrk if shutil.which("wrk") else _load_with_python
                    measured = load(port, bodies, connections, settings["seconds"])
                    figures |= {f"{case}_c{connections}_{name}": value for name, value in measured.items()}
                    rows.append([case, num_items, connections, *measured.values()])
    columns = ["search", "items", "connections", "requests/s", "p50 ms", "p99 ms", "errors"]
    return Result(figures, [Table("turbogr serve on loopback", columns, rows)], {}, notes)


def _bodies(num_items: int, settings: Mapping[str, Any]) -> list[str]:
    generator = np.random.default_rng(settings["seed"])
    histories = generator.integers(0, num_items, (_BODIES, settings["history"])).tolist()
    return [json.dumps({"histories": [history], "k": 10}) for history in histories]


@contextlib.contextmanager
def _serving(folder: Path, search: str) -> Iterator[int]:
    """Run the service in a process of its own and give its port."""
    command = [sys.executable, "-m", "turbogr", "serve", str(folder), "--port", "0", "--search", search]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:(\d+)", service.stdout.readline())
            if found is None:
                raise UserError("turbogr serve did not start; what it says stands above")
            yield int(found[1])
        finally:
            service.send_signal(signal.SIGTERM)


def _load_with_wrk(port: int, bodies: Path, connections: int, seconds: int) -> dict[str, float]:
    script = bodies.with_suffix(".lua")
    script.write_text(_SCRIPT % bodies)
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(script)]
    done = subprocess.run([*command, f"http://127.0.0.1:{port}/"], capture_output=True, text=True)
    found = re.search(r"^RESULT (\d+) (\d+) (\d+) (\d+) (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise UserError(f"{shlex.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    requests, duration, half, most, errors = map(int, found.groups())
    return {
        "requests_per_second": requests / (duration / 1e6),
        "p50_ms": half / 1e3,
        "p99_ms": most / 1e3,
        "errors": float(errors),
    }


def _load_with_python(port: int, bodies: Path, connections: int, seconds: int) -> dict[str, float]:
    sent, times, errors = bodies.read_text().splitlines(), [], []
    end = time.perf_counter() + seconds

    def work(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        while (start := time.perf_counter()) < end:
            try:
                connection.request("POST", "/recommend", sent[number % len(sent)])
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    errors.append(response.status)
            except OSError:
                errors.append(0)
                connection.close()
            times.append(time.perf_counter() - start)
            number += connections
        connection.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(connections)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    half, most = np.percentile(times, [50, 99]) * 1e3
    return {
        "requests_per_second": len(times) / (time.perf_counter() - start),
        "p50_ms": float(half),
        "p99_ms": float(most),
        "errors": float(len(errors)),
    }
