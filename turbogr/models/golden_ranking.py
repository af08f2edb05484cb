"""Golden files of the public ranking model: see `turbogr.models.golden` for those of retrieval models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turbogr.errors import UserError
from turbogr.jagged import Jagged
from turbogr.layers.stu import STUBlock
from turbogr.models.golden import Difference, largest_error
from turbogr.models.public_ranking_model import PublicInput, PublicRankingModel, PublicSizes, PublicTask

OUTPUT_TOLERANCE = 1e-5
"""Largest absolute error of an output at which two implementations in float32 count as the same."""

_TABLE = "_embedding_collection.embeddings."
_INPUTS = "_hstu_transducer._input_preprocessor."
_POSITIONS = "_hstu_transducer._positional_encoder."
_OUTPUTS = "_hstu_transducer._output_postprocessor."
_NAMES = {
    "content": _INPUTS + "_content_embedding_mlp",
    "additional": _INPUTS + "_additional_embedding_mlp",
    "action": _INPUTS + "_action_embedding_mlp",
    "actions.table": _INPUTS + "_action_encoder._action_embedding_table",
    "actions.unknown": _INPUTS + "_action_encoder._target_action_embedding_table",
    "slot_weight": _INPUTS + "_batched_contextual_linear_weights",
    "slot_bias": _INPUTS + "_batched_contextual_linear_bias",
    "position": _POSITIONS + "_position_embeddings_weight",
    "time": _POSITIONS + "_timestamp_embeddings_weight",
    "final_norm": _OUTPUTS + "_layer_norm",
    "combiner": _OUTPUTS + "_time_feature_combiner",
    "item": "_item_embedding_mlp",
    "head": "_multitask_module._prediction_module",
}
"""The public names of parameters, or the start of them, by ours."""


@dataclass(frozen=True)
class RankingGolden:
    """The content of a file: sizes, features, parameters, outputs and gradients."""

    sizes: PublicSizes
    features: Mapping[str, Jagged]
    tensors: Mapping[str, Tensor]

    @property
    def title(self) -> str:
        return f"public ranking model, {self.sizes.layers} blocks of width {self.sizes.dim}"

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], path: Path | str) -> RankingGolden:
        """Take over the arrays of a file.

        Raises:
            UserError: something is missing, or has another shape than our model's.
        """
        try:
            features = {str(name): _jagged(arrays, str(name)) for name in arrays["features"]}
            tensors = {name: _float(a) for name, a in arrays.items() if name.startswith(("param/", "grad/"))}
            tensors |= {name: _float(arrays[name]) for name in _RESULTS}
            golden = cls(_sizes(json.loads(str(arrays["config"])), features, tensors), features, tensors)
            golden._check()
        except KeyError as error:
            raise UserError(f"{path}: {error} is missing. See docs/models/conformance.md for the layout") from error
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: {error}. See docs/models/conformance.md for the layout") from error
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        return golden

    def compare(self, *, device: torch.device | str = "cpu") -> list[Difference]:
        """Run our model on the file's input and parameters; return the difference of every output and gradient.

        Errors of outputs are absolute, those of gradients relative to the largest entry of their tensor.
        """
        if torch.device(device).type != "cpu":
            raise UserError("the public ranking model is compared on a CPU; leave --device out")
        model, tables = self.build()
        vectors = {
            name: tables[name.removeprefix("cand_")][values.values]
            for name, values in self.features.items()
            if name.removeprefix("cand_") in tables
        }
        given = PublicInput(self.features, vectors)
        output = model(given)
        loss = output.losses.sum()
        loss.backward()
        ours = {
            "user_embeddings": output.users,
            "item_embeddings": output.items,
            "predictions": output.predictions,
            "labels": model.labels(given),
            "losses": output.losses,
            "loss": loss,
        }
        ours = {name: value.detach() for name, value in ours.items()}
        for name, table in tables.items():
            ours[f"grad/{_TABLE}{name}.weight"] = _gradient(table)
        for name, parameter in model.named_parameters():
            ours["grad/" + _public_name(name)] = _gradient(parameter)
        return [
            Difference(
                name,
                tuple(value.shape),
                largest_error(value, self.tensors[name], relative=name.startswith("grad/")),
                None if name.startswith("grad/") else OUTPUT_TOLERANCE,
            )
            for name, value in ours.items()
        ]

    def build(self) -> tuple[PublicRankingModel, dict[str, Tensor]]:
        """Return our model with the file's parameters, and its tables by name."""
        model = PublicRankingModel(self.sizes)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.tensors["param/" + _public_name(name)])
        return model, {name: tensor.clone().requires_grad_() for name, tensor in _tables(self.tensors).items()}

    def _check(self) -> None:
        model = PublicRankingModel(self.sizes)
        shapes = {f"{_TABLE}{name}.weight": tuple(table.shape) for name, table in _tables(self.tensors).items()}
        shapes |= {_public_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for name, shape in shapes.items():
            for kind in ("param/", "grad/"):
                if tuple(self.tensors[kind + name].shape) != shape:
                    raise UserError(
                        f"'{kind}{name}' has shape {tuple(self.tensors[kind + name].shape)}, it must be {shape}"
                    )
        # A parameter without a gradient takes no part: the public model has an MLP even for no features.
        known = {"grad/" + name for name in shapes}
        other = [name for name in self.tensors if name.startswith("grad/") and name not in known]
        if other:
            raise UserError(f"it holds {other[0]!r} of a parameter that our model does not have")


_RESULTS = ("user_embeddings", "item_embeddings", "predictions", "labels", "losses", "loss")


def _sizes(config: dict[str, Any], features: Mapping[str, Jagged], tensors: Mapping[str, Tensor]) -> PublicSizes:
    tasks = tuple(PublicTask(task["name"], task["weight"], task["type"] == "binary") for task in config.pop("tasks"))
    config.pop("max_seq_len_of_batch", None)
    config.setdefault("contextual_min_length", {})
    longest = [int(features[name].lengths.max()) for name in ("item_id", "cand_item_id")]
    if config["postprocessor"] not in ("timestamp_layer_norm", "layer_norm", "none"):
        raise UserError(f"the postprocessor '{config['postprocessor']}' is unknown")
    return PublicSizes(
        **config,
        tasks=tasks,
        max_len=sum(config["contextual"].values()) + sum(longest),
        num_positions=len(tensors["param/" + _NAMES["position"]]),
        num_time_buckets=len(tensors["param/" + _NAMES["time"]]),
    )


def _jagged(arrays: Mapping[str, NDArray[Any]], name: str) -> Jagged:
    values, lengths = (
        torch.from_numpy(np.array(arrays[f"feature/{name}/{k}"], np.int64)) for k in ("values", "lengths")
    )
    return Jagged.from_lengths(values, lengths)


def _float(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array, np.float32))


def _tables(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "param/" + _TABLE
    return {
        name.removeprefix(prefix).removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _public_name(name: str) -> str:
    if name.startswith("blocks."):
        _, number, own = name.split(".", 2)
        assert STUBlock.public_names is not None
        return f"{STUBlock.public_names.prefix}{number}.{STUBlock.public_names.names[own]}"
    if name in _NAMES:
        return _NAMES[name]
    part, _, own = name.partition(".")
    return f"{_NAMES[part]}.{own}"


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
