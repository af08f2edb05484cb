"""Tables 2, 3 and 5 of the paper: the bare look-up, load balancing, and communication that a step waits for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from turbogr.bench import embedding, overlap
from turbogr.bench._balance_measured import planned_waiting
from turbogr.bench._journal import measured
from turbogr.bench._paper_rows import FILL, Part, Row, filled_lengths
from turbogr.bench.record import Cell, Table
from turbogr.config import ModelConfig
from turbogr.data.balance import plan_steps, wait_share
from turbogr.data.cost import CostModel
from turbogr.data.step_windows import plan_windows
from turbogr.data.vocabulary import Int64Array
from turbogr.models.flops import counted_cost

_RANKS = 16
_WINDOW = 32
_LENGTHS = (2048, 4096, 8192)
_PER_RANK = (2, 5, 8, 15)


def table2(settings: Mapping[str, Any], part: Part) -> None:
    """The look-up alone, without any optimiser, against padded `nn.Embedding`; then several tables."""
    tables = [1] if settings["quick"] else [1, 8, 32]
    chosen = {**embedding.SETTINGS, "tables": tables, "repeats": 3 if settings["quick"] else 7}
    figures, table = embedding._compare_several_tables(chosen)
    part.tables.append(table)
    in_training = {key: figures[f"lookup_{key}_speedup_tables_1"] for key in ("forward", "backward")}
    for key, paper in (("forward", 6.0), ("backward", 4.0)):
        part.add(
            Row(f"table2_{key}", f"Look-up of real ids alone, {key}: times as fast as the padded one", paper,
                "18 → 3 ms, 36 → 9 ms on one Ascend 910B1; its baseline is padded, too",
                figures[f"bare_{key}_speedup"],
                "1,064,960 ids of which 537,019 are padding, one table of 1 million rows of 128; against nn.Embedding, "
                "with the faster of its dense and sparse gradients; no optimiser on either side. Our backward finds "
                f"the distinct rows; in training that comes first, and then forward is {in_training['forward']:.2g} "
                f"and backward {in_training['backward']:.2g} times as fast", "higher", "measured",
                ("sections=table2",))
        )  # fmt: skip
        for number in tables[1:]:
            part.figures[f"table2_{key}_tables_{number}"] = figures[f"lookup_{key}_speedup_tables_{number}"]


def table3(settings: Mapping[str, Any], part: Part) -> None:
    """Waiting for the slowest of 16 ranks with steps that are planned together; then measured on real ranks."""
    cost = counted_cost(ModelConfig(preset="long"), 128)
    steps = 128 if settings["quick"] else 512
    rows: list[list[Cell]] = []
    for per_rank in _PER_RANK:
        worst = {"before": 0.0, "shared": 0.0, "after": 0.0}
        for longest in _LENGTHS:
            lengths = filled_lengths(_RANKS * per_rank * steps, longest)
            found = waiting_by_plan(lengths, per_rank, cost)
            worst = {name: max(worst[name], found[name]) for name in worst}
            rows.append([per_rank, longest, *found.values()])
        part.figures[f"table3_imbalance_before_{per_rank}"] = worst["before"]
        part.figures[f"table3_imbalance_shared_{per_rank}"] = worst["shared"]
        part.add(
            Row(f"table3_imbalance_after_{per_rank}", f"Waiting for the slowest rank, %, {per_rank} sequences a rank",
                2.40, "16 NPUs, KuaiRand-27K: 47.01 → 2.40 % measured; the paper names no number of sequences",
                worst["after"],
                f"16 ranks, {100 * FILL:.1f} % full, the largest of 2k, 4k and 8k; the model's counted cost, "
                f"{_WINDOW} steps planned together (data.plan_ranks); without a plan {worst['shared']:.2g} %, in order "
                f"{worst['before']:.2g} %", "lower", "simulated", ("sections=table3",))
        )  # fmt: skip
    columns = ["sequences a rank", "max_len", "in order %", "shared %", "planned %", "tokens vary %", "planned",
               "neighbours correlate"]  # fmt: skip
    part.tables.append(Table("Waiting for the slowest of 16 ranks, by the counted cost", columns, rows))
    real = measured("waiting of 2 real ranks", partial(planned_waiting, 2, 8 if settings["quick"] else 32))
    part.tables.append(
        Table("Waiting measured on 2 processes, 2 sequences each",
              ["steps", "equal ranks %", "the second at half speed, not known %", "known %"],
              [[name, *values] for name, values in real.items()])
    )  # fmt: skip
    for name, values in real.items():
        part.figures[f"table3_measured_{name}_2"] = values[0]
        part.figures[f"table3_measured_unequal_{name}_2"] = values[2]


def waiting_by_plan(lengths: Int64Array, per_rank: int, cost: CostModel) -> dict[str, float]:
    """Return what 16 ranks wait, in per cent: in order, shared by cost, planned together; then how tokens per step
    vary (deviation ÷ mean, per cent) in random order and planned, and the correlation of neighbouring steps' lengths.
    """
    size = _RANKS * per_rank
    waits, varies = {}, {}
    for name, strategy in (("before", "none"), ("shared", "reallocate")):
        plan = plan_steps(lengths, world=_RANKS, batch_size=size, strategy=strategy, cost=cost)  # type: ignore[arg-type]
        loads = np.array([[cost.cost(lengths[ranks]).sum() for ranks in step] for step in plan])
        tokens = np.array([lengths[plan.global_batch(step)].sum() for step in range(len(plan))])
        waits[name], varies[name] = 100 * wait_share(loads), 100 * float(tokens.std() / tokens.mean())
    windows = plan_windows(lengths, batch_size=size, ranks=_RANKS, window=_WINDOW, cost=cost)
    steps = [windows.step(number) for number in range(len(windows))]
    loads = np.array(
        [np.bincount(parts, weights=cost.cost(lengths[chosen]), minlength=_RANKS) for chosen, parts in steps]
    )
    tokens = np.array([lengths[chosen].sum() for chosen, _ in steps])
    correlations = []
    for epoch in range(4):  # those of one epoch are left to chance
        plan_of_epoch = plan_windows(lengths, batch_size=size, ranks=_RANKS, window=_WINDOW, cost=cost, epoch=epoch)
        means = [lengths[plan_of_epoch.step(number)[0]].mean() for number in range(len(plan_of_epoch))]
        correlations.append(np.corrcoef(means[:-1], means[1:])[0, 1])
    return {
        **waits,
        "after": 100 * wait_share(loads),
        "varies": varies["shared"],
        "varies_after": 100 * float(tokens.std() / tokens.mean()),
        "correlation": float(np.mean(correlations)),
    }


def table5(settings: Mapping[str, Any], part: Part) -> None:
    """The share of a step that waits for sparse communication, synchronous and semi-asynchronous."""
    model, sequences = ("tiny", 8) if settings["quick"] else ("medium", 16)
    steps = 5
    options = {**overlap.SETTINGS, "modes": ["serial", "pipeline", "semi_async", "exact_overlap"], "models": [model]}
    options |= {"sequences": sequences, "min_steps": steps, "max_steps": steps}
    found, note = overlap._measured("table 5: ", options, 2, options["headline_mbits"])
    modes = found[model]
    part.notes.append(note)
    part.tables.append(Table("Two nodes", overlap._COLUMNS, overlap._rows(model, modes, 2, options["headline_mbits"])))
    part.figures["table5_exposed_sync"] = modes["serial"]["exposed_sparse"]
    part.figures["table5_exposed_exact_overlap"] = modes["exact_overlap"]["exposed_sparse"]
    part.add(
        Row("table5_exposed", "Share of a step that waits for sparse communication, semi-asynchronous", 0.0219,
            "FuXi on 64 GB NPUs, 24.12 → 2.19 %", modes["semi_async"]["exposed_sparse"],
            f"HSTU {model} on two nodes with links of {options['headline_mbits']:,} Mbit/s; "
            f"{100 * modes['serial']['exposed_sparse']:.1f} % one stage after the other; on a CPU, communication also "
            "takes time from computing, which this share does not show (table 6 does)", "lower", "emulated",
            ("sections=table5",))
    )  # fmt: skip
