"""The model reproduces the public HSTU implementation: outputs and every gradient."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from turbogr.config import ModelConfig
from turbogr.data.batching import Batch
from turbogr.jagged import Jagged
from turbogr.models import RetrievalModel
from turbogr.ops import registry
from turbogr.ops.sampled_softmax.reference import unit

GOLDEN = os.environ.get("TURBOGR_TEST_GOLDEN")


def _relative_error(ours: torch.Tensor, golden: torch.Tensor) -> float:
    return float((ours.detach() - golden).norm() / golden.norm())


def _available(name: str) -> bool:
    try:
        with registry.backend(name):
            return True
    except ValueError:
        return False


@pytest.mark.skipif(GOLDEN is None, reason="TURBOGR_TEST_GOLDEN does not name the folder of golden files")
@pytest.mark.parametrize("backend", registry.CHOICES)
def test_hstu_matches_the_public_implementation(backend: str) -> None:
    if not _available(backend):
        pytest.skip(f"the {backend} backend cannot run here")
    file = np.load(Path(GOLDEN or "") / "hstu.npz")
    golden = {key: torch.from_numpy(file[key]) for key in file.files if file[key].dtype.kind in "if"}
    lengths = golden["lengths"]
    max_len, dim = int(golden["max_len"]), golden["output"].shape[2]
    num_heads = int(golden["num_heads"])
    blocks = sum("_uvqk" in key and key.startswith("param/") for key in file.files)
    config = ModelConfig(
        dim=dim,
        num_blocks=blocks,
        num_heads=num_heads,
        qk_dim=dim // num_heads,
        v_dim=dim // num_heads,
        max_len=max_len,
        num_time_buckets=int(golden["num_buckets"]),
        dropout=0.0,
    )
    model = RetrievalModel(config)
    names = {"position": "_input_features_preproc._pos_emb.weight"}
    for number in range(blocks):
        theirs, ours = f"_hstu._attention_layers.{number}.", f"blocks.{number}."
        names[ours + "uvqk"] = theirs + "_uvqk"
        names[ours + "position_weight"] = theirs + "_rel_attn_bias._pos_w"
        names[ours + "time_weight"] = theirs + "_rel_attn_bias._ts_w"
        names[ours + "out_weight"] = theirs + "_o.weight"
        names[ours + "out_bias"] = theirs + "_o.bias"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = golden["param/" + names[name]]
            parameter.copy_(value.T if name.endswith("out_weight") else value)
    table = golden["param/_embedding_module._item_emb.weight"].clone().requires_grad_()

    padded_times = golden["timestamps"]
    real = torch.arange(max_len) < lengths[:, None]
    batch = Batch(
        users=torch.arange(len(lengths)),
        items=Jagged.from_lengths(golden["ids"][real], lengths),
        events=torch.arange(int(lengths.sum())),
        times=padded_times[real],
        next_times=torch.cat([padded_times[b, 1 : n + 1] for b, n in enumerate(lengths.tolist())]),
        targets=None,
    )
    with registry.backend(backend):
        output = unit(model.encode(table, batch.items.values, batch))
        (output * golden["cotangent"][real]).sum().backward()

    assert _relative_error(output, golden["output"][real]) < 1e-5
    assert table.grad is not None
    assert _relative_error(table.grad, golden["grad/_embedding_module._item_emb.weight"]) < 1e-4
    for name, parameter in model.named_parameters():
        expected = golden["grad/" + names[name]]
        assert parameter.grad is not None
        error = _relative_error(parameter.grad, expected.T if name.endswith("out_weight") else expected)
        assert error < 1e-4, f"{name}: {error}"
