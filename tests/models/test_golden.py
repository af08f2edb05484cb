"""The models reproduce their public implementations, and golden files are read, written and judged correctly."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import stat
import zipfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.judging import instruction_set, needs_kernels, plain_pytorch
from turbogr.cli import main
from turbogr.config import MAX_TIME_BUCKETS, ModelConfig
from turbogr.layers.fuxi_linear import FuXiLinearConfig
from turbogr.models import golden as golden_module
from turbogr.models.golden import Difference, Golden, relative_error, write_golden
from turbogr.ops import bf16_unit, native, registry
from turbogr.plugins import built_in_names, find

GOLDEN = os.environ.get("TURBOGR_TEST_GOLDEN")
ITEMS = "_embedding_module._item_emb.weight"
CONFIG = ModelConfig(dim=8, num_blocks=2, num_heads=2, max_len=7, num_time_buckets=16, dropout=0.0)
every_backend = pytest.mark.parametrize(
    ("backend", "isa"),
    [("reference", None), *(pytest.param("cpu", name, marks=needs_kernels) for name in native.INSTRUCTION_SETS)],
)


def named(name: str) -> ModelConfig:
    unused = find("block", name).factory.unused_sizes
    config = dataclasses.replace(CONFIG, name=name, ffn_multiplier=1.0 if "ffn_multiplier" in unused else 1.5)
    return config


def change(path: Path, **arrays: object) -> None:
    """Rewrite a file with some arrays replaced, or left out where they are None."""
    with np.load(path) as file:
        content = {key: file[key] for key in file.files}
    content.update(arrays)
    np.savez(path, **{key: value for key, value in content.items() if value is not None})


def compare(golden: Golden, backend: str, isa: str | None) -> list[Difference]:
    with registry.backend(backend), nullcontext() if isa is None else instruction_set(isa):
        return golden.compare()


@pytest.mark.skipif(GOLDEN is None, reason="TURBOGR_TEST_GOLDEN does not name the folder of golden files")
@every_backend
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("hstu", "hstu"),
        ("fuxi", "fuxi-alpha"),
        ("fuxi_alpha_days", "fuxi"),
        ("fuxi_beta_days", "fuxi-beta-days"),
        ("fuxi_beta", "fuxi-beta"),
        ("fuxi_gamma_hybrid", "fuxi-gamma"),
        ("fuxi_linear", "fuxi-linear"),
        ("fuxi_linear_unchunked", "fuxi-linear"),
    ],
)
def test_the_public_implementation_is_reproduced(name: str, model: str, backend: str, isa: str | None) -> None:
    golden = Golden.read(Path(GOLDEN or "") / f"{name}.npz")
    assert golden.config.name == model
    differences = compare(golden, backend, isa)
    assert {row.name for row in differences} == {
        key for key in golden.tensors if key == "output" or key.startswith("grad/")
    }
    assert all(row.error < 1e-5 for row in differences if row.name == "output")
    assert all(row.error < 1e-4 for row in differences), differences


@every_backend
@pytest.mark.parametrize("name", built_in_names("block"))
def test_what_we_write_is_what_we_compute(tmp_path: Path, name: str, backend: str, isa: str | None) -> None:
    path = tmp_path / "ours.npz"
    write_golden(path, named(name), seed=3)
    golden = Golden.read(path)
    assert golden.config == named(name).with_preset()
    differences = compare(golden, backend, isa)
    assert len(differences) == len([key for key in golden.tensors if key.startswith("param/")]) + 1
    # The gradient of a single number is one sum of terms of both signs: it has the bound of a fair file.
    assert all(row.error < (5e-6 if math.prod(row.shape) > 3 else 2.5e-5) for row in differences)
    assert all(golden.tensors[row.name].abs().max() > 0 for row in differences)
    assert [file.name for file in tmp_path.iterdir()] == ["ours.npz"]


def errors_in_bf16(golden: Golden, backend: str, plain: bool) -> dict[str, float]:
    """Errors of our model in bf16 or, with `plain`, of PyTorch with all of the model in bf16."""
    model, table, ids, times, lengths = golden.build(torch.bfloat16 if plain else torch.float32)
    model.precision = "bf16"
    with registry.backend(backend):
        results = golden_module._run(model, table, ids, times, lengths, golden.tensors["cotangent"].to(table.dtype))
    return {key: relative_error(value.double(), golden.tensors[key].double()) for key, value in results.items()}


@needs_kernels
@pytest.mark.parametrize("unit", bf16_unit.UNITS)
@pytest.mark.parametrize("name", [*built_in_names("block"), "hstu.npz", "fuxi.npz"])
def test_in_bf16_the_error_is_at_most_twice_that_of_plain_pytorch(name: str, unit: str, tmp_path: Path) -> None:
    """Of models that we write, the geometric mean over seeds and blocks. One draw says little: roundings turn ReLUs on
    and cancel in the few numbers of a bias table, so its error varies by a factor of twenty, ours and PyTorch's."""
    reason = bf16_unit.problem(unit)
    if reason is not None:
        pytest.skip(f"{unit}: {reason}")
    if name.endswith(".npz"):
        if GOLDEN is None:
            pytest.skip("TURBOGR_TEST_GOLDEN does not name the folder of golden files")
        paths = [Path(GOLDEN) / name]
    else:
        paths = [tmp_path / f"{seed}.npz" for seed in range(6)]
        for seed, path in enumerate(paths):
            write_golden(path, named(name), seed=seed)
    logarithms: dict[tuple[str, str], list[float]] = defaultdict(list)
    for path in paths:
        golden = Golden.read(path)
        with bf16_unit.using(unit):
            found = {backend: errors_in_bf16(golden, backend, plain=False) for backend in ("cpu", "reference")}
        with plain_pytorch():
            found["plain"] = errors_in_bf16(golden, "reference", plain=True)
        assert found["cpu"].keys() == found["reference"].keys() == found["plain"].keys()
        for way, errors in found.items():
            for key, error in errors.items():
                logarithms[way, re.sub(r"\.\d+\.", ".N.", key)].append(math.log(max(error, 1e-12)))
    for (way, key), values in logarithms.items():
        plain = logarithms["plain", key]
        # Plain PyTorch may come out better than one rounding by luck.
        assert mean_error(values) <= 2 * max(mean_error(plain), 2**-8), (way, key)


def mean_error(logarithms: list[float]) -> float:
    return math.exp(sum(logarithms) / len(logarithms))


@pytest.mark.parametrize("name", built_in_names("block"))
def test_what_we_write_is_exact(tmp_path: Path, name: str) -> None:
    """A port is measured by its own errors, not by ours on top."""
    path = tmp_path / "ours.npz"
    write_golden(path, named(name), seed=4)
    golden = Golden.read(path)
    model, table, ids, times, lengths = golden.build(torch.float64)
    with registry.backend("reference"):
        results = golden_module._run(model, table, ids, times, lengths, golden.tensors["cotangent"].double())
    assert max(relative_error(golden.tensors[key], value) for key, value in results.items()) < 1e-7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model sasrec --max-len 2", ["query_weight' of this model and input is 0", "choose larger sizes"]),
        ("--model sasrec --dim 2 --num-heads 1 --max-len 40 --seed 8", ["'grad/", "hangs on rounding", "another seed"]),
        (
            "--dim 16 --num-heads 1 --max-len 5 --num-blocks 6 --num-time-buckets 1 --seed 11",
            ["_ts_w' of this model and input hangs on rounding", "a fair file allows 2.5e-05", "another seed"],
        ),
    ],
)
def test_a_file_that_judges_rounding_is_not_written(
    tmp_path: Path, options: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--write", str(tmp_path / "f.npz"), *options.split()]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(word in message for word in words), message
    assert not list(tmp_path.iterdir())


def test_a_wide_model_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "wide.npz"
    assert main(["conformance", "--write", str(path), "--model", "sasrec", "--dim", "512"]) == 0
    assert main(["conformance", str(path), "--backend", "all"]) == 0


def test_a_file_depends_on_its_seed_alone(tmp_path: Path) -> None:
    for name, seed, backend in (("a", 1, "auto"), ("b", 1, "reference"), ("c", 2, "auto")):
        with registry.backend(backend):
            write_golden(tmp_path / f"{name}.npz", CONFIG, seed=seed)
    a, b, c = (Golden.read(tmp_path / f"{name}.npz").tensors for name in "abc")
    assert all(a[key].equal(b[key]) for key in a)
    assert not a["output"].equal(c["output"])


@pytest.mark.parametrize("name", built_in_names("block"))
def test_a_port_with_one_wrong_gradient_fails(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "port.npz"
    write_golden(path, named(name))
    assert main(["conformance", str(path)]) == 0
    endings = ("bias", "lin0.weight")  # FuXi-Linear has no biases
    key = next(key for key in Golden.read(path).tensors if key.startswith("grad/") and key.endswith(endings))
    change(path, **{key: Golden.read(path).tensors[key].numpy() * 1.001})
    capsys.readouterr()
    assert main(["conformance", str(path)]) == 1
    marked = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "above tolerance" in line]
    assert marked == [key]
    assert main(["conformance", str(path), "--tolerance", "0.01", "--backend", "all"]) == 0


def test_the_command_writes_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.npz"
    sizes = ["--dim", "12", "--num-heads", "3", "--ffn-multiplier", "1.5"]
    assert main(["conformance", "--write", str(path), "--model", "fuxi", *sizes]) == 0
    assert main(["conformance", str(path), "--backend", "reference"]) == 0
    assert "fuxi, 2 blocks of width 12: the same" in capsys.readouterr().out
    assert Golden.read(path).tensors["param/blocks.0.ffn_up"].shape == (12, 18)


@pytest.mark.parametrize("option", ["--model=sasrec", "--dim=32", "--seed=0", "--ffn-multiplier=2", "--overwrite"])
def test_options_of_writing_are_refused_when_comparing(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.npz"
    write_golden(path, CONFIG)
    before = path.read_bytes()
    assert main(["conformance", str(path), option]) == 2
    captured = capsys.readouterr()
    assert f"{option.partition('=')[0]} is for writing and has no effect without --write" in captured.err
    assert not captured.out
    assert path.read_bytes() == before


def test_all_names_a_backend_that_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.npz"
    write_golden(path, CONFIG)
    assert main(["conformance", str(path), "--backend", "reference"]) == 0
    assert "left out" not in capsys.readouterr().out
    broken = dataclasses.replace(native.BACKEND, problem="nobody built them")
    for name in registry.operators():
        implementations = [
            dataclasses.replace(found, backend=broken) if found.backend is native.BACKEND else found
            for found in registry.operators()[name]
        ]
        monkeypatch.setitem(registry._operators, name, implementations)
    assert main(["conformance", str(path), "--backend", "all"]) == 0
    head, *lines, verdict = capsys.readouterr().out.splitlines()
    assert head.split() == ["tensor", "shape", "auto", "reference"]
    assert "cpu is left out: backend 'cpu' cannot run on this machine: nobody built them" in lines
    assert "the same" in verdict


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
        ({"num_buckets": np.array(100_000)}, ["'num_buckets' must be a whole number from 1 to 65,535", "100000"]),
        ({"output": np.zeros((1, 1, 2**20), "f2")}, ["'output' has shape (1, 1, 1048576)", "at most 262,144"]),
        ({"param/blocks.0.ffn_up": np.zeros((0, 2**61), "f2")}, ["ffn_up' has shape (0, ", "at most 262,144"]),
        (
            {"param/_hstu._attention_layers.0._norm.weight": np.ones(8)},
            ["'param/_hstu._attention_layers.0._norm.weight'", "our hstu does not have", "leave them out of the file"],
        ),
        ({"grad/_hstu._attention_layers.0._norm.weight": np.ones(8)}, ["'grad/", "our hstu does not have"]),
        ({f"param/_output.{number}": np.ones(8) for number in range(5)}, ["'param/_output.2' and 2 more of"]),
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


def test_what_stands_beside_the_layout_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "port.npz"
    write_golden(path, CONFIG)
    change(path, commit=np.array("3f2c"), **{"buffer/mask": np.ones((7, 7), bool)})
    assert main(["conformance", str(path)]) == 0


@pytest.mark.parametrize("name", ["hstu", "fuxi-alpha"])
def test_all_time_buckets_that_are_allowed_work(tmp_path: Path, name: str) -> None:
    path = tmp_path / "many.npz"
    write_golden(path, dataclasses.replace(named(name), num_time_buckets=MAX_TIME_BUCKETS))
    assert main(["conformance", str(path), "--backend", "all"]) == 0


def as_another_port_writes(path: Path, floats: str, integers: str) -> None:
    """Rewrite a file with other types for its numbers."""
    with np.load(path) as file:
        content = {key: file[key] for key in file.files}
    kinds = {"f": floats, "i": integers}
    np.savez(path, **{key: array.astype(kinds.get(array.dtype.kind, array.dtype)) for key, array in content.items()})


@pytest.mark.parametrize("name", built_in_names("block"))
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
    with np.load(path) as file:  # the gradient of a single number has the wider bound of a fair file, as above
        tolerance = "2e-5" if any(file[key].size <= 3 for key in file.files if key.startswith("param/")) else "5e-6"
    assert main(["conformance", str(path), "--tolerance", tolerance]) == 0, capsys.readouterr().err


def test_small_and_reordered_arrays_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "port.npz"
    write_golden(path, CONFIG)
    with np.load(path) as file:
        arrays = {key: np.asfortranarray(file[key]) for key in file.files}
    arrays.update(lengths=arrays["lengths"].astype(np.uint8), num_heads=np.array([2.0]), model=np.array([b"hstu"]))
    change(path, **arrays)
    assert main(["conformance", str(path), "--tolerance", "5e-6"]) == 0


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
@pytest.mark.parametrize("name", ["hstu", "fuxi", "fuxi-linear"])
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
    assert main(["conformance", "--write", str(tmp_path / "f.npz"), "--dim", "10", "--num-heads", "4"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-time-buckets", "100000"], ["--num-time-buckets is 100000", "from 1 to 65,535"]),
        (["--max-len", "99999999"], ["--max-len is 99999999", "from 2 to 65,536"]),
        (["--max-len", "1"], ["--max-len is 1;", "from 2"]),
        (["--dim", "0"], ["--dim is 0", "from 1"]),
        (["--num-blocks", "-3"], ["--num-blocks is -3"]),
        (["--seed", "-1"], ["--seed is -1", "0 or more"]),
        (["--tolerance", "3"], ["--tolerance is for comparing", "has no effect with --write"]),
        (["--backend", "auto"], ["--backend is for comparing", "has no effect with --write"]),
        (["--ffn-multiplier", "1.5"], ["--ffn-multiplier has no effect for hstu", "no feed-forward part"]),
        (["--model", "sasrec", "--ffn-multiplier", "0"], ["--ffn-multiplier is 0", "above 0", "at most 16"]),
        (["--model", "sasrec", "--ffn-multiplier", "nan"], ["--ffn-multiplier is nan"]),
        (["--model", "sasrec", "--num-time-buckets", "9"], ["--num-time-buckets has no effect for sasrec"]),
        (["--dim", "16384", "--num-blocks", "1024"], ["1024 blocks of width 16384", "GiB", "choose smaller sizes"]),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_sentence(
    tmp_path: Path, options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", "--write", str(tmp_path / "f.npz"), *options]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(word in message for word in words), message
    assert not list(tmp_path.iterdir())


def test_the_memory_of_the_definition_grows_with_the_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(golden_module, "memory_bytes", lambda: 2**34)
    assert main(["conformance", "--write", str(tmp_path / "f.npz"), "--max-len", "65536"]) == 2
    assert "65,536 places takes about" in capsys.readouterr().err


def test_a_file_that_exists_is_replaced_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "port.npz"
    path.write_text("somebody's work")
    command = ["conformance", "--write", str(path)]
    assert main(command) == 2
    assert f"{path} already exists; name another file or pass --overwrite" in capsys.readouterr().err
    assert path.read_text() == "somebody's work"
    assert main([*command, "--overwrite"]) == 0
    assert main(["conformance", str(path)]) == 0
    os.mkfifo(tmp_path / "pipe")
    for more in ([], ["--overwrite"]):
        assert main(["conformance", "--write", str(tmp_path), *more]) == 2
        assert f"{tmp_path} is a folder; name a file in it" in capsys.readouterr().err
        assert main(["conformance", "--write", str(tmp_path / "pipe"), *more]) == 2
        assert f"the golden file {tmp_path}/pipe is a pipe and cannot be replaced" in capsys.readouterr().err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("tolerance", ["nan", "-1", "inf", "-inf"])
def test_a_tolerance_that_judges_nothing_is_refused(
    tmp_path: Path, tolerance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "port.npz"
    write_golden(path, CONFIG)
    assert main(["conformance", str(path), f"--tolerance={tolerance}"]) == 2
    captured = capsys.readouterr()
    assert f"--tolerance is {tolerance}; give a number of 0 or more, such as 0.0001" in captured.err
    assert not captured.out


def test_relative_error() -> None:
    ones = torch.ones(4)
    assert relative_error(ones * 1.5, ones) == pytest.approx(0.5)
    assert relative_error(ones * 0, ones * 0) == 0.0
    assert relative_error(ones, ones * 0) == float("inf")
    assert relative_error(ones * float("nan"), ones) == float("inf")


@pytest.mark.parametrize(("old", "now"), [("fuxi-gamma", "fuxi"), ("fuxi-beta", "fuxi-beta-days")])
def test_a_file_of_before_the_models_were_renamed_keeps_its_meaning(tmp_path: Path, old: str, now: str) -> None:
    path = tmp_path / "old.npz"
    write_golden(path, named(now), seed=3)
    change(path, model=np.array(old))
    assert Golden.read(path).config.name == now
    assert main(["conformance", str(path)]) == 0


def test_options_of_a_block_are_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "linear.npz"
    options = {"fuxi-linear": FuXiLinearConfig(periods=2, period_start=3, learned_decay=False, position_dim=4)}
    write_golden(path, named("fuxi-linear"), options=options)
    golden = Golden.read(path)
    assert golden.options == options
    assert max(row.error for row in golden.compare()) < 2.5e-5
    for text in ("no JSON", "[1]", '{"period": 3}', '{"periods": 0}'):
        change(path, options=np.array(text))
        assert main(["conformance", str(path)]) == 2
        assert "options" in capsys.readouterr().err or text == '{"periods": 0}'
