"""examples/new_day.sh: a new day's log reaches a running service, which loses no request."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.tiny import train_arguments
from turbogr import cli
from turbogr.exports import standalone

pytest.importorskip("uvicorn", reason="serving needs the extra turbogr[serve]")
ROOT = Path(__file__).parents[2]


def write_log(path: Path, days: int) -> None:
    """Write what 60 users did on some days; on the second day there are new items and users."""
    generator = np.random.default_rng(5)
    lines = ["user_id,item_id,timestamp"]
    for day in range(days):
        for user in range(60 + 10 * day):
            start = int(generator.integers(40))
            for step in range(6):
                item = (start + step) % (40 + 5 * day)
                lines.append(f"u{user},i{item},{1_700_000_000 + 86_400 * day + 600 * step + user}")
    path.write_text("\n".join(lines) + "\n")


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    connection.close()
    return answer


def test_a_new_day_reaches_the_service(tmp_path: Path) -> None:
    write_log(tmp_path / "day1.csv", 1)
    write_log(tmp_path / "day2.csv", 2)
    data, run, live = (str(tmp_path / name) for name in ("data1", "run1", "live"))
    assert cli.main(["prepare", "csv", str(tmp_path / "day1.csv"), "--out", data]) == 0
    smallest = ("deliver.choose=model", "train.epochs=1", "model.num_blocks=1", "evaluate.baselines=[popularity]")
    settings = [part for value in smallest for part in ("--set", value)]
    assert cli.main(train_arguments(data, run, *settings)) == 0
    assert cli.main(["export", run, "--out", live, "--index", "none"]) == 0
    command = [sys.executable, "-m", "turbogr", "serve", live, "--port", "0", "--reload-seconds", "0.2"]
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "turbogr").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m turbogr "$@"\n')
    (bin_folder / "turbogr").chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as service:
        try:
            assert service.stdout is not None
            port = int(re.findall(r":(\d+) ", service.stdout.readline())[0])
            answers: list[tuple[int, str]] = []
            stop = threading.Event()

            def keep_asking() -> None:
                while not stop.wait(0.02):  # often, but the steps need the processor
                    status, answer = ask(port, "POST", "/recommend", {"histories": [["i1", "i2"]]})
                    answers.append((status, answer["version"]))

            asking = threading.Thread(target=keep_asking)
            asking.start()
            first = ask(port, "GET", "/health")[1]
            arguments = [tmp_path / "day2.csv", data, run, live, tmp_path / "data2", tmp_path / "run2"]
            done = subprocess.run(
                ["bash", str(ROOT / "examples" / "new_day.sh"), *map(str, arguments)],
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            while (second := ask(port, "GET", "/health")[1])["version"] == first["version"]:
                time.sleep(0.05)
            stop.set()
            asking.join()
            assert (first["items"], second["items"]) == (40, 45)
            assert {status for status, _ in answers} == {200}
            assert answers[0][1] == first["version"]
            assert ask(port, "POST", "/similar", {"items": ["i44"]})[0] == 200
            body = {"histories": [["i44", "i2"]], "k": 5}
            (found,) = ask(port, "POST", "/recommend", body)[1]["lists"]
            (expected,) = standalone.Recommender(live).recommend(body["histories"], 5)
            assert [entry["item"] for entry in found["items"]] == [item for item, _ in expected]
        finally:
            service.send_signal(signal.SIGTERM)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("live")) == ["live"]
