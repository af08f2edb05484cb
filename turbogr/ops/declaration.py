"""Declaring an operator of `torch.library`: one annotated Python function, and the rest follows from its names.

    @torch_operator("scale", fake=lambda x: x.new_empty(x.shape))
    def _scale(x: Tensor, factor: float) -> Tensor:
        ...

    @torch_operator("scale_backward", fake=lambda grad: grad.new_empty(grad.shape))
    def _scale_backward(grad: Tensor, factor: float) -> Tensor:
        ...

    set_gradient(_scale, _scale_backward, of="x")

The schema comes from the annotations. A function for CPUs computes in fp32: given bf16 tensors it gets what
`precision.py` says, and its results are rounded to the types of the fake's. Where the processor has a unit for bf16,
another function may take them as they are (`bf16`). A fake (the shapes for `torch.compile`) takes the arguments that it
names, by name. So does the gradient: what the backward operator's
parameters name is saved in the forward pass.

PyTorch's dispatcher, and what torch.library adds for gradients, take a tenth of a millisecond a call, which is most of
a small step. So plain tensors on the CPU that the function reads as they are go straight to it, or to an autograd
function around it. Whatever must see an operator as such (torch.compile, fake tensors, dispatch modes, subclasses) gets
the one of torch.library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._ops import OpOverload

from turbogr.ops import bf16_unit
from turbogr.ops.precision import compute_in_fp32, is_bf16

_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[Tensor | None]: "Tensor?[]",
    int: "int",
    list[int]: "int[]",
    float: "float",
    bool: "bool",
    str: "str",
}
_TENSORS = (Tensor, Tensor | None)


@dataclass(frozen=True)
class _Declaration:
    parameters: dict[str, Any]  # name -> annotation
    outputs: tuple[str, ...]


TorchOperator = Callable[..., Any]
"""A declared operator; its attribute `overload` is that of `torch.ops`."""


@dataclass
class _Eager:
    """How an operator is called without the dispatcher: a function, and the autograd function around it."""

    function: Callable[..., Any]
    allowed: bool
    narrow: bool = False  # whether the function takes bf16 as it is
    gradient: Callable[..., Any] | None = None


_declarations: dict[TorchOperator, _Declaration] = {}
_eager: dict[TorchOperator, _Eager] = {}
_libraries: dict[str, torch.library.Library] = {}


def torch_operator(
    name: str,
    *,
    fake: Callable[..., Any] | None = None,
    outputs: str = "out",
    mutates: str = "",
    device: str = "CPU",
    bf16: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], TorchOperator]:
    """Make `torch.ops.turbogr.<name>` of the decorated function, which becomes the operator.

    The function has no defaults. Its last parameter may be a NamedTuple, whose fields are then arguments of the
    operator, so that a forward and a backward function can share one list. `name` may start with a namespace of its
    own ("mine::scale").

    Args:
        name: Name of the operator.
        fake: Returns empty outputs; takes some of the operator's arguments, by name. None if nothing is returned.
        outputs: Names of the outputs, if there are several. Only the first can have a gradient.
        mutates: Names of the tensors that are changed in place.
        device: Dispatch keys of the devices that the function serves: CPU, CUDA, ...
        bf16: A function for CPUs with the same parameters, called instead if tensors are bf16 and a unit for bf16 is in
            use.
    """

    def declare(function: Callable[..., Any]) -> TorchOperator:
        namespace, _, base = name.rpartition("::")
        namespace = namespace or "turbogr"
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        library = _libraries[namespace]
        parameters, called = _parameters(function)
        library.define(f"{base}{derive_schema(function, mutates)}")
        by_name = (lambda *args: None) if fake is None else _taking_by_name(fake, list(parameters))
        if fake is not None and device == "CPU":
            called = compute_in_fp32(called, by_name, list(parameters))
        if bf16 is not None:
            called = _choose_by_unit(_parameters(bf16)[1], called)
        for key in device.split():
            library.impl(base, called, key)
        torch.library.register_fake(f"{namespace}::{base}", by_name, lib=library)
        overload: OpOverload[..., Any] = getattr(getattr(torch.ops, namespace), base).default
        eager = _Eager(called, allowed=device == "CPU" and not mutates, narrow=bf16 is not None)
        made = _make_call(overload, eager)
        _declarations[made], _eager[made] = _Declaration(parameters, tuple(outputs.split())), eager
        return made

    return declare


def _make_call(overload: OpOverload[..., Any], eager: _Eager) -> TorchOperator:
    """The function that calls an operator in the cheapest way that its arguments allow."""

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not eager.allowed or _is_watched():
            return overload(*args)
        needs_grad = False
        for arg in args:
            for tensor in arg if type(arg) is list else (arg,):
                if isinstance(tensor, Tensor):
                    if type(tensor) not in _PLAIN or tensor.device.type != "cpu":
                        return overload(*args)
                    if tensor.dtype is torch.bfloat16 and not eager.narrow:
                        return overload(*args)
                    needs_grad = needs_grad or tensor.requires_grad
        if not (needs_grad and torch.is_grad_enabled()):
            return eager.function(*args)
        return overload(*args) if eager.gradient is None else eager.gradient(*args)

    call.overload = overload  # type: ignore[attr-defined]
    return call


def _choose_by_unit(narrow: Callable[..., Any], wide: Callable[..., Any]) -> Callable[..., Any]:
    """`narrow` for arguments in bf16 where a unit multiplies them, else `wide`."""

    def computed(*args: Any) -> Any:
        return (narrow if any(map(is_bf16, args)) and bf16_unit.in_use() != "none" else wide)(*args)

    return computed


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_watched() -> bool:
    """Whether a mode or a transformation must see the operators that run."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def derive_schema(function: Callable[..., Any], mutates: str = "") -> str:
    """Arguments and results of an annotated function in the language of torch.library.

    Raises:
        TypeError: an annotation that the language does not have.
    """
    changed = mutates.split()
    arguments = []
    for name, annotation in _parameters(function)[0].items():
        kind = _schema_type(function, name, annotation)
        if name in changed:
            kind = f"Tensor({chr(ord('a') + changed.index(name))}!)"
        arguments.append(f"{kind} {name}")
    result = get_type_hints(function)["return"]
    if get_origin(result) is tuple:
        results = ", ".join(_schema_type(function, "return", part) for part in get_args(result))
        return f"({', '.join(arguments)}) -> ({results})"
    return f"({', '.join(arguments)}) -> {'()' if result is type(None) else _schema_type(function, 'return', result)}"


def set_gradient(
    forward: TorchOperator,
    backward: TorchOperator,
    *,
    of: str,
    unchanged: str = "",
    saved: Callable[..., dict[str, Any]] | None = None,
) -> None:
    """Let `backward` compute the gradients of `forward`.

    The first parameter of `backward` is the gradient of the first output. Each other one is named after an input or an
    output of `forward`, or `needs_<input>` (whether that input needs a gradient), or is a key of what `saved` returns.

    Args:
        forward: The operator that gets a gradient; it takes no lists of tensors.
        backward: The operator that computes it.
        of: Names of the inputs whose gradients `backward` returns, in its order.
        unchanged: Names of inputs whose gradient is that of the output.
        saved: Returns further values to save; takes some of the same inputs, outputs and `needs_<input>`, by name.
    """
    overload: OpOverload[..., Any] = forward.overload  # type: ignore[attr-defined]
    differentiate = _make_backward(forward, backward, of.split(), unchanged.split())
    setup_context = _make_setup_context(forward, backward, saved)
    torch.library.register_autograd(
        overload.name(), differentiate, setup_context=setup_context, lib=_libraries[overload.namespace]
    )
    _eager[forward].gradient = _make_gradient(forward, differentiate, setup_context)


def _make_gradient(
    forward: TorchOperator, differentiate: Callable[..., tuple[Any, ...]], setup_context: Callable[..., None]
) -> Callable[..., Any]:
    """The operator with its gradient, without torch.library. An autograd function returns no lists, so the first output
    is taken apart if it is one."""
    function, num_others = _eager[forward].function, max(0, len(_declarations[forward].outputs) - 1)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            setup_context(ctx, inputs, output)
            first = output[0] if num_others else output
            ctx.is_list = type(first) is list
            if not ctx.is_list:
                return output
            return (*first, *output[1:]) if num_others else tuple(first)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return differentiate(ctx, list(grads[: len(grads) - num_others]) if ctx.is_list else grads[0])

    returns_list = str(forward.overload._schema.returns[0].type) == "List[Tensor]"  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        found = Gradient.apply(*args)
        if not returns_list:
            return found
        parts = list(found[: len(found) - num_others])
        return (parts, *found[len(parts) :]) if num_others else parts

    return call


def _saved_names(backward: TorchOperator) -> tuple[list[str], list[str]]:
    """The parameters of a backward operator after the first: tensors, and other values."""
    parameters = dict(list(_declarations[backward].parameters.items())[1:])
    tensors = [name for name, annotation in parameters.items() if annotation in _TENSORS]
    return tensors, [name for name in parameters if name not in tensors]


def _make_setup_context(
    forward: TorchOperator, backward: TorchOperator, saved: Callable[..., dict[str, Any]] | None
) -> Callable[..., None]:
    """The function that saves what `backward` takes."""
    source = _declarations[forward]
    names = list(source.parameters)
    known = [*names, *source.outputs, *(f"needs_{name}" for name in names)]
    tensors, others = _saved_names(backward)
    further = [name for name in [*tensors, *others] if name not in known]
    if further and saved is None:
        operators = backward.overload, forward.overload  # type: ignore[attr-defined]
        raise TypeError(f"{operators[0]} takes {', '.join(further)}, which {operators[1]} neither takes nor returns")
    pick_tensors, pick_others = _picker([*known, *further], tensors), _picker([*known, *further], others)
    find_further = None if saved is None else _taking_by_name(saved, known)
    several_outputs = len(source.outputs) > 1
    looks_at_needs = saved is not None or any(name.startswith("needs_") for name in others)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if several_outputs else (output,)
        values = (*inputs, *outputs)
        if looks_at_needs:
            values += ctx.needs_input_grad[: len(names)]
        if find_further is not None:
            more = find_further(*values)
            values += tuple(more[name] for name in further)
        if several_outputs:
            ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*pick_tensors(values))
        ctx.others = pick_others(values)

    return setup_context


def _make_backward(
    forward: TorchOperator, backward: TorchOperator, gradients: list[str], unchanged: list[str]
) -> Callable[..., tuple[Any, ...]]:
    """The function that calls `backward` and puts its results in the order of the inputs."""
    parameters, wanted = _declarations[forward].parameters, list(_declarations[backward].parameters)[1:]
    tensors, others = _saved_names(backward)
    pick_arguments = None if wanted == [*tensors, *others] else _picker([*tensors, *others], wanted)
    arrange = _picker(
        ["(none)", "(grad)", *gradients],
        [name if name in gradients else "(grad)" if name in unchanged else "(none)" for name in parameters],
    )
    optional = [at for at, name in enumerate(parameters) if name in gradients and parameters[name] is not Tensor]
    nothing = (None,) * len(parameters)

    def differentiate(ctx: Any, grad: Any, *_: Any) -> tuple[Any, ...]:
        if grad is None or (type(grad) is list and all(part is None for part in grad)):
            return nothing
        # Saved tensors are read once: activation checkpointing frees them when they are read.
        arguments = (*ctx.saved_tensors, *ctx.others)
        results = backward(grad, *(arguments if pick_arguments is None else pick_arguments(arguments)))
        found = arrange((None, grad, *results) if len(gradients) > 1 else (None, grad, results))
        for at in optional:
            if not ctx.needs_input_grad[at]:
                found = (*found[:at], None, *found[at + 1 :])
        return found

    return differentiate


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Names and annotations of an operator's arguments, and a function that takes them one by one."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    if any(parameter.default is not parameter.empty for parameter in parameters.values()):
        raise TypeError(f"{function.__qualname__} is the function of an operator and must not have defaults")
    found = {name: hints[name] for name in parameters}
    last = next(reversed(found), None)
    record = found.get(last) if last is not None else None
    if last is None or not hasattr(record, "_fields"):
        return found, function
    del found[last]
    make, before = record._make, len(found)  # type: ignore[union-attr]
    found.update(get_type_hints(record))

    def taking_fields(*args: Any) -> Any:
        return function(*args[:before], make(args[before:]))

    return found, taking_fields


def _schema_type(function: Callable[..., Any], name: str, annotation: Any) -> str:
    try:
        return _TYPES[annotation]
    except KeyError:
        raise TypeError(f"'{name}' of {function.__qualname__} is {annotation}, which no operator can take") from None


def _taking_by_name(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """A function of values with these names that passes on those that `function` has parameters for."""
    pick = _picker(names, list(inspect.signature(function).parameters))

    def called(*values: Any) -> Any:
        return function(*pick(values))

    return called


def _picker(names: list[str], wanted: Sequence[str]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that picks the wanted ones out of a tuple of values with these names."""
    places = [names.index(name) for name in wanted]
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    (only,) = places
    return lambda values: (values[only],)
