"""Operators and backends of plug-ins: what `turbogr.plugins.register` gets for them goes into the operators' registry.

    @register("operator", "pool")
    def pool_reference(x: Tensor) -> Tensor:  # the definition, in plain PyTorch
        ...

    @register("backend", "fast", operator="pool")
    @serves(devices=["cpu"], dtypes=[torch.float32])
    def pool_fast(x: Tensor) -> Tensor:
        ...

    pool = operator("pool")  # pool(x) runs on the backend that serves x

A backend without `serves` serves every device and type. One for a built-in operator is used only when `train.backend`
names it, so that a run's record has its name; `auto` does not choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from turbogr import plugins
from turbogr.errors import UserError, did_you_mean
from turbogr.ops import registry
from turbogr.ops.registry import Backend, Operator

_Function = TypeVar("_Function", bound=Callable[..., Any])

_added: set[tuple[str, str]] = set()  # (operator, backend) of plug-ins


def serves(
    *, devices: Sequence[str] = (), dtypes: Sequence[torch.dtype] = (), problem: str | None = None
) -> Callable[[_Function], _Function]:
    """Return a decorator that declares what a backend's function serves; see `registry.Backend`."""

    def declare(function: _Function) -> _Function:
        function.serves = (tuple(devices), tuple(dtypes), problem)  # type: ignore[attr-defined]
        return function

    return declare


def operator(name: str) -> Operator:
    """Return a registered operator; the first tensor of a call decides which backend computes it.

    Raises:
        UserError: there is none of that name.
    """
    return registry.find_operator(name)


def accept_plugins() -> None:
    """Add the operators and backends of plug-ins, now and whenever one is loaded; call it after all built-in ones."""
    plugins.listen("operator", _add_operator)
    plugins.listen("backend", _add_backend)


def _add_operator(component: plugins.Component) -> None:
    _check_new(component.name, registry.REFERENCE.name, component)
    registry.register_operator(component.name, reference=component.factory)


def _add_backend(component: plugins.Component) -> None:
    operator, known = component.operator, sorted(registry.operators())
    if operator not in known:
        raise UserError(
            f"the backend '{component.name}' is for the operator '{operator}', which does not exist; give register() "
            f"one of operator={', '.join(known)}.{did_you_mean(str(operator), known)}"
        )
    _check_new(operator, component.name, component)
    backend = Backend(component.name, *getattr(component.factory, "serves", ()))
    built_in = (operator, registry.REFERENCE.name) not in _added
    registry.register_backend(operator, backend, component.factory, only_by_name=built_in)


def _check_new(operator: str, backend: str, component: plugins.Component) -> None:
    """Refuse to replace what is not a plug-in's; a plug-in that is loaded again replaces its own."""
    existing = [found.backend.name for found in registry.operators().get(operator, ())]
    if backend in existing and (operator, backend) not in _added:
        raise UserError(
            f"the {component.kind} '{component.name}' of {component.origin} exists already: operator '{operator}' has "
            f"a backend '{backend}'; choose another name"
        )
    _added.add((operator, backend))
