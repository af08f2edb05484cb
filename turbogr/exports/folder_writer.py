"""`turbogr.export`: a trained run as one folder that works without TurboGR, replaced as a whole and checked before.

What is exported is what the run delivers: its model, a simple method, or a weighted sum. `standalone.py` reads the
folder; a copy of it is in the folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from turbogr import __version__
from turbogr.data.atomic_folder import make_beside, move_into_place, remove_abandoned, restore
from turbogr.data.histories import TypicalTimes
from turbogr.data.store import Store
from turbogr.data.vocabulary import Int64Array
from turbogr.errors import UserError, warn_caller
from turbogr.evaluation.scorer import ModelScorer, Scorer
from turbogr.exports import self_test, standalone
from turbogr.exports.apply_delta import DELTA
from turbogr.exports.item_index import write_index
from turbogr.exports.onnx_file import write_onnx
from turbogr.exports.user_graph import INPUTS, OUTPUT, table_norms, trace_user_graph
from turbogr.models.retrieval_model import RetrievalModel
from turbogr.models.table_encoder import TableEncoder
from turbogr.ops.sampled_softmax.reference import unit
from turbogr.parallel.safetensors_file import write_tensors
from turbogr.recommend import Recommender, load
from turbogr.runs import Which
from turbogr.simple.item_to_item import ItemToItem
from turbogr.simple.session_knn import NEWEST, NeighbouringUsers
from turbogr.simple.weighted_sum import WeightedSum

CHECKED_USERS = 10
CHECKED_ITEMS = 10
FACTS = "model.json"
_ROWS_AT_ONCE = 1 << 20
_COPIED = {"recommender.py": standalone, "check.py": self_test}


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written: the folder, the content of model.json, and sentences about what was left out."""

    folder: Path
    facts: dict[str, Any]
    notes: list[str]


def export(
    run: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    which: Which = "best",
    index: bool | None = None,
    with_users: bool = False,
    since: str | Path | None = None,
    plugins: Sequence[str | Path] = (),
) -> Exported:
    """Write what a run delivers as a folder that works without TurboGR; see docs/guide/export.md for its files.

    `index` says whether it has an HNSW index of the items; None: where faiss is installed. `with_users` adds the users
    of the store with their histories. A folder at `out` that is an export is replaced when the new one has passed its
    own check; readers see the old one or the new one. With `since`, an earlier export, only what changed is written: a
    delta folder, which `apply_delta` makes the full export of.

    Raises:
        UserError: not a run, no checkpoint, no store, `out` is something else than an export, or what is delivered has
            no exported form.
    """
    target = Path(out)
    if since is not None:
        from turbogr.exports.delta_folder import write_delta

        check_replaceable(target, DELTA)
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as beside:
            options: dict[str, Any] = {"data": data, "which": which, "index": index, "with_users": with_users}
            made = export(run, Path(beside) / "new", plugins=plugins, **options)
            return Exported(target, write_delta(Path(since), made.folder, target), made.notes)
    check_replaceable(target)
    if index:
        require_faiss()
    require_packages()
    recommender = load(run, data=data, which=which, plugins=plugins, device="cpu")
    with replaced_folder(target) as folder:
        writer = _Writer(recommender, folder, index, with_users)
        facts = writer.write()
    return Exported(target, facts, writer.notes)


def require_packages() -> None:
    """Raise UserError unless what an export is written and checked with can be imported."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime", "safetensors") if not find_spec(name)]
    if missing:
        raise UserError(f"exporting needs {', '.join(missing)}: pip install 'turbogr[export]'")


def require_faiss() -> None:
    """Raise UserError unless faiss can be imported."""
    try:
        import faiss  # noqa: F401
    except ImportError:
        raise UserError(
            "an index needs faiss: pip install 'turbogr[index]' (faiss-cpu), or leave --index out"
        ) from None


def check_replaceable(target: Path, marker: str = FACTS) -> None:
    """Raise UserError where `target` is something that must not be replaced: anything but an export or nothing."""
    restore(target)
    if not os.path.lexists(target):
        if not target.parent.is_dir():
            raise UserError(f"--out {target}: the folder {target.parent} does not exist; create it or name another")
        return
    if target.is_dir() and not target.is_symlink() and (not any(target.iterdir()) or (target / marker).is_file()):
        return
    raise UserError(f"--out {target} exists and is not an export, so it is not replaced; name another folder")


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, which takes its place as a whole at the end of the `with` block."""
    target = Path(os.path.abspath(target))
    restore(target)
    remove_abandoned(target)
    folder, lock = make_beside(target)
    replaced: Path | None = folder
    try:
        yield folder
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        replaced = move_into_place(folder, target)
    finally:
        os.close(lock)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)


def file_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size and the SHA-256 of every file but model.json, by name."""
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": standalone.file_hash(path)}
        for path in sorted(folder.iterdir())
        if path.name != FACTS
    }


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write model.json."""
    (folder / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_graphs(model: RetrievalModel, num_items: int, folder: Path) -> None:
    """Write user.onnx and user.pt2 into a folder that has items.safetensors.

    Raises:
        UserError: the model has no exported form.
    """
    program = trace_user_graph(model, num_items)
    write_onnx(program, folder / "user.onnx", folder / "items.safetensors")
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names files of this machine
    torch.export.save(program, folder / "user.pt2")


class _Writer:
    """Writes the files of one export into an empty folder."""

    def __init__(self, recommender: Recommender, folder: Path, index: bool | None, with_users: bool) -> None:
        self.recommender, self.folder, self.index, self.with_users = recommender, folder, index, with_users
        self.store: Store = recommender.store
        self.notes: list[str] = []

    def write(self) -> dict[str, Any]:
        """Write all files, the self-test included, run it, and return the content of model.json."""
        recommender, opened = self.recommender, self.recommender.opened_run()
        components = self._write_components(recommender.scorer)
        facts: dict[str, Any] = {
            "format": standalone.FORMAT,
            "turbogr_version": __version__,
            "delivered": {"label": opened.delivered, "components": components},
            "model": self._write_model(any(part["kind"] == "model" for part in components)),
            "items": {"num": self.store.num_items, "ids": "item_ids.parquet", "type": self.store.item_ids.kind},
            "seen_items": {
                "left_out": recommender.filter_seen,
                "rule": "all items of a history, also those beyond max_len; a call may say otherwise",
            },
            "histories": self._histories(),
            "run": {"step": opened.checkpoint.step, "which": opened.checkpoint.which},
            "data": {"content_hash": self.store.manifest.content_hash},
        }
        self._write_items()
        if self.with_users:
            self._write_users()
        self._write_check()
        for name, module in _COPIED.items():
            shutil.copyfile(str(module.__file__), self.folder / name)
        facts["index"] = {}
        self._seal(facts)
        opened_export = standalone.Recommender(self.folder)
        facts["index"] = self._write_index(opened_export)
        self._seal(facts)
        self._check(opened_export)
        return facts

    def _seal(self, facts: dict[str, Any]) -> None:
        """Write model.json with the hashes of all files, and the version, a hash of everything."""
        facts.pop("version", None)
        facts["files"] = file_facts(self.folder)
        facts["version"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        write_facts(self.folder, facts)

    def _write_components(self, scorer: Scorer) -> list[dict[str, Any]]:
        """Write the tensors of the simple methods, and return what is summed."""
        tensors: dict[str, Tensor] = {}
        opened = self.recommender.opened_run()
        delivered = getattr(opened.task, "delivered", None)
        if isinstance(scorer, WeightedSum):
            names = [part.name for part in delivered.components] if delivered is not None else []
            parts = list(zip(names, scorer.scorers, scorer.weights, scorer.scales, strict=True))
        else:
            label = opened.config.method or ("model" if isinstance(scorer, ModelScorer) else str(opened.delivered))
            parts = [(label, scorer, 1.0, None)]
        found = []
        for number, (name, part, weight, scale) in enumerate(parts):
            entry = {"name": name, "weight": weight, "scale": scale, **_describe(part, f"{number}.", tensors)}
            found.append(entry)
        if tensors:
            write_tensors(self.folder / "methods.safetensors", tensors)
        return found

    def _write_model(self, needed: bool) -> dict[str, Any] | None:
        """Write the vectors and the graphs of the trained model, if the run has one."""
        model = self.recommender.model
        if model is None:
            return None
        encoder = model.encoder
        if not isinstance(encoder, TableEncoder):
            raise UserError(f"vectors of a {type(encoder).__name__} cannot be exported; only those of a table of items")
        rows = encoder.items
        norms, vectors = torch.empty(len(rows)), torch.empty(rows.shape, dtype=torch.float32)
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            piece = rows[first : first + _ROWS_AT_ONCE].float()
            norms[first : first + _ROWS_AT_ONCE] = table_norms(piece)
            vectors[first : first + _ROWS_AT_ONCE] = unit(piece)
        write_tensors(self.folder / "items.safetensors", {"vectors": vectors, "norms": norms})
        config = encoder.model.config
        facts: dict[str, Any] = {
            "block": config.name,
            "dim": config.dim,
            "max_len": model.max_len,
            "vectors": {"file": "items.safetensors", "vectors": "vectors", "norms": "norms", "score": "dot product"},
            "graph": None,
            "inputs": {
                "items": "int64 [users, events]: rows of item_ids.parquet, the oldest first, then padding",
                "times": "int64 [users, events]: seconds since 1970 (or positions), not descending",
                "lengths": "int64 [users]: events before the padding, 1 to max_len",
                "request_times": "int64 [users]: the time of the request, not before the last event",
            },
            "output": {OUTPUT: "float32 [users, dim], of length 1"},
            "precision": "fp32",
        }
        if encoder.model.precision != "fp32":
            warn_caller(
                f"the run computes in {encoder.model.precision}, and an export in fp32: its lists are those of "
                "`turbogr recommend` computed in fp32"
            )
            facts["trained_in"], encoder.model.precision = encoder.model.precision, "fp32"
        try:
            write_graphs(encoder.model, len(rows), self.folder)
        except UserError as error:
            if needed:
                raise
            self.notes.append(f"user.onnx and user.pt2 are left out: {error}")
            return facts
        assert list(facts["inputs"]) == list(INPUTS)
        return {**facts, "graph": "user.onnx", "program": "user.pt2"}

    def _write_items(self) -> None:
        """Write the raw ids and titles by row, and what a history without a known item gets."""
        store, info = self.store, self.recommender.item_info
        ids = store.item_ids.ids
        columns = {"item_id": pa.array(np.asarray(ids)) if isinstance(ids, np.ndarray) else ids}
        if info is not None and info.has_titles:
            columns["title"] = pa.array(info.titles(np.arange(store.num_items)), pa.string())
        pq.write_table(pa.table(columns), self.folder / "item_ids.parquet", compression="zstd")
        write_tensors(self.folder / "popularity.safetensors", {"share": self._popularity()})

    def _popularity(self) -> Tensor:
        """Share of every item in the training events, [V]."""
        counts = self.store.item_counts(self.recommender.split.train_end)
        return torch.from_numpy((counts / max(1, counts.sum())).astype(np.float32))

    def _write_users(self) -> None:
        store = self.store
        ids = store.user_ids.ids
        column = pa.array(np.asarray(ids)) if isinstance(ids, np.ndarray) else ids
        pq.write_table(pa.table({"user_id": column}), self.folder / "user_ids.parquet", compression="zstd")
        columns = {"offsets": store.offsets, "items": store.items, "times": store.times}
        tensors = {name: torch.from_numpy(np.array(column)) for name, column in columns.items()}
        write_tensors(self.folder / "users.safetensors", tensors)

    def _histories(self) -> dict[str, Any]:
        times = self.store.manifest.times
        typical = TypicalTimes(0, (0,)) if times == "positions" else TypicalTimes.of(self.store)
        return {
            "times": times,
            "newest": typical.newest,
            "ages": list(typical.ages),
            "rule": "without times, the last event is at `newest` and the one j before it `ages[j]` seconds older",
        }

    def _write_check(self) -> None:
        """Write ten histories of the store and the lists that `recommend` gives for them."""
        store, k = self.store, min(CHECKED_ITEMS, self.store.num_items)
        users = _spread_users(store, CHECKED_USERS)
        raw = store.user_ids.decode(users).tolist()
        lists = self.recommender.recommend(users=raw, k=k, output="lists")
        cases = []
        for user, found in zip(users.tolist(), lists, strict=True):
            events = slice(int(store.offsets[user]), int(store.offsets[user + 1]))
            items = store.item_ids.decode(np.asarray(store.items[events])).tolist()
            history = [list(pair) for pair in zip(items, np.asarray(store.times[events]).tolist(), strict=True)]
            ids, scores = [item for item, _ in found], [score for _, score in found]
            cases.append({"history": history, "at": None, "k": k, "items": ids, "scores": scores})
        text = json.dumps({"cases": cases}, ensure_ascii=False)
        (self.folder / "check.json").write_text(text + "\n", encoding="utf-8")

    def _write_index(self, opened: standalone.Recommender) -> dict[str, Any]:
        if opened.vectors is None or opened._session is None or self.index is False:
            reason = "no trained model is part of this export" if opened.vectors is None else "it was not asked for"
            return {"left_out": reason}
        if self.index is None:
            try:
                require_faiss()
            except UserError as error:
                self.notes.append(f"the index is left out: {error}")
                return {"left_out": "faiss was not installed when this was exported"}
        users = _spread_users(self.store, 1000)
        queries = [opened.read_history(history) for history in _raw_histories(self.store, users, opened.max_len)]
        return write_index(self.folder / "index.faiss", opened.vectors, opened.encode(queries))

    def _check(self, opened: standalone.Recommender) -> None:
        """Run the self-test on what was written.

        Raises:
            UserError: a list differs, so nothing is published.
        """
        cases = json.loads((self.folder / "check.json").read_text(encoding="utf-8"))["cases"]
        found = self_test.differences(opened, cases)
        if found:
            raise UserError(
                f"the export does not give the lists that `turbogr recommend` gives ({len(found)} differences, the "
                f"first: {found[0]}), so it is not written. This is a defect; please report it with the run's config"
            )


def _describe(scorer: Scorer, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return how a scorer is computed from which tensors, which are added to `tensors`."""
    if isinstance(scorer, ModelScorer):
        return {"kind": "model"}
    add = _adder(prefix, tensors)
    if isinstance(scorer, ItemToItem):
        add("popularity", scorer.popularity)
        if isinstance(scorer.matrix, np.ndarray):
            add("matrix", scorer.matrix)
        else:
            _add_sparse(add, "", scorer.matrix)
        if scorer.backoff is not None:
            add("backoff", scorer.backoff)
        parameters = {
            "decay": scorer.decay,
            "popularity_weight": scorer.popularity_weight,
            "newest": scorer.newest,
            "sum_repeats": scorer.sum_repeats,
        }
        return {"kind": "item-to-item", "parameters": parameters, "tensors": add.names}
    if isinstance(scorer, NeighbouringUsers):
        add("popularity", scorer.popularity)
        _add_sparse(add, "had_", scorer.had)
        _add_sparse(add, "by_item_", scorer.by_item)
        parameters = {
            "decay": scorer.decay,
            "popularity_weight": scorer.popularity_weight,
            "neighbours": scorer.neighbours,
            "newest": NEWEST,
        }
        return {"kind": "neighbouring-users", "parameters": parameters, "tensors": add.names}
    raise UserError(f"a {type(scorer).__name__} cannot be exported yet; the run delivers it as a part of its lists")


class _adder:
    """Adds arrays to the tensors of a file under a prefix; `names` maps their own names to those in the file."""

    def __init__(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        self.prefix, self.tensors, self.names = prefix, tensors, dict[str, str]()

    def __call__(self, name: str, values: Any) -> None:
        self.names[name] = f"{self.prefix}{name}"
        self.tensors[self.names[name]] = torch.from_numpy(np.ascontiguousarray(values))


def _add_sparse(add: Callable[[str, Any], None], prefix: str, matrix: Any) -> None:
    matrix.sort_indices()
    add(f"{prefix}data", matrix.data.astype(np.float32))
    add(f"{prefix}indices", matrix.indices.astype(np.int32))
    add(f"{prefix}indptr", matrix.indptr.astype(np.int64))


def _spread_users(store: Store, most: int) -> Int64Array:
    """Return up to `most` users with events, spread over the lengths of histories from the shortest to the longest."""
    lengths = np.diff(np.asarray(store.offsets))
    some = np.flatnonzero(lengths > 0)
    if len(some) > most:
        ranked = some[np.argsort(lengths[some], kind="stable")]
        some = ranked[np.linspace(0, len(ranked) - 1, most).astype(np.int64)]
    return some.astype(np.int64)


def _raw_histories(store: Store, users: Int64Array, newest: int) -> Iterator[list[tuple[Any, int]]]:
    for user in users.tolist():
        stop = int(store.offsets[user + 1])
        events = slice(max(int(store.offsets[user]), stop - newest), stop)
        items = store.item_ids.decode(np.asarray(store.items[events])).tolist()
        yield list(zip(items, np.asarray(store.times[events]).tolist(), strict=True))
