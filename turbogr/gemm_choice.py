"""Which provider computes the large products of a projection: measured on this machine once, and kept in a file.

A provider is refused where it is less exact than fp32 (oneDNN's switch rounds to bf16 on a processor with AMX), where
its result depends on the number of threads although that of PyTorch's library does not, and where it fails. Of the
others the fastest is taken; PyTorch's library, unless another one is faster by a margin.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbogr import machine
from turbogr.files import replace_text
from turbogr.ops import native, projections
from turbogr.ops.projections import PRODUCTS, PROVIDERS, SIZES, Choice

_WEIGHTS = {"medium": (256, 1024), "large": (1024, 2048)}
_ROWS_PER_THREAD, _LEAST_ROWS = 512, 512
_SECONDS, _LEAST_TURNS = 0.06, 5  # per product: providers take turns, so that what else runs slows all of them
_MARGIN = 1.1
_MORE_ERROR = 4.0  # than PyTorch's library makes: sums in another order differ by less, bf16 by a thousand times
_PROBE_ROWS = {"medium": 2048, "large": 256}


@dataclass(frozen=True)
class Measurement:
    """GFLOP/s by "size product" and provider, why a provider was refused there, and the choice that follows."""

    rates: dict[str, dict[str, float]]
    refused: dict[str, dict[str, str]]

    def choice(self, allowed: Collection[str] = PROVIDERS) -> Choice:
        """The fastest provider of each, among those allowed."""
        return {
            (size, product): _fastest(self.rates[f"{size} {product}"], allowed)
            for size in SIZES
            for product in PRODUCTS
        }


def measured() -> Measurement:
    """Return what was measured on this machine with this number of threads and these versions, or measure it now."""
    found = kept()
    if found is None:
        found = measure()
        _keep(found)
    return found


def kept() -> Measurement | None:
    """What an earlier process has measured under the same conditions; None if there is none, or it cannot be read."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
        if content["conditions"] != _conditions():
            return None
        found = Measurement(content["rates"], content["refused"])
        found.choice()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def measure() -> Measurement:
    """Measure every provider; about a second or two."""
    rates: dict[str, dict[str, float]] = {}
    refused: dict[str, dict[str, str]] = {}
    for size in SIZES:
        for product in PRODUCTS:
            key = f"{size} {product}"
            faults = {provider: _fault(provider, size, product) for provider in PROVIDERS[1:]}
            refused[key] = {provider: fault for provider, fault in faults.items() if fault is not None}
            usable = [provider for provider in PROVIDERS if provider not in refused[key]]
            rates[key] = _rates(usable, size, product)
    return Measurement(rates, refused)


def resolve(text: str, allowed: Collection[str] = PROVIDERS) -> Choice:
    """The choice that a config's `train.gemm` stands for; `auto` is what the environment says, or what was measured
    to be the fastest of those allowed.

    Raises:
        UserError: not a choice.
    """
    if text != "auto":
        return projections.parse_choice(text)
    given = os.environ.get(projections.ENVIRONMENT)
    return projections.parse_choice(given, projections.ENVIRONMENT) if given else measured().choice(allowed)


@functools.cache
def unusable(provider: str) -> str | None:
    """Why this process must not use a provider; None if it may. PyTorch's library always may."""
    return None if provider == "torch" else _fault(provider, "medium", "forward")


def _fastest(rates: dict[str, float], allowed: Collection[str]) -> str:
    usable = {provider: rate for provider, rate in rates.items() if provider in allowed}
    best = max(usable, key=lambda provider: usable[provider])
    return best if usable[best] > _MARGIN * usable["torch"] else "torch"


def _fault(provider: str, size: str, product: str) -> str | None:
    """Why a provider must not compute a product; None if it may."""
    reason = projections.problem(provider)
    if reason is not None:
        return reason
    operands = _operands(size, _PROBE_ROWS[size])
    with projections.using(projections.uniform("torch")):
        exact = _multiply(product, *(operand.double() for operand in operands))
    plain, plain_alone = _by_threads("torch", product, operands)
    try:
        ours, ours_alone = _by_threads(provider, product, operands)
    except (RuntimeError, MemoryError) as error:
        return f"it fails: {str(error).splitlines()[0]}"
    our_error, plain_error = (float((result - exact).abs().max()) for result in (ours, plain))
    if our_error > _MORE_ERROR * plain_error:
        return f"its error is {our_error:.1e}, that of PyTorch's library {plain_error:.1e}"
    if torch.equal(plain, plain_alone) and not torch.equal(ours, ours_alone):
        return "its result depends on the number of threads"
    return None


def _by_threads(provider: str, product: str, operands: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The product with the threads of this process (at least two), and with one."""
    threads = torch.get_num_threads()
    try:
        with projections.using(projections.uniform(provider)):
            torch.set_num_threads(max(2, threads))
            together = _multiply(product, *operands)
            torch.set_num_threads(1)
            return together, _multiply(product, *operands)
    finally:
        torch.set_num_threads(threads)


def _rates(providers: list[str], size: str, product: str) -> dict[str, float]:
    """GFLOP/s of each provider in its best turn."""
    rows = max(_LEAST_ROWS, _ROWS_PER_THREAD * torch.get_num_threads())
    operands = _operands(size, rows)
    depth, columns = _WEIGHTS[size]
    shortest = dict.fromkeys(providers, float("inf"))
    end, turns = time.perf_counter() + _SECONDS * len(providers), -1  # the first turn is the warm-up
    while turns < _LEAST_TURNS or time.perf_counter() < end:
        for provider in providers:
            with projections.using(projections.uniform(provider)):
                start = time.perf_counter()
                _multiply(product, *operands)
                if turns >= 0:
                    shortest[provider] = min(shortest[provider], time.perf_counter() - start)
        turns += 1
    return {provider: 2e-9 * rows * depth * columns / seconds for provider, seconds in shortest.items()}


@functools.lru_cache(maxsize=1)
def _operands(size: str, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The input, the weight and the gradient of the result, always the same numbers."""
    depth, columns = _WEIGHTS[size]
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, depth), (depth, columns), (rows, columns))
    x, weight, grad = (torch.rand(shape, generator=generator) - 0.5 for shape in shapes)
    return x, weight, grad


def _multiply(product: str, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    if product == "forward":
        return projections.forward(x, weight)
    if product == "input_gradient":
        return projections.input_gradient(grad, weight)
    return projections.weight_gradient(x, grad, weight)


def _conditions() -> dict[str, Any]:
    """What rates and digits depend on."""
    facts = machine.machine_facts()
    return {
        "cpu": facts["cpu"],
        "isa": facts["isa"],
        "cores": facts["cores"],
        "threads": facts["threads"],
        "torch": str(torch.__version__),
        "kernels": _kernels_hash(),
    }


@functools.cache
def _kernels_hash() -> str | None:
    if native.BACKEND.problem is not None:
        return None
    return f"{native.isa()} {hashlib.sha256(native.PATH.read_bytes()).hexdigest()[:16]}"


def _file() -> Path:
    """Where the measurement for the present conditions is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(json.dumps(_conditions(), sort_keys=True).encode()).hexdigest()[:16]
    return cache / "turbogr" / f"gemm-{name}.json"


def _keep(found: Measurement) -> None:
    """Write it for later processes; where that is not possible, they measure again."""
    try:
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"conditions": _conditions(), **asdict(found)}, indent=1) + "\n")
    except (OSError, RuntimeError):  # no home, or a folder that cannot be written
        return
