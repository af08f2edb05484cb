"""The models reproduce their public implementations, and golden files are read, written and judged correctly."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from turbogr.cli import main
from turbogr.config import ModelConfig
from turbogr.errors import UserError
from turbogr.models.golden import Golden, relative_error, write_golden
from turbogr.models.retrieval import BLOCKS
from turbogr.ops import registry

GOLDEN = os.environ.get("TURBOGR_TEST_GOLDEN")
ITEMS = "_embedding_module._item_emb.weight"
CONFIG = ModelConfig(dim=8, num_blocks=2, num_heads=2, max_len=7, num_time_buckets=16, dropout=0.0)


def named(name: str) -> ModelConfig:
    return dataclasses.replace(CONFIG, name=name, ffn_multiplier=1.0 if name == "hstu" else 1.5)  # type: ignore[arg-type]


def change(path: Path, **arrays: object) -> None:
    """Rewrite a file with some arrays replaced, or left out where they are None."""
    with np.load(path) as file:
        content = {key: file[key] for key in file.files}
    content.update(arrays)
    np.savez(path, **{key: value for key, value in content.items() if value is not None})


@pytest.mark.skipif(GOLDEN is None, reason="TURBOGR_TEST_GOLDEN does not name the folder of golden files")
@pytest.mark.parametrize("backend", registry.CHOICES)
@pytest.mark.parametrize("name", ["hstu", "fuxi"])
def test_the_public_implementation_is_reproduced(name: str, backend: str) -> None:
    golden = Golden.read(Path(GOLDEN or "") / f"{name}.npz")
    try:
        with registry.backend(backend):
            differences = golden.compare()
    except UserError as error:
        pytest.skip(str(error))
    assert {row.name for row in differences} == {
        key for key in golden.tensors if key == "output" or key.startswith("grad/")
    }
    assert all(row.error < 1e-5 for row in differences if row.name == "output")
    assert all(row.error < 1e-4 for row in differences), differences


@pytest.mark.parametrize("name", BLOCKS)
def test_what_we_write_is_what_we_compute(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ours.npz"
    write_golden(path, named(name), seed=3)
    golden = Golden.read(path)
    assert golden.config == named(name).with_preset()
    differences = golden.compare()
    assert len(differences) == len([key for key in golden.tensors if key.startswith("param/")]) + 1
    assert max(row.error for row in differences) < 1e-6
    assert all(golden.tensors[row.name].abs().max() > 0 for row in differences)
    assert [file.name for file in tmp_path.iterdir()] == ["ours.npz"]


def test_a_file_depends_on_its_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_golden(tmp_path / f"{name}.npz", CONFIG, seed=seed)
    a, b, c = (Golden.read(tmp_path / f"{name}.npz").tensors for name in "abc")
    assert all(a[key].equal(b[key]) for key in a)
    assert not a["output"].equal(c["output"])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_port_with_one_wrong_gradient_fails(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "port.npz"
    write_golden(path, named(name))
    assert main(["conformance", str(path)]) == 0
    key = next(key for key in Golden.read(path).tensors if key.startswith("grad/") and key.endswith("bias"))
    change(path, **{key: Golden.read(path).tensors[key].numpy() * 1.001})
    capsys.readouterr()
    assert main(["conformance", str(path)]) == 1
    marked = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "too far off" in line]
    assert marked == [key]
    assert main(["conformance", str(path), "--tolerance", "0.01", "--backend", "all"]) == 0


def test_the_command_writes_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.npz"
    assert main(["conformance", "--write", str(path), "--model", "fuxi-gamma", "--dim", "12", "--num-heads", "3"]) == 0
    assert main(["conformance", str(path), "--backend", "reference"]) == 0
    assert "fuxi-gamma, 2 blocks of width 12: the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"output": None}, ["'output' is missing"]),
        ({"cotangent": None}, ["'cotangent' is missing"]),
        ({"max_len": None}, ["'max_len' is missing"]),
        ({"model": np.array("hsut")}, ["'hsut'", "'hstu'"]),
        ({"model": np.array("fuxi-alpha")}, ["no parameters of fuxi-alpha"]),
        ({"lengths": np.array([7, 2, 2, 1, 1])}, ["lengths must lie between 0 and 6"]),
        ({"ids": np.full((5, 7), 99)}, ["ids must lie between 0 and 50", "99"]),
        ({"grad/_hstu._attention_layers.1._o.bias": np.zeros(3)}, ["_o.bias", "(3,)", "(8,)"]),
        ({"grad/_hstu._attention_layers.1._o.bias": None}, ["_o.bias' is missing"]),
        ({"max_len": np.array(9)}, ["must be"]),
        ({"output": np.array(1.0)}, ["'output' has shape ()", "[B, N, d]"]),
        ({"param/" + ITEMS: np.array(1.0)}, [ITEMS, "has shape ()", "[items + 1, d]"]),
        ({"num_heads": np.array([1, 2])}, ["'num_heads' must be one whole number", "shape (2,)"]),
        ({"num_heads": np.array("two")}, ["'num_heads' must be one whole number"]),
        ({"num_heads": np.array(1.5)}, ["'num_heads' must be a whole number", "1.5"]),
        ({"qk_dim": np.array(2**40)}, ["'qk_dim' must be a whole number from 1 to"]),
        ({"model": np.array(3)}, ["'model' must be one text"]),
        ({"lengths": np.array([0.5, 1, 1, 1, 1])}, ["'lengths' must hold whole numbers"]),
        ({"ids": np.full((5, 7), 2**63, np.uint64)}, ["'ids' must hold whole numbers within int64"]),
        ({"cotangent": np.ones((5, 7, 8), complex)}, ["'cotangent' must hold real numbers", "float32"]),
    ],
)
def test_a_faulty_file_is_refused_in_one_sentence(
    tmp_path: Path, arrays: dict[str, object], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "faulty.npz"
    write_golden(path, CONFIG)
    change(path, **arrays)
    assert main(["conformance", str(path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for word in ["faulty.npz", *words]:
        assert word in message


def as_another_port_writes(path: Path, floats: str, integers: str) -> None:
    """Rewrite a file with other types for its numbers."""
    with np.load(path) as file:
        content = {key: file[key] for key in file.files}
    kinds = {"f": floats, "i": integers}
    np.savez(path, **{key: array.astype(kinds.get(array.dtype.kind, array.dtype)) for key, array in content.items()})


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    ("floats", "integers"),
    [("<f8", "<i8"), (">f4", ">i8"), (">f8", ">i4"), ("g", "<i4"), ("<f4", "<u8"), ("<f4", ">u4"), ("<f8", "<f8")],
)
def test_the_types_of_other_ports_are_converted(
    tmp_path: Path, name: str, floats: str, integers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "port.npz"
    write_golden(path, named(name))
    as_another_port_writes(path, floats, integers)
    assert main(["conformance", str(path), "--tolerance", "1e-6"]) == 0, capsys.readouterr().err


def test_small_and_reordered_arrays_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "port.npz"
    write_golden(path, CONFIG)
    with np.load(path) as file:
        arrays = {key: np.asfortranarray(file[key]) for key in file.files}
    arrays.update(lengths=arrays["lengths"].astype(np.uint8), num_heads=np.array([2.0]), model=np.array([b"hstu"]))
    change(path, **arrays)
    assert main(["conformance", str(path), "--tolerance", "1e-6"]) == 0


def test_a_file_without_sequences_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.npz"
    write_golden(path, CONFIG)
    with np.load(path) as file:
        change(path, **{key: file[key][:0] for key in ("lengths", "ids", "timestamps", "output", "cotangent")})
    assert main(["conformance", str(path)]) == 2
    assert "'output' has shape (0, 7, 8) and holds nothing to compare; write at least one" in capsys.readouterr().err


def test_sequences_without_items_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "empty.npz"
    write_golden(path, CONFIG)
    with np.load(path) as file:
        zeros = {key: np.zeros_like(file[key]) for key in file.files if key.startswith(("grad/", "lengths", "output"))}
    change(path, **zeros)
    assert main(["conformance", str(path)]) == 0


def test_a_damaged_entry_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("output.npy", b"no array")
    assert main(["conformance", str(path)]) == 2
    assert "'output' is not a NumPy array; write the file with numpy.savez" in capsys.readouterr().err
    np.savez(path, output=np.array([object()]))
    assert main(["conformance", str(path)]) == 2
    message = capsys.readouterr().err
    assert "cannot read 'output' of the golden file" in message and "write the file again" in message


FAULTS = {
    "none": lambda array: None,
    "scalar": lambda array: np.array(3),
    "vector": lambda array: np.arange(3),
    "cube": lambda array: np.zeros((2, 2, 2)),
    "empty": lambda array: array[:0] if array.ndim else np.zeros(0),
    "text": lambda array: np.array("two"),
    "complex": lambda array: array.astype(np.complex64) if array.dtype.kind in "if" else np.array(1j),
    "bool": lambda array: np.ones(array.shape, bool),
    "void": lambda array: np.zeros(array.shape, "V2"),
    "date": lambda array: np.zeros(array.shape, "M8[s]"),
    "nan": lambda array: np.full(array.shape, np.nan),
    "huge": lambda array: np.full(array.shape, 2**63, np.uint64),
    "negative": lambda array: np.full(array.shape, -1),
    "fraction": lambda array: np.full(array.shape, 0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["hstu", "fuxi-gamma"])
def test_no_fault_of_any_array_is_a_traceback(
    tmp_path: Path, name: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "faulty.npz"
    write_golden(path, named(name))
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    for key, array in arrays.items():
        np.savez(path, **{k: v for k, v in {**arrays, key: FAULTS[fault](array)}.items() if v is not None})
        status = main(["conformance", str(path)])
        message = capsys.readouterr().err
        # Other numbers in the same places are only another model's, and compared.
        assert status == 2 or fault in ("none", "scalar", "vector", "nan", "huge", "negative", "fraction"), key
        assert message.count("\n") == (status == 2), message
        if fault in ("text", "complex", "bool", "void", "date"):
            assert f"'{key}'" in message or (fault, key) == ("text", "model")


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").touch()
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and then nothing")
    np.savez(tmp_path / "newer.npz", output=np.zeros(3))
    content = bytearray((tmp_path / "newer.npz").read_bytes())
    content[content.index(b"PK\x01\x02") + 6] = 255  # a version of the zip format that nobody reads
    (tmp_path / "newer.npz").write_bytes(content)
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("text.npz", "empty.npz", "cut.npz", "newer.npz", "array.npy", "missing.npz"):
        path = tmp_path / name
        assert main(["conformance", str(path)]) == 2
        assert f"cannot read the golden file {path}" in capsys.readouterr().err
    assert main(["conformance", "--write", str(tmp_path / "no" / "f.npz")]) == 2
    assert main(["conformance", "--write", str(tmp_path / "f.npz"), "--max-len", "1"]) == 2
    assert main(["conformance", "--write", str(tmp_path / "f.npz"), "--dim", "10", "--num-heads", "4"]) == 2


def test_relative_error() -> None:
    ones = torch.ones(4)
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(ones * 0, ones * 0) == 0.0
    assert relative_error(ones, ones * 0) == float("inf")
    assert relative_error(ones * float("nan"), ones) == float("inf")
