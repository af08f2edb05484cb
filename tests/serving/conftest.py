"""A service in a thread of this process, on an export of numbers that need no training."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import uvicorn

from turbogr.exports import standalone
from turbogr.exports.folder_writer import file_facts, replaced_folder, write_facts
from turbogr.parallel.safetensors_file import write_tensors
from turbogr.serving.live_export import LiveExport
from turbogr.serving.service import Service

NUM_ITEMS = 50


def write_export(target: Path, version: str, *, seed: int = 0, broken: bool = False) -> None:
    """Write an export of a random item-to-item method with titles and users."""
    generator = np.random.default_rng(seed)
    with replaced_folder(target) as folder:
        ids = [f"item-{row:03d}" for row in range(NUM_ITEMS)]
        titles = [f"The <b>{row}</b>th Film" if row else None for row in range(NUM_ITEMS)]
        pq.write_table(pa.table({"item_id": ids, "title": titles}), folder / "item_ids.parquet")
        share = torch.from_numpy(np.sort(generator.random(NUM_ITEMS).astype(np.float32))[::-1].copy())
        write_tensors(folder / "popularity.safetensors", {"share": share})
        matrix = torch.from_numpy(generator.random((NUM_ITEMS, NUM_ITEMS)).astype(np.float32))
        write_tensors(folder / "methods.safetensors", {"0.matrix": matrix, "0.popularity": share})
        vectors = torch.nn.functional.normalize(matrix[:, :8], dim=1)
        write_tensors(folder / "items.safetensors", {"vectors": vectors, "norms": torch.ones(NUM_ITEMS)})
        pq.write_table(pa.table({"user_id": [7, 8]}), folder / "user_ids.parquet")
        users = {"offsets": [0, 3, 4], "items": [1, 2, 3, 4], "times": [10, 20, 30, 5]}
        write_tensors(folder / "users.safetensors", {name: torch.tensor(values) for name, values in users.items()})
        (folder / "check.json").write_text(json.dumps({"cases": []}))
        parameters = {"decay": 0.9, "popularity_weight": 1e-6, "newest": None, "sum_repeats": False}
        tensors = {"matrix": "0.matrix", "popularity": "0.popularity"}
        part = {"name": "random", "weight": 1.0, "scale": None, "kind": "item-to-item"}
        facts: dict[str, Any] = {
            "format": standalone.FORMAT,
            "delivered": {"label": "random", "components": [{**part, "parameters": parameters, "tensors": tensors}]},
            "model": {"max_len": 8, "graph": None},
            "items": {"num": NUM_ITEMS},
            "seen_items": {"left_out": True},
            "histories": {"times": "real", "newest": 100, "ages": [0, 5]},
            "index": {"left_out": "it was not asked for"},
            "version": version,
            "files": file_facts(folder),
        }
        if broken:
            facts["files"]["items.safetensors"]["sha256"] = "0" * 64
        write_facts(folder, facts)


class Client:
    """Requests to a service, each on a connection of its own unless one is given."""

    def __init__(self, port: int) -> None:
        self.port = port

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, connection: Any = None) -> tuple[int, Any]:
        """Return the status and the answer; bytes and text are sent as they are."""
        own = connection is None
        connection = connection or self.connect()
        sent = body if body is None or isinstance(body, bytes | str) else json.dumps(body)
        connection.request(method, path, sent)
        response = connection.getresponse()
        text = response.read().decode()
        if own:
            connection.close()
        is_json = response.headers["content-type"] == "application/json"
        return response.status, json.loads(text) if is_json else text

    def recommend(self, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", "/recommend", body)


@contextlib.contextmanager
def serving(service: Service) -> Iterator[Client]:
    """Run a service in a thread."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(service.app, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    client = Client(listening.getsockname()[1])
    try:
        while not server.started and thread.is_alive():
            thread.join(0.01)
        yield client
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
    assert not thread.is_alive()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_export(tmp_path / "export", "a" * 64)
    return tmp_path / "export"


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    with serving(Service(LiveExport(folder), reload_seconds=0.05)) as found:
        yield found


@pytest.fixture
def write() -> Callable[..., None]:
    return write_export
