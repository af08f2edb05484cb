"""Golden files: a model's parameters, inputs, outputs and gradients, by which two implementations are compared.

The layout is the one of docs/models/conformance.md. Models that have a public implementation carry its parameter names
and shapes; the others carry ours. Everything is computed with dropout off.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.config import MAX_TIME_BUCKETS, ModelConfig
from turbogr.config.values import convert
from turbogr.data.batching import Batch
from turbogr.errors import UserError, did_you_mean
from turbogr.files import atomic_file
from turbogr.jagged import Jagged
from turbogr.machine import memory_bytes
from turbogr.models.golden_names import in_our_layout
from turbogr.models.retrieval_model import RetrievalModel
from turbogr.ops import registry
from turbogr.ops.sampled_softmax.reference import unit
from turbogr.plugins import check_name, find, section_class

TOLERANCE = 1e-4
"""Largest relative error of a tensor at which two implementations in float32 count as the same."""

_FAIR = TOLERANCE / 4  # of a file that we write: other orders of summation round a few times worse than ours

_SCALARS = {
    "num_heads": "num_heads",
    "max_len": "max_len",
    "num_buckets": "num_time_buckets",
    "qk_dim": "qk_dim",
    "v_dim": "v_dim",
}
"""Sizes by their keys in the file and in the config; the last two may be missing in a file."""

_RANGES = {
    ("fuxi-beta", "_pow_b"): (0.4, 0.8),
    ("fuxi-gamma", "_beta"): (0.1, 0.3),
    ("fuxi-gamma", "_gamma"): (0.8, 0.95),
    ("fuxi-linear", "_emb"): (-1.0, 1.0),
    ("fuxi-linear", "_alpha"): (2.0, 4.0),
    ("fuxi-linear", "_beta"): (0.5, 1.0),
    ("fuxi-linear", "alpha"): (0.5, 1.5),
    ("fuxi-linear", "beta"): (0.5, 1.5),
}
"""Parameters that are drawn from a range in a file that we write: they make sense in it alone, or weigh two parts of a
channel whose norm forgets their common factor, so that a gradient would cancel if one part were negligible."""

_INTEGERS = ("ids", "timestamps", "lengths")
_LARGEST_SIZE = 2**18  # beyond any model; products of sizes stay far from overflow
_LAYOUT = "See docs/models/conformance.md for the layout"

ITEMS_NAME = "_embedding_module._item_emb.weight"
_POSITIONS = "_input_features_preproc._pos_emb.weight"
_FFN_NAMES = ("lin2.weight", "ffn_up")  # the parameters whose last dimension is the width of the feed-forward part


@dataclass(frozen=True)
class Difference:
    """How far one of our tensors is from the file's: ‖ours − theirs‖ / ‖theirs‖, or as its golden file measures it.

    `tolerance` is the largest error at which it counts as the same; None: `TOLERANCE`.
    """

    name: str
    shape: tuple[int, ...]
    error: float
    tolerance: float | None = None


@dataclass(frozen=True)
class Golden:
    """The content of a golden file, floats as float32 and integers as int64, whatever the port that wrote it uses."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str) -> Golden:
        """Read and check a golden file.

        Raises:
            UserError: the file cannot be read, misses a tensor, or holds one of the wrong kind or shape or of a
                parameter that our model does not have.
        """
        return cls.of(load_arrays(path), path)

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], path: Path | str) -> Golden:
        """Take over the arrays of a file, checked as by `read`."""
        try:
            arrays = in_our_layout(arrays)
            config, options = _config_of(arrays)
            golden = cls(config, _tensors_of(arrays), options)
            golden._check()
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        return golden

    @property
    def title(self) -> str:
        return f"{self.config.name}, {self.config.num_blocks} blocks of width {self.config.dim}"

    def compare(self, *, recompute: bool = False, device: torch.device | str = "cpu") -> list[Difference]:
        """Run our model on the file's input and parameters; return the difference of the output and every gradient.

        `recompute` is RetrievalModel's.
        """
        model, *inputs = self.build(recompute=recompute)
        table, ids, times, lengths, cotangent = (x.to(device) for x in (*inputs, self.tensors["cotangent"]))
        ours = {
            name: value.cpu() for name, value in _run(model.to(device), table, ids, times, lengths, cotangent).items()
        }
        return [
            Difference(name, tuple(value.shape), relative_error(value, self.tensors[name]))
            for name, value in ours.items()
        ]

    def build(
        self, dtype: torch.dtype = torch.float32, *, recompute: bool = False
    ) -> tuple[RetrievalModel, Tensor, Tensor, Tensor, Tensor]:
        """Return our model with the file's parameters, the item table, both in `dtype`, ids, timestamps and lengths."""
        model = RetrievalModel(self.config, options=self.options, recompute=recompute).to(dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                theirs, transposed = public_name(self.config.name, name)
                value = self.tensors["param/" + theirs]
                parameter.copy_(value.T if transposed else value)
        inputs = (self.tensors[key] for key in ("ids", "timestamps", "lengths"))
        table = self.tensors["param/" + ITEMS_NAME].to(dtype, copy=True)
        return model, table, *inputs  # type: ignore[return-value]

    def _check(self) -> None:
        config, tensors = self.config, self.tensors
        assert config.dim is not None and config.max_len is not None
        batch, items = len(tensors["output"]), _get(tensors, "param/" + ITEMS_NAME)
        if items.dim() != 2:
            raise UserError(
                f"'param/{ITEMS_NAME}' has shape {tuple(items.shape)}, it must be [items + 1, d]. {_LAYOUT}"
            )
        shapes: dict[str, tuple[int, ...]] = {
            "lengths": (batch,),
            "ids": (batch, config.max_len),
            "timestamps": (batch, config.max_len),
            "output": (batch, config.max_len, config.dim),
            "cotangent": (batch, config.max_len, config.dim),
        }
        for kind in ("param/", "grad/"):
            shapes[kind + ITEMS_NAME] = (len(items), config.dim)
            shapes.update({kind + name: shape for name, shape in _parameter_shapes(config, self.options)})
        for name, shape in shapes.items():
            if tuple(_get(tensors, name).shape) != shape:
                raise UserError(f"'{name}' has shape {tuple(tensors[name].shape)}, it must be {shape}. {_LAYOUT}")
        self._refuse_other_parameters(shapes.keys())
        lengths, ids = tensors["lengths"], tensors["ids"]
        if lengths.min() < 0 or lengths.max() >= config.max_len:
            raise UserError(
                f"lengths must lie between 0 and {config.max_len - 1}, which leaves a place for the time of the "
                f"request; got {int(lengths.min())} to {int(lengths.max())}"
            )
        if ids.min() < 0 or ids.max() >= len(items):
            raise UserError(f"ids must lie between 0 and {len(items) - 1}, got {int(ids.min())} to {int(ids.max())}")

    def _refuse_other_parameters(self, known: Collection[str]) -> None:
        """What agrees while a port's other parameters stand at their first values need not do so once it is trained."""
        other = [name for name in self.tensors if name.startswith(("param/", "grad/")) and name not in known]
        if other:
            more = f" and {len(other) - 3} more" if len(other) > 3 else ""
            raise UserError(
                f"it holds {', '.join(map(repr, other[:3]))}{more} of parameters that our {self.config.name} does not "
                "have, so its model is another one; make the port without them, or leave them out of the file if the "
                "output does not depend on them"
            )


def write_golden(
    path: Path | str,
    config: ModelConfig,
    *,
    num_items: int = 50,
    num_sequences: int = 5,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write a golden file of our model with random parameters and input; the file is written aside and renamed.

    The output and the gradients are those of the definition in float64, whichever backend is chosen. `config` must
    have dim and max_len; its position table must cover max_len. `options` are the sections of its components by name.

    Raises:
        UserError: this machine has too little memory for so large a model or input; a gradient is 0, or hangs on
            rounding, so that a right implementation in float32 could fail.
    """
    config = config.with_preset()
    assert config.dim is not None and config.max_len is not None and config.max_len >= 2
    assert (config.max_distance or config.max_len) >= config.max_len, "the file's layout has a full position table"
    section = section_class("block", config.name)
    options = options or ({} if section is None else {config.name: section()})
    _check_memory(config, options, num_items, num_sequences)
    golden = _draw(config, options, num_items, num_sequences, seed)
    with registry.backend("reference"):
        exact = _run(*golden.build(torch.float64, recompute=True), golden.tensors["cotangent"].double())
    exact = {name: value.float() for name, value in exact.items()}
    golden = dataclasses.replace(golden, tensors={**golden.tensors, **exact})
    _check_fair(golden)
    arrays: dict[str, NDArray[Any]] = {
        "model": np.array(config.name),
        **{key: np.array(getattr(config, field), np.int64) for key, field in _SCALARS.items()},
        **{key: tensor.numpy() for key, tensor in golden.tensors.items()},
    }
    if config.name in golden.options:
        arrays["options"] = np.array(json.dumps(dataclasses.asdict(golden.options[config.name])))
    with atomic_file(path, follow_link=True) as aside, aside.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _draw(config: ModelConfig, options: Mapping[str, Any], num_items: int, num_sequences: int, seed: int) -> Golden:
    """Return random parameters and input, without output and gradients."""
    assert config.dim is not None and config.max_len is not None
    random = np.random.default_rng(seed)
    scale = min(0.1, config.dim**-0.5)  # wide models of larger values amplify every rounding
    tensors = {}
    ranged = [name for kind, name in _RANGES if kind == config.name]
    for name, shape, transposed in _parameters(config, options):
        value = torch.from_numpy(random.normal(0, scale, shape)).float()
        if name.rpartition(".")[2] in ranged:
            low, high = _RANGES[config.name, name.rpartition(".")[2]]
            value = torch.from_numpy(random.uniform(low, high, shape)).float()
        tensors["param/" + name] = (value.T if transposed else value).contiguous()
    table = torch.from_numpy(random.normal(0, scale, (num_items + 1, config.dim))).float()
    table[0] = 0
    n = config.max_len
    lengths = torch.from_numpy(np.linspace(n - 1, 1, num_sequences).round().astype(np.int64))
    ids = torch.from_numpy(random.integers(1, num_items + 1, (num_sequences, n)))
    gaps = np.exp(random.uniform(0, math.log(3e6), (num_sequences, n))).astype(np.int64)
    times = torch.from_numpy(1_000_000_000 + np.cumsum(gaps, axis=1))
    place = torch.arange(n)
    ids = ids.masked_fill(place >= lengths[:, None], 0)
    times = times.masked_fill(place > lengths[:, None], 0)
    cotangent = torch.from_numpy(random.normal(0, 1, (num_sequences, n, config.dim))).float()
    cotangent[place >= lengths[:, None]] = 0
    inputs = {"ids": ids, "timestamps": times, "lengths": lengths, "cotangent": cotangent}
    return Golden(config, {**inputs, "param/" + ITEMS_NAME: table, **tensors}, options)


def _check_fair(golden: Golden) -> None:
    """Refuse a file that tells nothing about a parameter, or more about rounding than about an implementation."""
    for name, tensor in golden.tensors.items():
        if name.startswith("grad/") and not tensor.any():
            raise UserError(f"'{name}' of this model and input is 0 and tests nothing; choose larger sizes")
    for backend in ("auto", "reference"):
        with registry.backend(backend):
            worst = max(golden.compare(recompute=True), key=lambda row: row.error)
        if worst.error > _FAIR:
            raise UserError(
                f"'{worst.name}' of this model and input hangs on rounding: float32 has it with a relative error of "
                f"{worst.error:.1e}, of which a fair file allows {_FAIR:g}. It cancels nearly to 0, or a ReLU is given "
                "nearly 0; choose another seed or other sizes"
            )


def _check_memory(config: ModelConfig, options: Mapping[str, Any], num_items: int, num_sequences: int) -> None:
    """Estimate what writing a file takes, from the shapes alone: allocating until it fails may end other programs."""
    assert config.dim is not None and config.max_len is not None and config.num_blocks is not None
    assert config.num_heads is not None
    block = [shape for _, shape in _parameter_shapes(dataclasses.replace(config, num_blocks=1), options)]
    position = block.pop(0)
    numbers = math.prod(position) + config.num_blocks * sum(map(math.prod, block)) + (num_items + 1) * config.dim
    # In float64, with a copy of every gradient; of the blocks all inputs are kept, and the inside of one: an input and
    # an output per token of every matrix, their gradients, and all pairs of a sequence's places.
    widths = sum(sum(shape) for shape in block if len(shape) == 2)
    tokens = num_sequences * config.max_len
    needed = 36 * numbers + 8 * tokens * ((8 + config.num_blocks) * config.dim + 2 * widths)
    needed += tokens * config.max_len * (48 + 8 * config.num_heads)
    if needed > memory_bytes():
        raise UserError(
            f"a golden file of {config.num_blocks} blocks of width {config.dim} and {config.max_len:,} places takes "
            f"about {needed / 2**30:,.1f} GiB of memory to write, this machine has {memory_bytes() / 2**30:,.1f} GiB; "
            "choose smaller sizes"
        )


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖ in double precision; infinite if one is not finite, or theirs is 0 and ours is not."""
    difference, size = (float(x.double().norm()) for x in (ours.double() - theirs.double(), theirs))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def largest_error(ours: Tensor, theirs: Tensor, *, relative: bool) -> float:
    """The largest |ours − theirs|, with `relative` over the largest |theirs|; infinite if one is not finite."""
    if tuple(ours.shape) != tuple(theirs.shape) or not ours.isfinite().all():
        return math.inf
    if not ours.numel():
        return 0.0
    difference = float((ours.double() - theirs.double()).abs().max())
    size = float(theirs.double().abs().max()) if relative else 1.0
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def _run(
    model: RetrievalModel, table: Tensor, ids: Tensor, times: Tensor, lengths: Tensor, cotangent: Tensor
) -> dict[str, Tensor]:
    """Return the padded output and every gradient of sum(output · cotangent), by the names and shapes of the file."""
    table = table.requires_grad_()
    device = table.device
    real = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    next_times = torch.cat([times[:, 1:], times[:, :1]], dim=1)
    batch = Batch(
        users=torch.arange(len(lengths), device=device),
        items=Jagged.from_lengths(ids[real], lengths),
        events=torch.arange(int(lengths.sum()), device=device),
        times=times[real],
        next_times=next_times[real],
        targets=None,
    )
    output = unit(model.encode(table, batch.items.values, batch))
    (output * cotangent[real]).sum().backward()  # type: ignore[no-untyped-call]
    padded = torch.zeros_like(cotangent)
    padded[real] = output.detach()
    results = {"output": padded, "grad/" + ITEMS_NAME: _gradient(table)}
    for name, parameter in model.named_parameters():
        theirs, transposed = public_name(model.config.name, name)
        gradient = _gradient(parameter)
        results["grad/" + theirs] = (gradient.T if transposed else gradient).contiguous()
    return results


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def public_name(model: str, name: str) -> tuple[str, bool]:
    """Return a parameter's name in the file and whether it is stored transposed there (as nn.Linear keeps it)."""
    if name == "position":
        return _POSITIONS, False
    public = find("block", model).factory.public_names
    if public is None:
        return name, False
    _, number, own = name.split(".", 2)
    return f"{public.prefix}{number}.{public.names[own]}", public.names[own].endswith(".weight")


def _parameters(config: ModelConfig, options: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yield the name in the file and our shape of every parameter, and whether the file has it transposed."""
    with torch.device("meta"):
        model = RetrievalModel(config, options=options)
    for name, parameter in model.named_parameters():
        theirs, transposed = public_name(config.name, name)
        yield theirs, tuple(parameter.shape), transposed


def _parameter_shapes(config: ModelConfig, options: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape, transposed in _parameters(config, options):
        yield name, shape[::-1] if transposed else shape


def load_arrays(path: Path | str) -> dict[str, NDArray[Any]]:
    """Return all arrays of a file by name.

    Raises:
        UserError: it is no readable archive of plain arrays.
    """
    # On damaged files NumPy, zipfile and zlib raise whatever they come across, some of it only when an entry is read.
    try:
        file = np.load(path, allow_pickle=False)
        names = list(file.files)
    except Exception as error:
        reason = getattr(error, "strerror", None) or "it is not a NumPy .npz archive"
        raise UserError(f"cannot read the golden file {path}: {reason}") from error
    with file:
        return {name: _entry(file, name, path) for name in names}


def _entry(file: Mapping[str, Any], name: str, path: Path | str) -> NDArray[Any]:
    try:
        array = file[name]
    except Exception as error:
        raise UserError(
            f"cannot read '{name}' of the golden file {path}: it is damaged, too large or not an array of plain "
            "numbers; write the file again with numpy.savez"
        ) from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path}: '{name}' is not a NumPy array; write the file with numpy.savez")
    return array


def _config_of(arrays: Mapping[str, NDArray[Any]]) -> tuple[ModelConfig, dict[str, Any]]:
    """Read the sizes of a file's model and its options; those that it does not name follow from its tensors."""
    name = _model_name(_get(arrays, "model"))
    check_name("block", name, "'model'")
    component = find("block", name)
    has_buckets = "num_time_buckets" not in component.factory.unused_sizes
    for key in ("num_heads", "max_len", *(["num_buckets"] if has_buckets else [])):
        _get(arrays, key)
    sizes = {field: _size(key, arrays[key]) for key, field in _SCALARS.items() if key in arrays}
    output = _get(arrays, "output")
    if output.ndim != 3:
        raise UserError(f"'output' has shape {output.shape}, it must be [B, N, d]. {_LAYOUT}")
    if not output.size:
        raise UserError(f"'output' has shape {output.shape} and holds nothing to compare; write at least one sequence")
    widths = {key: array.shape[-1] for key, array in arrays.items() if key.endswith(_FFN_NAMES) and array.ndim}
    for key, width in {"output": output.shape[-1], **widths}.items():
        if width > _LARGEST_SIZE:
            raise UserError(f"'{key}' has shape {arrays[key].shape}, its last size may be at most {_LARGEST_SIZE:,}")
    dim = output.shape[-1]
    config = ModelConfig(
        name=name,
        dim=dim,
        num_blocks=_num_blocks(name, arrays),
        ffn_multiplier=next(iter(widths.values()), dim) / dim,
        dropout=0.0,
        **sizes,  # type: ignore[arg-type]
    )
    config.check()
    section = section_class("block", name)
    if section is None:
        return config.with_preset(), {}
    given = _options_in(arrays["options"]) if "options" in arrays else {}
    options = convert(section, given, "'options'", "'options'")
    if hasattr(options, "check"):
        options.check()
    return config.with_preset(), {name: options}


def _options_in(array: NDArray[Any]) -> Any:
    try:
        return json.loads(_text("options", array))
    except ValueError as error:
        raise UserError(f"'options' must be the block's own settings as JSON, such as {{}}; got {array}") from error


def _model_name(array: NDArray[Any]) -> str:
    return _text("model", array)


def _text(key: str, array: NDArray[Any]) -> str:
    """Text, which some ports write as bytes or as a list of one."""
    if array.size != 1 or array.dtype.kind not in "US":
        raise UserError(f"'{key}' must be one text, got {_what(array)}; write e.g. numpy.array('hstu')")
    text = array.reshape(())[()]
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def _size(key: str, array: NDArray[Any]) -> int:
    """A whole number; some ports write it as a float or as a list of one."""
    if array.size == 1 and array.dtype.kind in "iuf":
        value = float(array.reshape(())[()])
        largest = MAX_TIME_BUCKETS if key == "num_buckets" else _LARGEST_SIZE
        if value.is_integer() and 0 < value <= largest:
            return int(value)
        raise UserError(f"'{key}' must be a whole number from 1 to {largest:,}, got {value:g}")
    raise UserError(f"'{key}' must be one whole number, got {_what(array)}; write e.g. numpy.array(2)")


def _num_blocks(name: str, arrays: Mapping[str, NDArray[Any]]) -> int:
    public = find("block", name).factory.public_names
    prefix = "param/" + ("blocks." if public is None else public.prefix)
    numbers = {key.removeprefix(prefix).partition(".")[0] for key in arrays if key.startswith(prefix)}
    if not numbers:
        raise UserError(f"it holds no parameters of {name}, whose names start with '{prefix}'")
    return len(numbers)


def _tensors_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Convert the tensors of the layout; what a file holds under other names is left alone."""
    floats = [key for key in arrays if key in ("output", "cotangent") or key.startswith(("param/", "grad/"))]
    return {
        **{key: torch.from_numpy(_as_integers(key, arrays[key])) for key in _INTEGERS if key in arrays},
        **{key: torch.from_numpy(_as_floats(key, arrays[key])) for key in floats},
    }


def _as_integers(key: str, array: NDArray[Any]) -> NDArray[np.int64]:
    if array.dtype.kind not in "iuf":
        raise UserError(f"'{key}' must hold whole numbers, got {_what(array)}; write it as int64")
    # What int64 cannot hold comes out as another number, or as a negative one.
    with np.errstate(all="ignore"):
        whole = np.array(array, np.int64, order="C")
        same = np.array_equal(whole.astype(array.dtype), array)
    if not same or (array.dtype.kind == "u" and (whole < 0).any()):
        raise UserError(f"'{key}' must hold whole numbers within int64, got others in {_what(array)}; write int64")
    return whole


def _as_floats(key: str, array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype.kind not in "iuf":
        raise UserError(f"'{key}' must hold real numbers, got {_what(array)}; write it as float32")
    with np.errstate(over="ignore"):
        return np.array(array, np.float32, order="C")  # a copy in native order: torch takes no other


def _what(array: NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _get(content: Mapping[str, Any], key: str) -> Any:
    if key not in content:
        raise UserError(f"'{key}' is missing.{did_you_mean(key, content)} {_LAYOUT}")
    return content[key]
