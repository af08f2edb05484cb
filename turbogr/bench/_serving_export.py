"""Exports of made-up items for the load test: what serving costs depends on sizes, not on what was learnt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from turbogr.config import ModelConfig
from turbogr.exports import standalone
from turbogr.exports.folder_writer import file_facts, replaced_folder, write_facts, write_graphs
from turbogr.exports.item_index import build_index, recall
from turbogr.models.retrieval_model import RetrievalModel
from turbogr.ops.sampled_softmax.reference import unit
from turbogr.parallel.safetensors_file import write_tensors

_CENTRES = 4096
_ROWS_AT_ONCE = 1 << 20
_QUERIES = 200


_WHAT = ("dim", "max_len", "blocks", "seed")
_WHAT_OF_INDEX = ("neighbours", "build_breadth", "ef_search")


def made_up_export(parent: Path, num_items: int, settings: Mapping[str, Any], *, index: bool) -> Path:
    """Return an export of an untrained HSTU and items around random centres; written unless `parent` has it."""
    used = [num_items, *(settings[name] for name in (*_WHAT, *(_WHAT_OF_INDEX if index else ())))]
    target = parent / "-".join(["hnsw" if index else "exact", *map(str, used)])
    if not target.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with replaced_folder(target) as folder:
            _write(folder, num_items, settings, index=index)
    return target


def _write(folder: Path, num_items: int, settings: Mapping[str, Any], *, index: bool) -> None:
    dim, seed = settings["dim"], settings["seed"]
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(_CENTRES, dim, generator=generator)
    vectors = torch.empty(num_items, dim)
    for first in range(0, num_items, _ROWS_AT_ONCE):
        piece = vectors[first : first + _ROWS_AT_ONCE]
        chosen = torch.randint(_CENTRES, (len(piece),), generator=generator)
        piece.copy_(unit(centres[chosen] + torch.randn(piece.shape, generator=generator)))
    write_tensors(folder / "items.safetensors", {"vectors": vectors, "norms": torch.ones(num_items)})
    write_tensors(folder / "popularity.safetensors", {"share": torch.full((num_items,), 1.0 / num_items)})
    pq.write_table(pa.table({"item_id": np.arange(num_items)}), folder / "item_ids.parquet")
    (folder / "check.json").write_text(json.dumps({"cases": []}))
    config = ModelConfig(
        name="hstu",
        dim=dim,
        max_len=settings["max_len"],
        num_blocks=settings["blocks"],
        num_heads=2,
        qk_dim=dim // 2,
        v_dim=dim // 2,
        num_time_buckets=64,
    )
    model = RetrievalModel(config)
    model.reset_parameters(generator)
    write_graphs(model.eval().requires_grad_(False), num_items, folder)
    facts: dict[str, Any] = {
        "format": standalone.FORMAT,
        "delivered": {
            "label": "an untrained hstu",
            "components": [{"name": "model", "kind": "model", "weight": 1.0, "scale": None}],
        },
        "model": {"max_len": settings["max_len"], "graph": "user.onnx"},
        "items": {"num": num_items},
        "seen_items": {"left_out": True},
        "histories": {"times": "real", "newest": 10**9, "ages": [0, 60]},
        "index": {"left_out": "not asked for"},
        "version": "0" * 64,
    }
    if index:
        import faiss

        made = build_index(vectors.numpy(), neighbours=settings["neighbours"], breadth=settings["build_breadth"])
        faiss.write_index(made, str(folder / "index.faiss"))
        near = vectors[:: max(1, num_items // _QUERIES)][:_QUERIES]
        queries = unit(near + 0.3 / dim**0.5 * torch.randn(near.shape, generator=generator)).numpy()
        found = recall(made, vectors.numpy(), queries, settings["ef_search"])
        facts["index"] = {"file": "index.faiss", "ef_search": settings["ef_search"], "use": True, "recall@10": found}
    write_facts(folder, {**facts, "files": file_facts(folder)})
