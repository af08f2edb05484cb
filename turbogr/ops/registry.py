"""Which backend serves an operator: decided once per (operator, device, dtype), visible, overridable.

An operator is a function with a contract (its package's `__init__`) and one or more backends. `reference` is the
definition in plain PyTorch and serves every device and floating type. A compiled backend declares what it serves and,
when it cannot, why. `auto` takes the first backend in `PREFERENCE` that can; an explicit choice that cannot be met
raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from turbogr.errors import UserError, nearest

PREFERENCE = ("cpu", "reference")
CHOICES = ("auto", *PREFERENCE)

MISSING_DTYPE = "it computes in float32 only"


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    `why_not(device, dtype)` returns None when the backend serves that device and type, else the reason.
    """

    name: str
    function: Callable[..., Any]
    why_not: Callable[[torch.device, torch.dtype], str | None]


_backends: dict[str, dict[str, Backend]] = {}
_chosen: dict[tuple[str, str, torch.dtype], Backend] = {}
_choice = "auto"
_told: set[str] = set()


def register(operator: str, backend: Backend) -> None:
    """Add a backend to an operator; a second registration of the same name replaces the first."""
    _backends.setdefault(operator, {})[backend.name] = backend
    _chosen.clear()


def register_reference(operator: str, function: Callable[..., Any]) -> None:
    """Add the definition of an operator, which serves everything."""
    register(operator, Backend("reference", function, lambda device, dtype: None))


def set_backend(name: str) -> None:
    """Choose the backend of every operator: auto, cpu or reference.

    Raises:
        UserError: an unknown name, or a backend that this machine cannot run; the reason is in the message.
    """
    global _choice
    if name not in CHOICES:
        raise UserError(f"unknown backend '{name}'; choose from {', '.join(CHOICES)}.{nearest(name, CHOICES)}")
    previous, _choice = _choice, name
    _chosen.clear()
    if name in ("auto", "reference"):
        return
    try:
        for operator in _backends:
            choose(operator, torch.device(name), torch.float32)
    except UserError:
        _choice = previous
        _chosen.clear()
        raise


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Use one backend inside a `with` block."""
    previous = _choice
    set_backend(name)
    try:
        yield
    finally:
        set_backend(previous)


def choose(operator: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the function that serves `operator` for tensors of this device and floating type."""
    key = (operator, device.type, dtype)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _decide(operator, device, dtype)
    return found.function


def _decide(operator: str, device: torch.device, dtype: torch.dtype) -> Backend:
    available = _backends[operator]
    if _choice != "auto":
        chosen = available.get(_choice)
        if chosen is None:
            raise UserError(f"operator '{operator}' has no '{_choice}' backend; use backend auto or reference")
        reason = chosen.why_not(device, dtype)
        if reason is not None:
            raise UserError(f"backend '{_choice}' cannot serve '{operator}' on {device.type} in {dtype}: {reason}")
        return chosen
    for name in PREFERENCE:
        if name not in available:
            continue
        reason = available[name].why_not(device, dtype)
        if reason is None:
            return available[name]
        if reason != MISSING_DTYPE and device.type == name:
            _tell_once(reason)
    raise AssertionError(f"operator '{operator}' has no reference backend")


def _tell_once(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        warnings.warn(f"running on the slower reference operators: {reason}", stacklevel=4)


@dataclass(frozen=True)
class Service:
    """Who serves an operator on a device, and why every preferred backend was passed over."""

    operator: str
    backend: str
    why: str


def services(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Service]:
    """List which backend serves each operator on a device, with the reason, for `turbogr doctor` and run records."""
    rows = []
    for operator in sorted(_backends):
        passed_over = []
        if _choice == "auto":
            for name in PREFERENCE:
                reason = _backends[operator][name].why_not(device, dtype) if name in _backends[operator] else None
                if name in _backends[operator] and reason is None:
                    break
                passed_over.append(f"{name}: {reason or 'not written for this operator'}")
        chosen = _decide(operator, device, dtype)
        why = "; ".join(passed_over) or ("chosen by name" if _choice != "auto" else "the fastest that can run here")
        rows.append(Service(operator, chosen.name, why))
    return rows
