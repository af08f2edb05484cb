"""A traced graph as an ONNX file of plain operators; its item table is the one of a .safetensors file beside it.

ONNX may keep a tensor in another file at an offset, and a .safetensors file has its tensors as plain bytes, so the
table is stored once, and tables of any size fit (an ONNX file itself is limited to 2 GB).
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from turbogr.errors import UserError
from turbogr.exports.user_graph import INPUTS, OUTPUT
from turbogr.parallel.safetensors_file import read_header

OPSET = 18
PRODUCER = "turbogr"
_TABLE = {"vectors": "vectors", "norms": "norms"}  # inputs of the traced graph: tensors of the file


def write_onnx(program: torch.export.ExportedProgram, path: Path, table: Path) -> None:
    """Write the user graph to `path`; `table` is the file in the same folder that has its vectors and norms.

    Raises:
        UserError: an operator is not one of the standard's.
    """
    import onnx

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=[*_TABLE, *INPUTS],
            output_names=[OUTPUT],
            verbose=False,
        )
    assert made is not None
    model = made.model_proto
    _check_operators(model)
    _strip(model)
    stored = read_header(table)
    for value in list(model.graph.input):
        if value.name in _TABLE:
            model.graph.input.remove(value)
            _add_external(model, value.name, table.name, stored[_TABLE[value.name]])
    path.write_bytes(model.SerializeToString(deterministic=True))
    onnx.checker.check_model(str(path))


def _check_operators(model: Any) -> None:
    """Require operators of the standard alone, so that every runtime has them."""
    others = sorted(
        {f"{node.domain}::{node.op_type}" for node in model.graph.node if node.domain not in ("", "ai.onnx")}
    )
    if others:
        raise UserError(f"the model's graph needs {', '.join(others)}, which are no standard operators of ONNX")


def _strip(model: Any) -> None:
    """Remove what names files and versions of this machine."""
    model.producer_name, model.producer_version = PRODUCER, ""
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    model.graph.doc_string = ""
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in [*model.graph.value_info, *model.graph.input, *model.graph.output, *model.graph.initializer]:
        value.doc_string = ""
        del value.metadata_props[:]


def _add_external(model: Any, name: str, file: str, stored: Any) -> None:
    import onnx

    tensor = model.graph.initializer.add()
    tensor.name, tensor.data_type = name, onnx.TensorProto.FLOAT
    tensor.dims.extend(stored.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    num_bytes = 4
    for extent in stored.shape:
        num_bytes *= extent
    for key, value in (("location", file), ("offset", str(stored.start)), ("length", str(num_bytes))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
