"""Golden files of public implementations in our layout: names of models, parameters and sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

_MODELS = {
    "fuxi-gamma-hybrid": "fuxi-gamma",
    "fuxi-alpha-days": "fuxi",
    "fuxi-beta-days": "fuxi-beta-days",
}
"""Models in the names of public files, and ours."""

_OLD = {"fuxi-gamma": "fuxi", "fuxi-beta": "fuxi-beta-days"}
"""Models in files that releases before 0.2 wrote, whose parameters have our names."""

_DAYS = ("fuxi", "fuxi-beta-days")
_LAYERS = "_fuxi._attention_layers."
_OURS = {
    "_uvqk": ("uvqk", False),
    "_rel_attn_bias._pos_w": ("position_weight", False),
    "_mffn.lin0.weight": ("out_weight", True),
    "_mffn.lin0.bias": ("out_bias", False),
    "_mffn.lin1.weight": ("ffn_gate", True),
    "_mffn.lin2.weight": ("ffn_down", True),
    "_mffn.lin3.weight": ("ffn_up", True),
}
"""Of the blocks whose times decay in days: our name of a parameter, and whether it is stored transposed."""


def in_our_layout(arrays: Arrays) -> Arrays:
    """Return a file's arrays with our name of the model, its head sizes and options, and parameters that we have."""
    if "model" not in arrays or arrays["model"].size != 1 or arrays["model"].dtype.kind != "U":
        return arrays
    given = str(arrays["model"].reshape(())[()])
    name = _MODELS.get(given, given)
    if name in _OLD and any(key.startswith("param/blocks.") for key in arrays):
        name = _OLD[name]
    found = {**arrays, "model": np.array(name)}
    sizes = _json(arrays.get("config"))
    for key, theirs in (("qk_dim", "dqk"), ("v_dim", "dv")):
        if key not in found and isinstance(sizes.get(theirs), int):
            found[key] = np.array(sizes[theirs])
    if name == "fuxi-linear" and "options" not in found and "ct" in sizes:
        found["options"] = np.array(json.dumps(_linear_options(sizes, arrays)))
    if name in _DAYS and any(key.startswith(f"param/{_LAYERS}") for key in arrays):
        found = _with_our_parameters(found)
    return found


def _json(array: NDArray[Any] | None) -> dict[str, Any]:
    if array is None or array.size != 1 or array.dtype.kind != "U":
        return {}
    try:
        found = json.loads(str(array.reshape(())[()]))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _linear_options(sizes: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Read FuXi-Linear's options from the sections of its own configuration, `ct` (times) and `cp` (positions)."""
    times, positions = sizes.get("ct") or {}, sizes.get("cp") or {}
    named = {
        "periods": times.get("num_heads"),
        "period_base": times.get("base"),
        "period_start": times.get("start_index"),
        "period_stride": times.get("base_stride", 1),
        "position_dim": positions.get("dim"),
    }
    first = f"param/{_LAYERS}0._channel_t."
    return {
        **{key: value for key, value in named.items() if value is not None},
        "learned_decay": f"{first}_gamma" in arrays,
        "weigh_own": f"{first}alpha" in arrays,
    }


def _with_our_parameters(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Rename the parameters of blocks whose times decay in days; a, β and γ become the free numbers that we train."""
    found: dict[str, NDArray[Any]] = {}
    for key, array in arrays.items():
        kind, _, name = key.partition("/")
        if kind not in ("param", "grad") or not name.startswith(_LAYERS):
            found[key] = array
            continue
        number, _, own = name.removeprefix(_LAYERS).partition(".")
        if own in _OURS:
            ours, transposed = _OURS[own]
            found[f"{kind}/blocks.{number}.{ours}"] = array.T if transposed else array
        elif own == "_rel_attn_bias._a":
            found[f"{kind}/blocks.{number}.time_weight"] = _free_decay(
                arrays, f"{_LAYERS}{number}._rel_attn_bias.", kind
            )
        elif own not in ("_rel_attn_bias._beta", "_rel_attn_bias._gamma"):
            found[key] = array  # unknown: the check of the file names it
    return found


def _free_decay(arrays: Arrays, prefix: str, kind: str) -> NDArray[np.float64]:
    """Return (a, softplus⁻¹(β), logit(γ)), or the gradients with respect to them."""
    amplitude, exponent, base = (_number(arrays, f"{kind}/{prefix}{name}") for name in ("_a", "_beta", "_gamma"))
    if kind == "param":
        return np.array([amplitude, np.log(np.expm1(exponent)), np.log(base / (1 - base))])
    by_exponent, by_base = (_number(arrays, f"param/{prefix}{name}") for name in ("_beta", "_gamma"))
    return np.array([amplitude, exponent * -np.expm1(-by_exponent), base * by_base * (1 - by_base)])


def _number(arrays: Arrays, key: str) -> float:
    array = arrays.get(key)
    return float("nan") if array is None or array.size != 1 else float(array.reshape(())[()])
