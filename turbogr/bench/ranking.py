"""Training a ranking model with 8 tables: time and memory of forward and backward, tokens and candidates per second.

Claim: the public ranking model through jagged, fused operators is faster than in plain PyTorch, in less memory.
Compared with: the same model, parameters and batch in plain PyTorch, padded throughout; and with the structure of the
public code, whose projections are jagged and whose attention is padded.
Keys: `speedup_N` and `memory_saving_N` at sequences of up to N tokens, against padded PyTorch; `public_speedup_N` and
`public_memory_saving_N` against the public structure; `tokens_per_second_N` and `candidates_per_second_N`; at width W,
`speedup_width_W`; `window_speedup_L`: attention alone at L tokens with a window against full attention, both ours.

A sequence is four contextual tokens, a history and 16 candidates; lengths are lognormal and fill half of the padded
batch. A measurement is looking up the rows of eight tables, forward, backward, and the summed gradients of the rows; no
optimiser. Each runs in its own process, so that its peak memory can be read, which is counted above that of tables and
inputs. The time is that of the fastest repeat.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbogr.bench import attention
from turbogr.bench._children import in_child
from turbogr.bench._journal import measured
from turbogr.bench._padded_ranking import PaddedRankingModel, pad_history, parameters_of, with_plain_blocks
from turbogr.bench.attention import make_lengths
from turbogr.bench.record import Cell, Result, Table
from turbogr.config import OptimizerConfig
from turbogr.jagged import Jagged
from turbogr.layers.stu import STUBlock
from turbogr.models.public_ranking_model import PublicInput, PublicRankingModel, PublicSizes, PublicTask
from turbogr.ops import hstu_attention, hstu_ranges, keep_freed_memory
from turbogr.plot import Axis, grouped_bar_chart
from turbogr.tables.embedding_tables import EmbeddingTables, TableSpec
from turbogr.tables.table import LocalTable
from turbogr.tables.working_set import TableIds

SETTINGS: dict[str, Any] = {
    "lengths": [1024, 4096],
    "tokens": 8192,  # of the padded batch; a larger length means fewer sequences
    "width": 64,
    "further_widths": [256],
    "further_length": 1024,
    "heads": 2,
    "layers": 2,
    "candidates": 16,
    "fill": 0.5,
    "table_rows": [200_000, 50_000, 5_000, 50, 100_000, 8, 400, 6],
    "window": 1024,
    "window_lengths": [16384],
    "window_heads": 2,
    "window_head_dim": 64,
    "repeats": 3,
    "threads": 0,  # 0: as many as torch uses
}

_OF_EVENTS = ("item", "author", "tag", "tab")
_OF_USERS = ("user", "age", "city", "device")
_NUM_ACTIONS = 4


class Case(NamedTuple):
    """One batch of the benchmark and how it is measured: by "fused", "padded" or "public"."""

    side: str
    length: int
    num_sequences: int
    width: int
    heads: int
    layers: int
    candidates: int
    fill: float
    table_rows: tuple[int, ...]
    repeats: int
    threads: int


class Measured(NamedTuple):
    """Seconds of the fastest repeat, and peak memory above that of tables and inputs."""

    seconds: float
    peak_bytes: int
    num_tokens: int


class Window(NamedTuple):
    """Attention over one sequence; `window` 0 is full attention."""

    length: int
    window: int
    heads: int
    head_dim: int
    repeats: int
    threads: int


def run(settings: Mapping[str, Any]) -> Result:
    """Compare the three at each of `lengths` and widths, then measure the window."""
    figures: dict[str, float] = {}
    rows: list[list[Cell]] = []
    cases = [(length, settings["width"]) for length in settings["lengths"]]
    cases += [(settings["further_length"], width) for width in settings["further_widths"]]
    for length, width in cases:
        found = {side: _measured_case(settings, side, length, width) for side in SIDES}
        key = str(length) if width == settings["width"] else f"width_{width}"
        fused = found["fused"]
        for side, prefix in (("padded", ""), ("public", "public_")):
            figures[f"{prefix}speedup_{key}"] = found[side].seconds / fused.seconds
            figures[f"{prefix}memory_saving_{key}"] = 1 - fused.peak_bytes / max(1, found[side].peak_bytes)
        count = max(2, settings["tokens"] // length)
        figures[f"tokens_per_second_{key}"] = fused.num_tokens / fused.seconds
        figures[f"candidates_per_second_{key}"] = count * settings["candidates"] / fused.seconds
        seconds = [found[side].seconds * 1e3 for side in SIDES]
        memory = [found[side].peak_bytes / 2**20 for side in SIDES]
        own = [figures[f"{name}_{key}"] for name in ("speedup", "public_speedup", "memory_saving")]
        rates = [figures[f"{name}_per_second_{key}"] for name in ("tokens", "candidates")]
        rows.append([length, width, count, *seconds, *own[:2], *memory, own[2], *rates])
    names = ["padded", "public", "fused"]
    columns = ["length", "width", "sequences", *(f"{name} ms" for name in names), "speed-up", "to public"]
    columns += [*(f"{name} MiB" for name in names), "saving", "tokens/s", "candidates/s"]
    threads = settings["threads"] or torch.get_num_threads()
    title = f"Ranking, {len(settings['table_rows'])} tables, {settings['layers']} STU layers, {threads} threads"
    plot = grouped_bar_chart(
        [f"{row[0]}, width {row[1]}" for row in rows],
        {name: [float(row[3 + place] or 0) for row in rows] for place, name in enumerate(names)},
        title="Forward and backward of the public ranking model",
        x_label="maximum length",
        y=Axis("milliseconds", log=True),
    )
    return Result(figures, [Table(title, columns, rows), _windows(settings, figures)], {"ranking": plot})


SIDES = ("padded", "public", "fused")


def _measured_case(settings: Mapping[str, Any], side: str, length: int, width: int) -> Measured:
    case = Case(
        side,
        length,
        max(2, settings["tokens"] // length),
        width,
        settings["heads"],
        settings["layers"],
        settings["candidates"],
        settings["fill"],
        tuple(settings["table_rows"]),
        settings["repeats"],
        settings["threads"] or torch.get_num_threads(),
    )
    return Measured(*measured(f"{side}, length {length}, width {width}", partial(in_child, measure, case)))


def _windows(settings: Mapping[str, Any], figures: dict[str, float]) -> Table:
    rows: list[list[Cell]] = []
    threads = settings["threads"] or torch.get_num_threads()
    for length in settings["window_lengths"]:
        seconds = {}
        for window in (0, settings["window"]):
            case = Window(
                length, window, settings["window_heads"], settings["window_head_dim"], settings["repeats"], threads
            )
            seconds[window] = measured(f"window {window} of {length}", partial(in_child, measure_window, case))
        figures[f"window_speedup_{length}"] = seconds[0] / seconds[settings["window"]]
        rows.append([length, *(value * 1e3 for value in seconds.values()), figures[f"window_speedup_{length}"]])
    title = f"Attention alone, {settings['window_heads']} heads of {settings['window_head_dim']}, forward and backward"
    return Table(title, ["tokens", "full ms", f"window of {settings['window']} ms", "speed-up"], rows)


def make_model(case: Case) -> PublicRankingModel:
    """Return the public model with drawn parameters, the same for every side."""
    sizes = PublicSizes(
        table_dim=case.width,
        preprocessor_hidden=case.width,
        dim=case.width,
        heads=case.heads,
        v_dim=case.width // case.heads,
        qk_dim=case.width // case.heads,
        layers=case.layers,
        group_norm=False,
        postprocessor="timestamp_layer_norm",
        contextual=dict.fromkeys(_OF_USERS, 1),
        contextual_min_length={},
        additional_features=_OF_EVENTS[1:],
        item_features=[f"cand_{name}" for name in ("item_id", *_OF_EVENTS[1:])],
        action_weights=[2**bit for bit in range(_NUM_ACTIONS)],
        action_dim=8,
        head_hidden=2 * case.width,
        tasks=[PublicTask("click", 1, True), PublicTask("like", 2, True)],
        multitask_weight=0.2,
        time_clamp="rows",
        max_len=case.length,
        num_positions=8192,
        num_time_buckets=2049,
    )
    torch.manual_seed(0)  # of biases
    model = PublicRankingModel(sizes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    for block in model.blocks:
        assert isinstance(block, STUBlock)
        block.reset_parameters(generator)
    return model


def make_batch(case: Case) -> tuple[dict[str, Jagged], dict[str, dict[str, Tensor]]]:
    """Return the features of a batch, and by table the ids of every feature that looks up there."""
    random = torch.Generator().manual_seed(1)
    shape = attention.Case(case.length, case.num_sequences, 1, 1, case.fill, 1, 1)
    extra = len(_OF_USERS) + case.candidates
    history = torch.tensor([max(1, length - extra) for length in make_lengths(shape)])
    asked = torch.full_like(history, case.candidates)
    one = torch.ones_like(history)
    total, shown, users = int(history.sum()), int(asked.sum()), len(history)
    times = torch.cat([torch.randint(0, 30 * 86_400, (int(n),), generator=random).sort()[0] for n in history])
    features = {
        "action_time": Jagged.from_lengths(times + 1_650_000_000, history),
        "query_time": Jagged.from_lengths(torch.full((shown,), 1_650_000_000 + 31 * 86_400), asked),
        "action_weight": Jagged.from_lengths(torch.randint(0, 2**_NUM_ACTIONS, (total,), generator=random), history),
        "cand_action_weight": Jagged.from_lengths(torch.randint(0, 2**_NUM_ACTIONS, (shown,), generator=random), asked),
        "cand_watch_time": Jagged.from_lengths(torch.zeros(shown), asked),
    }
    ids: dict[str, dict[str, Tensor]] = {}
    for table, rows in zip((*_OF_EVENTS, *_OF_USERS), case.table_rows, strict=True):
        name = "item_id" if table == "item" else table
        lengths = {name: history, f"cand_{name}": asked} if table in _OF_EVENTS else {name: one}
        ids[table] = {}
        for feature, own in lengths.items():
            values = torch.randint(1, rows, (int(own.sum()),), generator=random)
            features[feature] = Jagged.from_lengths(values, own)
            ids[table][feature] = values
    assert users == case.num_sequences
    return features, ids


def make_step(case: Case) -> tuple[Callable[[], tuple[Tensor, list[Tensor]]], int]:
    """Return a step of one side: it returns the predictions and the gradients of the dense parameters; and the number
    of real tokens."""
    features, ids = make_batch(case)
    model = make_model(case)
    tables = EmbeddingTables(
        [TableSpec(name, rows, case.width, "adagrad") for name, rows in zip(ids, case.table_rows, strict=True)],
        LocalTable,
        OptimizerConfig(),
    )
    tables.draw(0)
    parameters = parameters_of(model)
    history = features["item_id"].lengths
    num_tokens = int(history.sum()) + len(history) * (len(_OF_USERS) + case.candidates)
    if case.side == "fused":
        wanted = {table: TableIds(list(own.values())) for table, own in ids.items()}

        def step() -> tuple[Tensor, list[Tensor]]:
            sets = tables.fetch(wanted)
            found = sets.look_up_inputs(wanted, torch.device("cpu"))
            vectors = {name: row for table, own in ids.items() for name, row in zip(own, found[table], strict=True)}
            out = model(PublicInput(features, vectors))
            out.losses.sum().backward()
            tables.sum_gradients([group.request for group in sets.groups], sets.gradients())
            return out.predictions.detach(), _taken(parameters)

        return step, num_tokens
    weights = {name: torch.nn.Parameter(tables.gather(name).clone()) for name in ids}
    plain: Any = PaddedRankingModel(model) if case.side == "padded" else with_plain_blocks(model)
    padded_ids = {table: dict(own) for table, own in ids.items()}
    if case.side == "padded":
        for table in _OF_EVENTS:
            name = "item_id" if table == "item" else table
            padded_ids[table][name] = pad_history(ids[table][name], history)

    def plain_step() -> tuple[Tensor, list[Tensor]]:
        vectors = {
            name: torch.nn.functional.embedding(values, weights[table], sparse=True)
            for table, own in padded_ids.items()
            for name, values in own.items()
        }
        out = plain(PublicInput(features, vectors))
        out.losses.sum().backward()
        for weight in weights.values():
            assert weight.grad is not None
            weight.grad.coalesce()
            weight.grad = None
        return out.predictions.detach(), _taken(parameters)

    return plain_step, num_tokens


def _taken(parameters: Any) -> list[Tensor]:
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return grads


def measure(case: Case) -> Measured:
    """Measure a side of a case in this process."""
    torch.set_num_threads(case.threads)
    step, num_tokens = make_step(case)
    if case.side == "fused":
        keep_freed_memory()
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # libraries initialise here, not in the measurement
    before = attention.resident_bytes()
    best = math.inf
    for _ in range(case.repeats):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    return Measured(best, max(1, attention.peak_bytes() - before), num_tokens)


def measure_window(case: Window) -> float:
    """Return the seconds of the fastest forward and backward of attention over one sequence."""
    torch.set_num_threads(case.threads)
    keep_freed_memory()
    torch.manual_seed(0)
    q, k, v = (torch.randn(case.length, case.heads, case.head_dim).requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, case.length])
    visible = hstu_ranges(offsets, window=case.window) if case.window else None
    grad = torch.randn(case.length, case.heads, case.head_dim)
    best = math.inf
    for _ in range(case.repeats):
        start = time.perf_counter()
        out = hstu_attention(q, k, v, offsets, None, max_len=case.length, visible=visible, alpha=case.head_dim**-0.5)
        torch.autograd.grad(out, [q, k, v], grad)
        best = min(best, time.perf_counter() - start)
    return best
