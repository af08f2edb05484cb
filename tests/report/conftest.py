from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import yaml

from turbogr.data.store import Manifest, Store
from turbogr.data.store_writer import StoreWriter

CONFIG = {
    "model": {"name": "hstu", "dim": 64, "num_blocks": 2, "num_heads": 2, "max_len": 200, "dropout": 0.2},
    "loss": {"num_negatives": 128, "temperature": 0.05, "sampler": "uniform"},
    "optimizer": {"lr": 0.001, "betas": [0.9, 0.98], "weight_decay": 0.0, "clip_norm": None},
    "train": {"epochs": 24, "steps": None, "seed": 0},
    "evaluate": {"part": "valid", "ks": [10, 50, 200], "metric": "ndcg@10", "filter_seen": True},
    "data": {"batch_size": 128, "batch_tokens": None, "window": "last", "split": "leave-two-out"},
}

METRICS = {
    "model": {
        "hr@10": 0.3142, "hr@50": 0.5731, "hr@200": 0.7718, "ndcg@10": 0.1764, "ndcg@50": 0.2333, "ndcg@200": 0.2637,
        "mrr": 0.1502,
    },
    "popularity": {
        "hr@10": 0.0511, "hr@50": 0.1498, "hr@200": 0.3310, "ndcg@10": 0.0247, "ndcg@50": 0.0457, "ndcg@200": 0.0727,
        "mrr": 0.0242,
    },
    "markov": {
        "hr@10": 0.1723, "hr@50": 0.3587, "hr@200": 0.5120, "ndcg@10": 0.0931, "ndcg@50": 0.1338, "ndcg@200": 0.1571,
        "mrr": 0.0817,
    },
}  # fmt: skip


def make_store(path: Path, num_users: int = 900, num_items: int = 700) -> Store:
    """A store with lognormal lengths and Zipf popularity."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.6, 0.8, num_users), 5, 900).astype(np.int64)
    weights = 1.0 / np.arange(1, num_items + 1) ** 0.9
    items = rng.choice(num_items, lengths.sum(), p=weights / weights.sum())
    with StoreWriter(path) as writer:
        writer.append("offsets", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        writer.append("items", items.astype(np.int32))
        writer.append("times", np.arange(lengths.sum()) + 1_700_000_000)
        writer.write_vocabulary("user_ids", np.arange(num_users))
        writer.write_vocabulary("item_ids", np.arange(num_items))
        return writer.commit(
            Manifest(
                source="synthetic",
                num_users=num_users,
                num_items=num_items,
                num_events=int(lengths.sum()),
                split="leave-two-out",
                times="real",
                account={},
            )
        )


def run_record(store: Store) -> dict:
    return {
        "turbogr": "0.1.0",
        "command": "turbogr train recipes/quickstart.yaml --data demo/data --out demo/run",
        "recipe": "recipes/quickstart.yaml",
        "created": "2025-03-12T13:58:11+00:00",
        "finished": "2025-03-12T14:01:02+00:00",
        "status": "finished",
        "data": {
            "path": str(store.path),
            "content_hash": store.manifest.content_hash,
            "source": "synthetic",
            "num_users": store.num_users,
            "num_items": store.num_items,
            "num_events": store.num_events,
        },
        "model": {"name": "hstu", "num_dense_parameters": 49_794, "num_table_parameters": 44_800},
        "machine": {
            "cpu": "AMD EPYC 7R13", "cores": 2, "threads": 2, "memory_bytes": 25_274_793_984, "device": "cpu",
            "isa": ["avx", "fma", "avx2"], "gemm_peak_flops": 1.81e11,
        },
        "versions": {"turbogr": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.4.6"},
        "backends": {"jagged_attention": "cpu", "embedding": "cpu", "sampled_softmax": "reference"},
        "peak_memory_bytes": 812_345_678,
    }  # fmt: skip


def metric_records() -> list[dict]:
    rng = random.Random(0)
    records = []
    for step in range(1, 1201):
        records.append(
            {
                "kind": "train", "step": step, "epoch": step / 50,
                "loss": 2.1 + 3.2 * math.exp(-step / 220) + rng.gauss(0, 0.07),
                "lr": 1e-3 * min(1, step / 100), "grad_norm": 0.6 + math.exp(-step / 90) + abs(rng.gauss(0, 0.06)),
                "tokens": step * 5200, "tokens_per_second": 41000 + rng.gauss(0, 900) - (9000 if step < 6 else 0),
                "sequences_per_second": 1000.0, "mfu_strict": 0.118 + rng.gauss(0, 0.003),
                "mfu_nominal": 0.31 + rng.gauss(0, 0.006), "elapsed": step * 0.128,
            }
        )  # fmt: skip
        if step % 50 == 0:
            grown = (1 - math.exp(-step / 260)) - max(0, step - 850) * 2.5e-4
            metrics = {key: value * grown + rng.gauss(0, 0.002) for key, value in METRICS["model"].items()}
            epoch = step // 50
            records.append({"kind": "eval", "part": "valid", "step": step, "epoch": epoch, **metrics, "num_users": 900})
    return records


def samples() -> dict:
    rng = random.Random(3)
    users = []
    for place in range(12):
        target = rng.randrange(700)
        listed = rng.sample(range(700), 10)
        if place % 3 != 1:
            listed[place % 7] = target
        now = 1_741_780_000
        moments = sorted(now - int(10 ** rng.uniform(1, 6.5)) for _ in range(6 + place))
        users.append(
            {
                "user": 1000 + 37 * place,
                "history": [{"item": rng.randrange(700), "time": moment} for moment in moments],
                "target": target,
                "target_time": now,
                "target_rank": listed.index(target) + 1 if target in listed else rng.randrange(11, 400),
                "recommendations": [{"item": item, "score": 18.2 - 0.7 * i} for i, item in enumerate(listed)],
            }
        )
    return {"users": users}


def evaluation() -> dict:
    worse = {name: {key: value * 0.99 for key, value in values.items()} for name, values in METRICS.items()}
    return {
        "step": 850,
        "epoch": 17,
        "selected_on": "valid ndcg@10",
        "parts": {"test": METRICS, "valid": worse},
        "num_users": 900,
        "protocol": "leave-two-out: each user's last event is the test item and the one before it the validation item; "
        "the test item is ranked against all 700 items, without the user's earlier items; checkpoint of step 850 "
        "(epoch 17), chosen by its ndcg@10 on the validation items",
    }


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("store") / "data")


def write_run(run: Path, store: Store) -> Path:
    """Write a finished run with everything a report can show."""
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    (run / "run.json").write_text(json.dumps(run_record(store)))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metric_records()))
    (run / "evaluation.json").write_text(json.dumps(evaluation()))
    (run / "samples.json").write_text(json.dumps(samples()))
    return run


@pytest.fixture
def run_folder(tmp_path: Path, store: Store) -> Path:
    return write_run(tmp_path / "quickstart-run", store)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, store: Store) -> Path:
    """One run for many tests that do not change it."""
    return write_run(tmp_path_factory.mktemp("runs") / "quickstart-run", store)
