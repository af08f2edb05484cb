"""Which backend computes an operator: decided once per (operator, device, dtype), visible, overridable.

An operator is a function with a contract (its package's `__init__`) and one or more backends. `reference` is the
definition in plain PyTorch and serves every device and floating type. Another backend declares what it serves
(`Backend`) and, when it cannot, why.

The backends of a built-in operator are found in its folder: every module there that has a `BACKEND` and a function
with the operator's name. A new backend is a new file. `plugin_operators` adds those of plug-ins.

`auto` takes the first backend that can serve: those for particular devices in the order of registration, then those
for any device, then the reference. A backend that is chosen by name serves the operators that it is written for, or
raises; the others are served as with `auto`.

Inside `padded()` every operator has the form that a graph for other runtimes is made of: plain PyTorch over sequences
that are padded to one length. It is the reference of operators that treat every token alone (`per_token`), and the
function of the same name in `padded.py` in the operator's folder for all others.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from turbogr.errors import UserError, did_you_mean, warn_caller
from turbogr.ops.precision import define_in_bf16


@dataclass(frozen=True)
class Backend:
    """What a backend serves.

    `devices` are types of torch devices ("cpu", "cuda"), `dtypes` floating types; empty means all. `problem` is why it
    cannot run on this machine, None if it can. On devices of `by_name_only_on` `auto` does not choose it. On those of
    `or_auto_on` an operator that it cannot serve is served as with `auto`, also where it is chosen by name: the host
    does such work beside a device.
    """

    name: str
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    problem: str | None = None
    by_name_only_on: tuple[str, ...] = ()
    or_auto_on: tuple[str, ...] = ()

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """None if the backend serves this device and type, else the reason."""
        if self.devices and device.type not in self.devices:
            return f"it runs on {', '.join(self.devices)} only"
        if self.problem is not None:
            return self.problem
        if self.dtypes and dtype not in self.dtypes:
            return f"it computes in {', '.join(map(dtype_name, self.dtypes))} only"
        return None


REFERENCE = Backend("reference")
"""The `BACKEND` of a module with definitions in plain PyTorch."""


@dataclass(frozen=True)
class Implementation:
    """The function of a backend for one operator; `auto` does not choose it if it is `only_by_name`."""

    backend: Backend
    function: Callable[..., Any]
    only_by_name: bool = False

    def is_automatic(self, device: torch.device) -> bool:
        """Whether `auto` may choose it on a device."""
        return not self.only_by_name and device.type not in self.backend.by_name_only_on


@dataclass(frozen=True)
class Operator:
    """A registered operator, callable without a contract: the first tensor decides which backend computes it."""

    name: str

    def __call__(self, *args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not tensors:
            raise TypeError(f"operator '{self.name}' needs a tensor among its positional arguments")
        floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        return choose(self.name, tensors[0].device, floating[0] if floating else torch.float32)(*args)


_operators: dict[str, list[Implementation]] = {}  # each in the order of preference
_chosen: dict[tuple[str, str, torch.dtype], Implementation] = {}
_choice = "auto"
_PADDED = Backend("padded")  # chosen by `padded()` alone
_per_token: set[str] = set()
_packages: dict[str, str] = {}
_warned: set[str] = set()
_REMEDIES = {"triton": "install Triton: pip install triton, or turbogr with its extra, turbogr[triton]"}
"""What lets a backend run that cannot, by the backend's name."""
_DEVICES_IF_UNKNOWN = {"triton": ("cuda", "npu", "xpu")}
"""Devices of a backend whose module cannot be imported and so does not say them."""


def register_operator(
    name: str,
    *,
    package: str | None = None,
    reference: Callable[..., Any] | None = None,
    per_token: bool = False,
) -> Operator:
    """Make an operator known, with the backends in a package's folder, or with a function as its reference.

    Registering a name again replaces its reference and keeps the other backends. `per_token` says that it computes
    every token from that token alone, so that its reference also serves padded sequences.

    Raises:
        TypeError: the operator has no reference.
    """
    _operators.setdefault(name, [])
    if per_token:
        _per_token.add(name)
    if package is not None:
        _packages[name] = package
        for backend, function in _find_in_folder(package, name):
            register_backend(name, backend, function)
    if reference is not None:
        register_backend(name, REFERENCE, reference)
    if not any(found.backend.name == REFERENCE.name for found in _operators[name]):
        del _operators[name]
        raise TypeError(f"operator '{name}' has no reference; give the function that defines it")
    return Operator(name)


def register_backend(
    operator: str, backend: Backend, function: Callable[..., Any], *, only_by_name: bool = False
) -> None:
    """Add a backend to an operator; a second one of the same name replaces the first.

    The function takes the same positional arguments as the operator's reference. With `only_by_name` it is used when
    the backend is chosen by name, not by `auto`.

    Raises:
        UserError: there is no such operator.
    """
    find_operator(operator)
    kept = [found for found in _operators[operator] if found.backend.name != backend.name]
    _operators[operator] = sorted([*kept, Implementation(backend, function, only_by_name)], key=_preference)
    _chosen.clear()


def _preference(implementation: Implementation) -> tuple[bool, bool]:
    backend = implementation.backend
    return backend.name == REFERENCE.name, not backend.devices


def _find_in_folder(package: str, operator: str) -> Iterator[tuple[Backend, Callable[..., Any]]]:
    """The backends of an operator that modules of its package have.

    A module that needs a library which is not installed is a backend with that problem, named after the file.
    """
    for info in pkgutil.iter_modules(sys.modules[package].__path__):
        try:
            module = importlib.import_module(f"{package}.{info.name}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == package.partition(".")[0]:
                raise
            yield Backend(info.name.partition("_")[0], problem=f"it cannot be imported: {error}"), _unavailable
            continue
        backend, function = getattr(module, "BACKEND", None), getattr(module, operator, None)
        if isinstance(backend, Backend) and callable(function) and not isinstance(function, ModuleType):
            yield backend, function


def _unavailable(*args: Any) -> Any:
    raise AssertionError("a backend with a problem is never chosen")


def find_operator(name: str) -> Operator:
    """Return a registered operator.

    Raises:
        UserError: there is none of that name.
    """
    if name not in _operators:
        hint = did_you_mean(name, _operators)
        remedy = "A plug-in that has it must be named by `plugins` in the recipe or by --plugins"
        raise UserError(f"there is no operator '{name}'.{hint} {remedy}")
    return Operator(name)


def operators() -> dict[str, tuple[Implementation, ...]]:
    """Every operator with its backends in the order of preference."""
    return {name: tuple(found) for name, found in _operators.items()}


def backends() -> list[Backend]:
    """Every backend that some operator has, in the order of preference; one that cannot run has its problem."""
    found: dict[str, Backend] = {}
    for implementations in _operators.values():
        for implementation in implementations:
            backend = implementation.backend
            if backend.name not in found or (found[backend.name].problem is None and backend.problem is not None):
                found[backend.name] = backend
    return sorted(found.values(), key=lambda backend: backend.name == REFERENCE.name)


def choices() -> list[str]:
    """What `set_backend` accepts: auto, and the names of all backends."""
    return ["auto", *(backend.name for backend in backends())]


def set_backend(name: str) -> None:
    """Choose the backend of every operator by name, or `auto`.

    Raises:
        UserError: an unknown name, or a backend that this machine cannot run; the reason is in the message.
    """
    global _choice
    known = choices()
    if name not in known:
        raise UserError(f"unknown backend '{name}'; choose from {', '.join(known)}.{did_you_mean(name, known)}")
    for backend in backends():
        if backend.name == name and backend.problem is not None:
            raise UserError(f"backend '{name}' cannot run on this machine: {backend.problem}")
    _choice = name
    _chosen.clear()


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Use one backend inside a `with` block."""
    previous = _choice
    set_backend(name)
    try:
        yield
    finally:
        set_backend(previous)


@contextmanager
def padded() -> Iterator[None]:
    """Inside a `with` block, operators take sequences padded to one length N and can be traced: T = B · N tokens,
    and `offsets` have B + 1 entries whose values are not read. What padding tokens get is undefined."""
    global _choice
    previous, _choice = _choice, _PADDED.name
    _chosen.clear()
    try:
        yield
    finally:
        _choice = previous
        _chosen.clear()


def _padded_form(operator: str) -> Implementation:
    if operator in _per_token:
        return next(found for found in _operators[operator] if found.backend.name == REFERENCE.name)
    package = _packages.get(operator)
    function = None
    if package is not None and importlib.util.find_spec(f"{package}.padded") is not None:
        function = getattr(importlib.import_module(f"{package}.padded"), operator, None)
    if function is None:
        raise UserError(
            f"the operator '{operator}' has no form for padded sequences, which a model that is exported consists of; "
            f"write it as a function '{operator}' in padded.py beside the operator's reference"
        )
    return Implementation(_PADDED, function)


def choose(operator: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the function that serves `operator` for tensors of this device and floating type."""
    key = (operator, device.type, dtype)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _in_precision(_decide(operator, device, dtype), dtype)
    return found.function


def _decide(operator: str, device: torch.device, dtype: torch.dtype) -> Implementation:
    if _choice == _PADDED.name:
        return _padded_form(operator)
    for implementation in _operators[operator]:
        if implementation.backend.name == _choice:
            reason = implementation.backend.why_not(device, dtype)
            if reason is not None and device.type in implementation.backend.or_auto_on:
                break
            if reason is not None:
                raise UserError(f"backend '{_choice}' cannot serve '{operator}' on {device.type} in {dtype}: {reason}")
            return implementation
    for implementation in _operators[operator]:
        if implementation.is_automatic(device) and implementation.backend.why_not(device, dtype) is None:
            if implementation.backend.name == REFERENCE.name:
                _warn_of_problems(operator, device)
                _warn_of_device(device)
            return implementation
    raise AssertionError(f"operator '{operator}' has no reference backend")


def _in_precision(implementation: Implementation, dtype: torch.dtype) -> Implementation:
    """What computes in this type: the reference is wrapped by the definition of bf16, other backends have their own."""
    if dtype != torch.bfloat16 or implementation.backend.name != REFERENCE.name:
        return implementation
    return replace(implementation, function=define_in_bf16(implementation.function))


def _warn_of_problems(operator: str, device: torch.device) -> None:
    """Say once why the reference computes what a backend for this device would compute faster."""
    for implementation in _operators[operator]:
        problem, devices = implementation.backend.problem, implementation.backend.devices
        if not implementation.is_automatic(device):
            continue
        if problem is not None and device.type in devices and problem not in _warned:
            _warned.add(problem)
            warnings.warn(f"running on the slower reference operators: {problem}", stacklevel=5)


def _warn_of_device(device: torch.device) -> None:
    """Say once per kind of accelerator which operators the reference computes there, why, and what would help."""
    if device.type in ("cpu", "meta") or device.type in _warned:
        return
    _warned.add(device.type)
    by_reason: dict[str, list[str]] = {}
    for operator in sorted(_operators):
        reason = _why_reference(operator, device)
        if reason is not None:
            by_reason.setdefault(reason, []).append(operator)
    reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    warn_caller(
        f"on {device.type} these operators run as their definition in plain PyTorch, which is far slower and may need "
        f"many times the memory: {reasons}"
    )


def _why_reference(operator: str, device: torch.device) -> str | None:
    """Return why no backend for a device serves an operator there in fp32, None where one does or is not needed."""
    others = [found.backend for found in _operators[operator] if found.backend.name != REFERENCE.name]
    if not others or any(backend.why_not(device, torch.float32) is None for backend in others):
        return None
    for backend in others:
        meant_for = backend.devices or _DEVICES_IF_UNKNOWN.get(backend.name, (device.type,))
        if backend.problem is not None and device.type in meant_for:
            remedy = _REMEDIES.get(backend.name)
            return f"{backend.name}: {backend.problem}" + ("" if remedy is None else f"; {remedy}")
    return f"no backend is written for {device.type}"


@dataclass(frozen=True)
class Service:
    """Which backend serves an operator on a device, and why not one that comes before it."""

    operator: str
    backend: str
    why: str


def services(device: torch.device, dtype: torch.dtype = torch.float32) -> list[Service]:
    """List which backend serves each operator on a device, with the reason, for `turbogr doctor` and run records."""
    return [_service(operator, device, dtype) for operator in sorted(_operators)]


def _service(operator: str, device: torch.device, dtype: torch.dtype) -> Service:
    chosen = _decide(operator, device, dtype).backend.name
    if chosen == _choice:
        return Service(operator, chosen, "chosen by name")
    reasons = []
    for implementation in _operators[operator]:
        if implementation.backend.name == chosen:
            break
        reason = implementation.backend.why_not(device, dtype) or "used only when it is chosen by name"
        reasons.append(f"{implementation.backend.name}: {reason}")
    if _choice != "auto":
        reasons.append(f"{_choice}: not written for this operator")
    return Service(operator, chosen, "; ".join(reasons) or "the fastest that can run here")


def dtype_name(dtype: torch.dtype) -> str:
    """The name without `torch.`."""
    return str(dtype).removeprefix("torch.")
