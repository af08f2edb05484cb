"""Recommends from a folder that `turbogr export` wrote; needs numpy, safetensors and pyarrow, not torch, not TurboGR.

    from recommender import Recommender
    model = Recommender(".")
    model.recommend([["tt0111161", "tt0068646"]], k=10)      # histories: items, oldest first, or (item, time) pairs
    model.similar(["tt0111161"], k=10)

onnxruntime computes the vectors of users where a trained model is part of what is delivered, and faiss searches the
index where it is asked to. Scores, the order of equal scores, the rule of seen items and what a history without times
or without a known item gets are those of `turbogr recommend`. `model.json` describes the folder.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from safetensors import safe_open

FORMAT = 1
END_OF_TIME = 7258118400  # the year 2200
SCORES_AT_ONCE = 1 << 24
PAIRS_AT_ONCE = 1 << 22  # pairs of events of a history that the graph computes at once, over all users
MOST_HNSW = 4096  # neighbours that the index is asked for; a history with more seen items is searched exactly
BLOCK = 128


class RequestError(ValueError):
    """A request that cannot be answered, as a sentence for the person who made it."""


class ExportError(Exception):
    """The folder is not a whole export, or something that it needs is not installed."""


class Recommender:
    """An export, opened. It may be used by several threads at once.

    `search` is "exact", "hnsw" or "auto": the index where the export says that it is for this, else exact. `threads`
    is how many threads the graph computes with (None: all cores).
    """

    def __init__(self, folder, *, search="exact", threads=None):
        self.folder = Path(folder)
        self.facts = read_facts(self.folder)
        facts = self.facts
        self.num_items = int(facts["items"]["num"])
        self.max_len = facts["model"]["max_len"] if facts["model"] else None
        self.filter_seen = bool(facts["seen_items"]["left_out"])
        self.positions = facts["histories"]["times"] == "positions"
        self._typical = facts["histories"]
        table = pq.read_table(self.folder / "item_ids.parquet")
        self.item_ids = _column(table, "item_id")
        self.has_titles = "title" in table.schema.names
        self._titles = _column(table, "title") if self.has_titles else None
        self.rows = RowOfId(self.item_ids)
        self.popularity = read_tensors(self.folder / "popularity.safetensors")["share"]
        self.components = facts["delivered"]["components"]
        methods = self.folder / "methods.safetensors"
        self._methods = read_tensors(methods) if methods.exists() else {}
        self.vectors = self.norms = self._session = self._index = None
        self._index_lock = threading.Lock()
        if facts["model"]:
            tensors = read_tensors(self.folder / "items.safetensors")
            self.vectors, self.norms = tensors["vectors"], tensors["norms"]
            if facts["model"]["graph"]:
                self._session = _session(self.folder / facts["model"]["graph"], threads)
        self.is_model = [part["name"] for part in self.components] == ["model"]
        self.search = search
        if search == "auto":
            self.search = "hnsw" if self.is_model and facts["index"].get("use") and _faiss(False) else "exact"
        if self.search == "hnsw":
            self._open_index()
        self._users = None
        self.has_users = (self.folder / "users.safetensors").exists()

    @property
    def version(self):
        """What names the content of this export."""
        return self.facts["version"]

    def recommend(self, histories, k=10, *, at=None, filter_seen=None, include=None, exclude=None, search=None):
        """Return the k best items of every history as lists of (item, score), best first.

        `at` are times of the requests, one for all or one per history. `include` are the only candidates of all
        histories, `exclude` items that nobody gets.
        """
        read = [self.read_history(history, at=_of(at, number)) for number, history in enumerate(histories)]
        allowed = self.candidates(include, exclude)
        found = self.best(read, k, filter_seen=filter_seen, allowed=allowed, search=search)
        return [self.named(rows, scores) for rows, scores in found]

    def similar(self, items, k=10, *, include=None, exclude=None):
        """Return the k other items closest to every item, as lists of (item, cosine)."""
        allowed = self.candidates(include, exclude)
        rows = [self.row(item) for item in items]
        return [self.named(*found) for found in self.similar_rows(rows, k, allowed=allowed)]

    def similar_rows(self, rows, k, *, allowed=None):
        """As `similar`, from rows to rows and scores."""
        if self.vectors is None:
            raise RequestError("what is delivered here has no vectors of items, because no trained model is part of it")
        check_k(k)
        found = []
        for first in range(0, len(rows), self._at_once):
            some = rows[first : first + self._at_once]
            scores = self.vectors[some] @ self.vectors.T
            found += [self._top(values, k, np.array([row]), allowed) for row, values in zip(some, scores, strict=False)]
        return found

    def row(self, item):
        """Return the row of a raw item; RequestError if it is unknown."""
        row = self.rows.of(item)
        if row is None:
            raise RequestError(f"there is no item {item!r}; this export has {self.num_items:,} others")
        return row

    def candidates(self, include=None, exclude=None):
        """Return which items may be recommended, [V] bool, or None for all."""
        if include is None and exclude is None:
            return None
        allowed = np.full(self.num_items, include is None)
        if include is not None:
            known = [row for row in map(self.rows.of, include) if row is not None]
            if not known:
                raise RequestError("include has no item that this export knows; check the ids, or leave it out")
            allowed[known] = True
        for row in map(self.rows.of, exclude or ()):
            if row is not None:
                allowed[row] = False
        return allowed

    def named(self, rows, scores):
        """Return rows and scores as (raw item, score) pairs."""
        return list(zip(self.names(rows), scores.tolist(), strict=False))

    def names(self, rows):
        """Return the raw ids of rows."""
        return self.item_ids.take(pa.array(rows, pa.int64())).to_pylist()

    def titles(self, rows):
        """Return the titles of rows, None where there is none."""
        if self._titles is None:
            return [None] * len(rows)
        return self._titles.take(pa.array(rows, pa.int64())).to_pylist()

    def read_history(self, history, *, at=None):
        """Read a list of items, oldest first, or of (item, time) pairs in any order.

        Times are seconds since 1970 or ISO text. Events of unknown items are left out and listed in `unknown`.
        """
        if isinstance(history, (str, bytes, dict)) or not hasattr(history, "__iter__"):
            raise RequestError(f"a history is {shown(history)}; give a list of items, or of (item, time) pairs")
        events = list(history)
        timed = [isinstance(event, (list, tuple)) for event in events]
        request = None if at is None else seconds_of(at, "at")
        items, times = events, None
        if any(timed):
            items, times = [], []
            for place, event in enumerate(events):
                if not timed[place] or len(event) != 2:
                    raise RequestError(f"event {place} of a history is {shown(event)}, not an (item, time) pair")
                items.append(event[0])
                usual = event[1] is None and self.positions
                times.append(place if usual else seconds_of(event[1], f"event {place} of a history"))
        for item in items:
            if isinstance(item, bool) or not isinstance(item, (str, int, float)):
                raise RequestError(f"an item of a history is {shown(item)}; items are texts or numbers")
        rows = np.array([-1 if row is None else row for row in map(self.rows.of, items)], np.int64)
        if times is None:
            times = self._typical_times(len(items), request)
        times = np.array(times, np.int64)
        last = int(times.max(initial=0))
        request = last + self.positions if request is None else request
        if request < last:
            raise RequestError(f"the request at {request} lies before the last event of its history at {last}")
        order = np.argsort(times, kind="stable")
        order = order[rows[order] >= 0]
        unknown = [item for item, row in zip(items, rows, strict=False) if row < 0]
        return History(rows[order], times[order], request, unknown)

    def history_of_user(self, user, *, at=None):
        """Return the history of a user of the export's own users; RequestError if it has none or not this one."""
        self.open_users()
        rows, times = self._users.events(user)
        last = int(times[-1]) if len(times) else 0
        request = last + self.positions if at is None else seconds_of(at, "at")
        if request < last:
            raise RequestError(f"the request at {request} lies before the last event of user {user!r} at {last}")
        return History(rows, times, request, [])

    def open_users(self):
        """Read the export's own users, which else happens when the first one is asked for."""
        if self._users is None:
            self._users = StoredUsers.open(self.folder)

    def find_items(self, text, most):
        """Return up to `most` rows whose title or id contains a text, in any case; ids that are the text come first."""
        if not text:
            return []
        row = self.rows.of(text)
        found = [] if row is None else [row]
        for column in (self._titles, self.item_ids):
            if column is not None and len(found) < most:
                texts = column.cast(pa.string())
                holds = pc.fill_null(pc.match_substring(texts, text, ignore_case=True), False)
                places = np.flatnonzero(holds.to_numpy(zero_copy_only=False))
                found += [place for place in places[: 2 * most].tolist() if place not in found]
        return found[:most]

    def best(self, histories, k, *, filter_seen=None, allowed=None, search=None):
        """Return the k best rows of every history and their scores, best first; `allowed` [V] bool or None."""
        ks = k if isinstance(k, (list, tuple)) else [k] * len(histories)
        alloweds = allowed if isinstance(allowed, list) else [allowed] * len(histories)
        seens = filter_seen if isinstance(filter_seen, list) else [filter_seen] * len(histories)
        for value in ks:
            check_k(value)
        seens = [self.filter_seen if value is None else value for value in seens]
        found = [None] * len(histories)
        known = [place for place, history in enumerate(histories) if len(history.rows)]
        for place, history in enumerate(histories):
            if not len(history.rows):
                found[place] = self._top(self.popularity.copy(), ks[place], None, alloweds[place])
        excluded = [np.unique(history.rows) if seen else None for history, seen in zip(histories, seens, strict=False)]
        use_index = (search or self.search) == "hnsw"
        if use_index and not self.is_model:
            raise RequestError(
                "the index searches vectors, and what is delivered is not the model alone; search exactly"
            )
        if use_index and known:
            with self._index_lock:
                self._open_index()
            vectors = self.encode([histories[place] for place in known])
            left = []
            for number, place in enumerate(known):
                most = ks[place] + (0 if excluded[place] is None else len(excluded[place]))
                if alloweds[place] is not None or most > min(MOST_HNSW, self.num_items):
                    left.append(place)
                    continue
                found[place] = self._search_index(vectors[number], ks[place], most, excluded[place])
            known = left
        for first in range(0, len(known), self._at_once):
            some = known[first : first + self._at_once]
            scores = self.scores([histories[place] for place in some])
            for place, values in zip(some, scores, strict=False):
                found[place] = self._top(values, ks[place], excluded[place], alloweds[place])
        return found

    def scores(self, histories):
        """Return the scores of all items for histories with at least one known item, [n, V] float32."""
        if len(self.components) == 1:
            return self._component(0, histories)
        total = np.zeros((len(histories), self.num_items), np.float32)
        for number, part in enumerate(self.components):
            values = self._component(number, histories)
            if part["scale"] is not None:
                values = np.arcsinh(values / np.float32(part["scale"]))
            total += np.float32(part["weight"]) * values
        return total

    def encode(self, histories):
        """Return the unit vectors of histories with at least one known item, [n, d]."""
        if self._session is None:
            raise RequestError("this export has no graph that computes the vectors of users")
        vectors = np.empty((len(histories), self.vectors.shape[1]), np.float32)
        order = sorted(range(len(histories)), key=lambda place: -len(histories[place].rows))
        first = 0
        while first < len(order):
            longest = max(min(2, self.max_len), min(self.max_len, len(histories[order[first]].rows)))
            some = order[first : first + max(1, min(256, PAIRS_AT_ONCE // longest**2))]
            inputs = pad([histories[place] for place in some], longest, self.max_len)
            vectors[some] = self._session.run(["user_vectors"], inputs)[0]
            first += len(some)
        return vectors

    @property
    def _at_once(self):
        return max(1, min(256, SCORES_AT_ONCE // max(1, self.num_items)))

    def _component(self, number, histories):
        part = self.components[number]
        if part["kind"] == "model":
            return self.encode(histories) @ self.vectors.T
        tensors = {name: self._methods[stored] for name, stored in part["tensors"].items()}
        return METHODS[part["kind"]](histories, part["parameters"], tensors, self.num_items)

    def _top(self, scores, k, excluded, allowed):
        """Return the k best rows and their scores; `scores` [V] are changed. Of equal ones the smaller row is first."""
        if allowed is not None:
            scores[~allowed] = -np.inf
        if excluded is not None:
            scores[excluded] = -np.inf
        rows = top_rows(scores, k)
        rows = rows[scores[rows] > -np.inf]
        return rows, scores[rows]

    def _search_index(self, vector, k, most, excluded):
        parameters = _faiss(True).SearchParametersHNSW(efSearch=max(self.facts["index"]["ef_search"], 2 * most))
        scores, rows = self._index.search(vector[None], most, params=parameters)
        scores, rows = scores[0], rows[0]
        kept = rows >= 0
        if excluded is not None:
            kept &= ~np.isin(rows, excluded)
        scores, rows = scores[kept], rows[kept]
        order = np.lexsort((rows, -scores))[:k]
        return rows[order].astype(np.int64), scores[order]

    def _open_index(self):
        if self._index is not None:
            return
        file = self.facts["index"].get("file")
        if file is None:
            raise ExportError(f"{self.folder} has no index: {self.facts['index'].get('left_out')}")
        self._index = _faiss(True).read_index(str(self.folder / file))

    def _typical_times(self, length, request):
        if self.positions:
            return np.arange(length, dtype=np.int64)
        ages, end = self._typical["ages"], self._typical["newest"] if request is None else request
        steps = np.arange(length - 1, -1, -1, dtype=np.int64)
        known = len(ages) - 1
        beyond = np.maximum(steps - known, 0) * (ages[-1] // max(1, known))
        return np.maximum(end - (np.array(ages, np.int64)[np.minimum(steps, known)] + beyond), 0)


class History:
    """Known events in order of time: `rows` and `times` [n], the time of the request, and the unknown items."""

    def __init__(self, rows, times, request, unknown):
        self.rows, self.times, self.request, self.unknown = rows, times, request, unknown


class RowOfId:
    """The row of a raw id. Integers are searched in a sorted array; texts in a dictionary (about 150 bytes an item)."""

    def __init__(self, ids):
        self.is_text = not pa.types.is_integer(ids.type)
        if self.is_text:
            self._rows = {name: row for row, name in enumerate(ids.to_pylist())}
        else:
            numbers = ids.to_numpy(zero_copy_only=False)
            self._order = np.argsort(numbers, kind="stable")
            self._sorted = numbers[self._order]

    def of(self, raw):
        """Return the row, None if it is unknown; 5 and "5" are the same id."""
        if self.is_text:
            return self._rows.get(str(raw))
        if isinstance(raw, float) and raw.is_integer():
            raw = int(raw)
        if isinstance(raw, str):
            try:
                number = int(raw)
            except ValueError:
                return None
            if str(number) != raw:
                return None
            raw = number
        if isinstance(raw, bool) or not isinstance(raw, (int, np.integer)) or not -(2**63) <= raw < 2**63:
            return None
        place = int(np.searchsorted(self._sorted, raw))
        found = place < len(self._sorted) and self._sorted[place] == raw
        return int(self._order[place]) if found else None


class StoredUsers:
    """The users of the training data with their events, which an export has if it was asked for them."""

    def __init__(self, ids, tensors):
        self._rows, self._tensors = RowOfId(ids), tensors

    @classmethod
    def open(cls, folder):
        if not (folder / "users.safetensors").exists():
            raise RequestError("this export has no users; give histories instead, or export it again with --with-users")
        ids = _column(pq.read_table(folder / "user_ids.parquet"), "user_id")
        return cls(ids, read_tensors(folder / "users.safetensors"))

    def events(self, user):
        row = self._rows.of(user)
        if row is None:
            raise RequestError(f"there is no user {shown(user)}; give a history instead")
        start, stop = self._tensors["offsets"][row : row + 2]
        return self._tensors["items"][start:stop].astype(np.int64), self._tensors["times"][start:stop]


def item_to_item(histories, parameters, tensors, num_items):
    """The scores of EASE, item neighbours, Markov chains, popular and recent items, [n, V]."""
    popularity = tensors["popularity"]
    scores = np.zeros((len(histories), num_items), np.float32)
    for values, history in zip(scores, histories, strict=False):
        rows, weights = history_weights(history, parameters)
        share = np.float32(parameters["popularity_weight"])
        if "matrix" in tensors:
            for row, weight in zip(rows, weights, strict=False):
                values += weight * tensors["matrix"][row]
        else:
            add_rows(values, rows, weights, tensors["data"], tensors["indices"], tensors["indptr"])
        if "backoff" in tensors:
            total = np.float32(0)
            for row, weight in zip(rows, weights, strict=False):
                total += weight * tensors["backoff"][row]
            share = share + total
        values += share * popularity
    return scores


def neighbouring_users(histories, parameters, tensors, num_items):
    """The scores of what the users had whose items resemble a history's, [n, V]."""
    scores = np.zeros((len(histories), num_items), np.float32)
    num_users = len(tensors["had_indptr"]) - 1
    for values, history in zip(scores, histories, strict=False):
        rows, weights = history_weights(history, parameters)
        similar = np.zeros(num_users, np.float32)
        indptr = tensors["by_item_indptr"]
        add_rows(similar, rows, weights, tensors["by_item_data"], tensors["by_item_indices"], indptr)
        users = np.flatnonzero(similar)
        if len(users) > parameters["neighbours"]:
            users = np.sort(users[top_rows(similar[users], int(parameters["neighbours"]))])
        add_rows(values, users, similar[users], None, tensors["had_indices"], tensors["had_indptr"])
        values /= max(values.max(), np.finfo(np.float32).tiny)
        values += np.float32(parameters["popularity_weight"]) * tensors["popularity"]
    return scores


METHODS = {"item-to-item": item_to_item, "neighbouring-users": neighbouring_users}


def history_weights(history, parameters):
    """Return the distinct rows of a history, ascending, and their weights decay^age; age 0 is the newest event."""
    newest = parameters.get("newest")
    rows = history.rows if newest is None else history.rows[-newest:]
    ages = np.arange(len(rows) - 1, -1, -1)
    weights = np.power(np.float64(parameters["decay"]), ages).astype(np.float32)
    distinct, last = np.unique(rows[::-1], return_index=True)
    if not parameters.get("sum_repeats"):
        return distinct, weights[len(rows) - 1 - last]
    order = np.argsort(rows, kind="stable")
    sums = np.zeros(len(distinct), np.float32)
    np.add.at(sums, np.searchsorted(distinct, rows[order]), weights[order])
    return distinct, sums


def add_rows(values, rows, weights, data, indices, indptr):
    """Add weights · rows of a sparse matrix to `values`, row by row; without `data` all its entries are 1."""
    for row, weight in zip(rows, weights, strict=False):
        entries = slice(indptr[row], indptr[row + 1])
        values[indices[entries]] += weight if data is None else weight * data[entries]


def top_rows(scores, k):
    """Return the k largest places of `scores` [n], largest first; of equal scores the smaller place is first.

    The k blocks with the largest maxima hold the k largest scores, so only these are sorted.
    """
    n = len(scores)
    k = min(k, n)
    if n > 8 * BLOCK and k * BLOCK < n // 4:
        whole = n // BLOCK * BLOCK
        maxima = scores[:whole].reshape(-1, BLOCK).max(axis=1)
        least = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
        places = np.flatnonzero(scores >= least) if np.isfinite(least) else np.arange(n)
    else:
        places = np.arange(n)
    values = scores[places]
    if len(places) > 4 * k:
        least = np.partition(values, len(values) - k)[len(values) - k]
        places = places[values >= least]
        values = scores[places]
    return places[np.argsort(-values, kind="stable")[:k]]


def pad(histories, longest, max_len):
    """Return the inputs of the graph: the newest `max_len` events of every history, padded with zeros."""
    items = np.zeros((len(histories), longest), np.int64)
    times = np.zeros((len(histories), longest), np.int64)
    lengths = np.empty(len(histories), np.int64)
    for number, history in enumerate(histories):
        length = lengths[number] = min(len(history.rows), max_len)
        items[number, :length] = history.rows[-length:]
        times[number, :length] = history.times[-length:]
    requests = np.array([history.request for history in histories], np.int64)
    return {"items": items, "times": times, "lengths": lengths, "request_times": requests}


def seconds_of(time, where):
    """Return a time as seconds since 1970, from a number, a datetime or ISO text; UTC unless it says otherwise."""
    read = None
    if isinstance(time, str):
        with contextlib.suppress(ValueError):
            time = datetime.datetime.fromisoformat(time.strip().replace("Z", "+00:00"))
    if isinstance(time, datetime.datetime):
        read = (time if time.tzinfo is not None else time.replace(tzinfo=datetime.timezone.utc)).timestamp()
    elif isinstance(time, (int, float, np.integer, np.floating)) and not isinstance(time, bool):
        read = time
    if read is None or (isinstance(read, float) and not math.isfinite(read)):
        raise RequestError(f"{where}: cannot read {shown(time)} as a time; give seconds since 1970 or ISO text")
    if not 0 <= read < END_OF_TIME:
        raise RequestError(f"{where}: {shown(time)} lies before 1970 or after 2200; give seconds, not another unit")
    return int(read)


def check_k(k):
    """Raise RequestError unless k is a whole number of at least 1."""
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise RequestError(f"k is {shown(k)}; give a whole number of items, at least 1")


def shown(value):
    """Return a value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_facts(folder):
    """Return the content of model.json."""
    if (Path(folder) / "delta.json").exists():
        raise ExportError(
            f"{folder} is a delta, not an export; `python {folder}/apply.py OLD NEW` makes an export of it"
        )
    try:
        facts = json.loads((Path(folder) / "model.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExportError(
            f"{folder} is not an export: it has no model.json; `turbogr export RUN --out DIR` writes one"
        ) from None
    except ValueError as error:
        raise ExportError(f"{folder}/model.json is damaged: {error}; export again") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ExportError(f"{folder}/model.json is of another format than {FORMAT}; use the release that wrote it")
    return facts


def read_tensors(path):
    """Return the tensors of a .safetensors file by name."""
    with safe_open(str(path), framework="numpy") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}


def file_hash(path):
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def damages(folder, facts):
    """Return a sentence for every file that is missing or not what was written."""
    found = []
    for name, file in facts["files"].items():
        path = Path(folder) / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != file["bytes"] or file_hash(path) != file["sha256"]:
            found.append(f"{name} is not what was written")
    return found


def _of(values, number):
    return values[number] if isinstance(values, (list, tuple)) else values


def _column(table, name):
    return table.column(name).combine_chunks()


def _faiss(needed):
    try:
        import faiss
    except ImportError:
        if needed:
            raise ExportError("the index needs faiss: pip install faiss-cpu, or search exactly") from None
        return None
    return faiss


def _session(path, threads):
    try:
        import onnxruntime
    except ImportError:
        raise ExportError(f"{path.name} needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
