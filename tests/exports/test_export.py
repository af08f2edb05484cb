"""An export gives the lists of `recommend`, without torch and TurboGR, and is replaced as a whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import turbogr
from tests.exports.conftest import BLEND, config
from tests.stores import write_store
from turbogr import cli
from turbogr.errors import UserError
from turbogr.exports import folder_writer, self_test, standalone
from turbogr.exports.delta_folder import apply_to
from turbogr.exports.folder_writer import export
from turbogr.exports.weights import export_weights, load_weights
from turbogr.models.golden import ITEMS_NAME
from turbogr.runs import load_model
from turbogr.simple.delivery import Component
from turbogr.training.run import train

OLD_RUNS = os.environ.get("TURBOGR_TEST_OLD_RUNS")
# A process in which neither torch nor scipy nor TurboGR can be imported, as where an export is used.
ALONE = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "scipy", "turbogr", "faiss", "pandas", "polars"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
sys.path[:] = [path for path in sys.path if path]
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HISTORIES = [
    [["item-003", 10**9], ["item-007", 10**9 + 5]],
    ["item-003", "item-007", "item-003", "nothing"],
    [["item-010", 10**9 + 900], ["item-001", 10**9]],
    ["nothing"],
    [],
    [f"item-{row:03d}" for row in range(30)],
]


def check_alone(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE, str(folder / "check.py")]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def assert_same_lists(run: Path, folder: Path, **options: object) -> None:
    """Compare the export's lists with `recommend`'s, for histories of all kinds."""
    with pytest.warns(UserWarning, match="items that the model does not know"):
        expected = turbogr.load(run).recommend(histories=HISTORIES, k=7, **options)
    found = standalone.Recommender(folder).recommend(HISTORIES, 7, **options)
    for got, wanted in zip(found, expected, strict=True):
        assert not list(self_test.compare(got, [item for item, _ in wanted], [score for _, score in wanted]))


@pytest.fixture(scope="module")
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("exported") / "out"
    export(run, target, with_users=True)
    return target


@pytest.fixture
def same_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of the run take the graphs from `folder`, which has traced them: that takes most of the time."""

    def copy(model: object, num_items: int, target: Path) -> None:
        for name in ("user.onnx", "user.pt2"):
            shutil.copyfile(folder / name, target / name)

    monkeypatch.setattr(folder_writer, "write_graphs", copy)


def test_the_folder_checks_itself_without_torch_and_turbogr(folder: Path) -> None:
    done = check_alone(folder)
    assert done.returncode == 0 and "check passed: 10 lists are the same" in done.stdout, done.stdout + done.stderr


def test_a_changed_file_or_list_fails_the_check(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "check.json").write_text((folder / "check.json").read_text().replace("item-001", "item-002"))
    assert check_alone(copy).returncode == 1
    cases = json.loads((folder / "check.json").read_text())["cases"]
    opened = standalone.Recommender(folder)
    assert not self_test.differences(opened, cases)
    opened.vectors = opened.vectors[::-1].copy()
    assert len(self_test.differences(opened, cases)) > 5
    with (copy / "items.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    assert "items.safetensors is not what was written" in check_alone(copy).stdout


@pytest.mark.parametrize(
    "options",
    [{}, {"filter_seen": False}, {"include": [f"item-{row:03d}" for row in range(5, 20)]}, {"exclude": ["item-004"]}],
)
def test_lists_are_those_of_recommend(run: Path, folder: Path, options: dict[str, object]) -> None:
    assert_same_lists(run, folder, **options)


def test_recommend_serve_and_onnx_give_the_same_lists(run: Path, folder: Path) -> None:
    """ONNX: user.onnx by onnxruntime and a product with the item vectors, with nothing of the export's own reader."""
    pytest.importorskip("uvicorn", reason="serving needs the extra turbogr[serve]")
    import onnxruntime
    import pyarrow.parquet as pq
    from safetensors.numpy import load_file

    from tests.serving.conftest import serving
    from turbogr.serving.live_export import LiveExport
    from turbogr.serving.service import Service

    k, cases = 7, json.loads((folder / "check.json").read_text())["cases"]
    histories = [case["history"] for case in cases]
    assert len(histories) == 10 and any(len(history) > 8 for history in histories)  # longer than the model reads
    recommended = turbogr.load(run).recommend(histories=histories, k=k)
    with serving(Service(LiveExport(folder))) as client:
        status, answer = client.recommend(histories=histories, k=k)
    assert status == 200
    served = [[(entry["item"], entry["score"]) for entry in one["items"]] for one in answer["lists"]]
    graph = onnxruntime.InferenceSession(folder / "user.onnx")
    ids = pq.read_table(folder / "item_ids.parquet")["item_id"].to_pylist()
    vectors = load_file(folder / "items.safetensors")["vectors"]
    max_len = json.loads((folder / "model.json").read_text())["model"]["max_len"]
    for history, wanted, by_service in zip(histories, recommended, served, strict=True):
        events = [(ids.index(item), time) for item, time in history]
        rows, times = np.array(events[-max_len:], dtype=np.int64).T
        lengths, now = np.array([len(rows)], np.int64), times[-1:]
        inputs = {"items": rows[None], "times": times[None], "lengths": lengths, "request_times": now}
        scores = (graph.run(None, inputs)[0] @ vectors.T)[0]
        scores[[row for row, _ in events]] = -np.inf  # seen items are left out
        by_graph = [(ids[row], float(scores[row])) for row in np.argsort(-scores, kind="stable")[:k]]
        for got in (by_service, by_graph):
            assert not list(self_test.compare(got, [item for item, _ in wanted], [score for _, score in wanted]))


def test_the_time_of_the_request_counts(run: Path, folder: Path) -> None:
    history, at = HISTORIES[0], "2020-01-01T00:00"
    (expected,) = turbogr.load(run).recommend(histories=[history], k=7, at=at)
    (found,) = standalone.Recommender(folder).recommend([history], 7, at=at)
    (earlier,) = standalone.Recommender(folder).recommend([history], 7)
    assert [item for item, _ in found] == [item for item, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert [score for _, score in found] != pytest.approx([score for _, score in earlier], abs=1e-5)


def test_users_and_similar_items_are_those_of_recommend(run: Path, folder: Path) -> None:
    recommender, opened = turbogr.load(run), standalone.Recommender(folder)
    for user in (100, 130, 259):
        (found,) = opened.best([opened.history_of_user(user)], 5)
        assert opened.names(found[0]) == [item for item, _ in recommender.recommend(user, k=5)]
    expected = recommender.similar_items(["item-003", "item-030"], k=6)
    for got, wanted in zip(opened.similar(["item-003", "item-030"], 6), expected, strict=True):
        assert not list(self_test.compare(got, [item for item, _ in wanted], [score for _, score in wanted]))
    with pytest.raises(standalone.RequestError, match="no user 5"):
        opened.history_of_user(5)


def test_the_index_finds_what_exact_search_finds(folder: Path) -> None:
    pytest.importorskip("faiss")
    facts = json.loads((folder / "model.json").read_text())["index"]
    assert facts["recall@10"] > 0.95 and not facts["use"]
    exact, indexed = standalone.Recommender(folder), standalone.Recommender(folder, search="hnsw")
    for got, wanted in zip(indexed.recommend(HISTORIES, 7), exact.recommend(HISTORIES, 7), strict=True):
        assert len({item for item, _ in got} & {item for item, _ in wanted}) >= 6


def test_a_blend_is_exported(same_graph, delivering, tmp_path: Path) -> None:
    run = delivering(*BLEND)
    export(run, tmp_path / "out", index=False)
    assert check_alone(tmp_path / "out").returncode == 0
    assert_same_lists(run, tmp_path / "out")
    with pytest.raises(standalone.RequestError, match="not the model alone"):
        standalone.Recommender(tmp_path / "out").recommend(HISTORIES, 7, search="hnsw")


@pytest.mark.parametrize(
    "component",
    [
        Component("item-knn", settings={"decay": 0.85, "popularity_weight": 0.02, "shrinkage": 10.0}),
        Component("recent-items", settings={"decay": 0.9}),
        Component("popularity"),
    ],
    ids=lambda component: component.name,
)
def test_a_simple_method_that_a_run_delivers_is_exported(
    same_graph, delivering, tmp_path: Path, component: Component
) -> None:
    run = delivering(component)
    export(run, tmp_path / "out", index=False)
    assert_same_lists(run, tmp_path / "out")
    assert_same_lists(run, tmp_path / "out", filter_seen=False)


def test_a_run_of_a_simple_method_is_exported(store, tmp_path: Path) -> None:
    from turbogr.config import load_config

    train(load_config("ease"), store.path, tmp_path / "run")
    made = export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / "user.onnx").exists() and made.facts["model"] is None
    assert check_alone(tmp_path / "out").returncode == 0
    assert_same_lists(tmp_path / "run", tmp_path / "out")
    with pytest.raises(standalone.RequestError, match="no vectors of items"):
        standalone.Recommender(tmp_path / "out").similar(["item-001"])


def test_the_graph_has_plain_operators_and_no_path_of_this_machine(folder: Path) -> None:
    import onnx

    model = onnx.load(str(folder / "user.onnx"), load_external_data=False)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    assert [value.name for value in model.graph.input] == ["items", "times", "lengths", "request_times"]
    for name in ("user.onnx", "model.json"):
        content = (folder / name).read_bytes()
        assert str(Path(turbogr.__file__).parent).encode() not in content
        assert b"site-packages" not in content


def test_the_torch_program_gives_the_vectors_of_the_model(run: Path, folder: Path) -> None:
    program = torch.export.load(folder / "user.pt2").module()
    opened = standalone.Recommender(folder)
    read = [opened.read_history(history) for history in HISTORIES if history and history != ["nothing"]]
    inputs = {name: torch.from_numpy(values) for name, values in standalone.pad(read, 8, 8).items()}
    vectors = program(torch.from_numpy(opened.vectors), torch.from_numpy(opened.norms), *inputs.values())
    np.testing.assert_allclose(vectors.numpy(), opened.encode(read), atol=2e-6)
    known = [history for history in HISTORIES if history and history != ["nothing"]]
    with pytest.warns(UserWarning, match="items that the model does not know"):
        expected = turbogr.load(run).user_vectors(histories=known).matrix
    np.testing.assert_allclose(vectors.numpy(), expected, atol=2e-6)


def test_an_export_is_repeated_to_the_last_bit_and_replaced(run: Path, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    shutil.copytree(folder, target)
    (target / "left.txt").write_text("from the old one")
    first, again = json.loads((folder / "model.json").read_text()), export(run, target, with_users=True).facts
    unlike = ("user.pt2", "index.faiss")  # an archive with random names, and threads that link as they come
    assert {name: file for name, file in first["files"].items() if name not in unlike} == {
        name: file for name, file in again["files"].items() if name not in unlike
    }
    assert not (target / "left.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_else_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"mine exists and is not an export, so it is not replaced"):
        export(run, tmp_path / "mine")
    with pytest.raises(UserError, match="does not exist; create it"):
        export(run, tmp_path / "no" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_list_that_differs_is_not_published(
    same_graph, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "SCORE_TOLERANCE", -1.0)
    with pytest.raises(UserError, match="does not give the lists that `turbogr recommend` gives"):
        export(run, tmp_path / "out", index=False)
    assert not list(tmp_path.iterdir())


def test_bf16_is_exported_in_fp32_and_says_so(store, tmp_path: Path) -> None:
    import dataclasses

    changed = dataclasses.replace(config().train, precision="bf16")
    train(config(train=changed), store.path, tmp_path / "run")
    with pytest.warns(UserWarning, match="computes in bf16, and an export in fp32"):
        made = export(tmp_path / "run", tmp_path / "out", index=False)
    assert made.facts["model"]["trained_in"] == "bf16"


def test_the_command_writes_a_folder(same_graph, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out"), "--index", "none"]) == 0
    assert "its own check passed" in capsys.readouterr().out
    assert cli.main(["export", str(run), "--out", str(run)]) == 2
    assert "is not an export" in capsys.readouterr().err


def test_requests_that_cannot_be_answered_say_why(folder: Path) -> None:
    opened = standalone.Recommender(folder)
    for history, sentence in (
        ("item-001", "give a list of items"),
        ([["item-001", "yesterday"]], "cannot read 'yesterday' as a time"),
        ([["item-001", 10**15]], "after 2200"),
        ([["item-001", 1, 2]], "not an \\(item, time\\) pair"),
        ([["item-001", 1], "item-002"], "not an \\(item, time\\) pair"),
        ([None], "items are texts or numbers"),
        ([{"item": 1}], "items are texts or numbers"),
    ):
        with pytest.raises(standalone.RequestError, match=sentence):
            opened.recommend([history])
    with pytest.raises(standalone.RequestError, match="k is 0"):
        opened.recommend([[]], 0)
    with pytest.raises(standalone.RequestError, match="before the last event"):
        opened.recommend([[["item-001", 10**9]]], at=5)
    with pytest.raises(standalone.RequestError, match="include has no item"):
        opened.recommend([[]], include=["nothing"])
    with pytest.raises(standalone.ExportError, match="not an export"):
        standalone.Recommender(folder.parent)


def test_the_best_rows_are_found_by_blocks() -> None:
    generator = np.random.default_rng(0)
    for size in (1, 5, 1000, 5000, 20_001):
        for values in (generator.normal(size=size), generator.integers(0, 5, size)):
            scores = values.astype(np.float32)
            scores[generator.random(size) < 0.3] = -np.inf
            for k in (1, 10, 300):
                expected = np.lexsort((np.arange(size), -scores))[:k]
                assert (standalone.top_rows(scores, k) == expected).all()


@pytest.fixture(scope="module")
def two_days(store, run: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Exports before and after a warm start on a log with more users and items, and the new run."""
    base = tmp_path_factory.mktemp("days")
    histories = [store.items[store.offsets[u] : store.offsets[u + 1]].tolist() for u in range(store.num_users)]
    histories[3] += [60, 61]
    newer = write_store(base / "data", [*histories, [1, 60, 61], [60, 2, 3, 61]], 62)
    train(config(), newer.path, base / "run", init_from=run)
    shutil.copytree(folder, base / "old")
    export(base / "run", base / "new", with_users=True)
    return base / "old", base / "new", base / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_delta_gives_the_full_export_bit_for_bit(two_days, tmp_path: Path) -> None:
    from turbogr.exports.delta_folder import write_delta

    old, new, _ = two_days
    facts = write_delta(old, new, tmp_path / "delta")
    assert facts["files"]["item_ids.parquet"]["how"] == "append"
    assert facts["files"]["items.safetensors"]["how"] == "rows"
    assert facts["files"]["recommender.py"]["how"] == "same"
    apply_to(old, tmp_path / "delta", tmp_path / "made")
    assert contents(tmp_path / "made") == contents(new)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            ALONE,
            *map(str, (tmp_path / "delta" / "apply.py", old, tmp_path / "alone")),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "alone") == contents(new)


def test_only_changed_rows_are_in_a_delta(two_days, tmp_path: Path) -> None:
    from turbogr.exports.apply_delta import read_tensors
    from turbogr.exports.delta_folder import write_delta
    from turbogr.parallel.safetensors_file import write_tensors

    old, _, _ = two_days
    new = tmp_path / "new"
    shutil.copytree(old, new)
    _, tensors = read_tensors(old / "items.safetensors")
    changed = {name: torch.from_numpy(np.array(values)) for name, values in tensors.items()}
    changed["vectors"][[3, 17]] += 1
    changed["vectors"] = torch.cat([changed["vectors"], torch.ones(2, 16)])
    (new / "items.safetensors").unlink()
    write_tensors(new / "items.safetensors", changed)
    write_delta(old, new, tmp_path / "delta")
    _, kept = read_tensors(tmp_path / "delta" / "changes.safetensors")
    assert kept["items.safetensors:vectors:rows"].tolist() == [3, 17, 60, 61]
    assert len(kept["items.safetensors:norms:rows"]) == 0
    apply_to(old, tmp_path / "delta", tmp_path / "made")
    assert contents(tmp_path / "made") == contents(new)


def test_the_command_writes_and_applies_a_delta(two_days, tmp_path: Path, capsys, monkeypatch) -> None:
    old, new, run = two_days
    monkeypatch.setattr(
        folder_writer,
        "write_graphs",
        lambda model, num_items, target: [shutil.copy(new / name, target) for name in ("user.onnx", "user.pt2")],
    )
    delta, made = str(tmp_path / "delta"), str(tmp_path / "made")
    options = ["--index", "none", "--with-users"]
    assert cli.main(["export", str(run), "--since", str(old), "--out", delta, *options]) == 0
    assert "files changed" in capsys.readouterr().out
    assert cli.main(["export", delta, "--apply", "--since", str(old), "--out", made]) == 0
    assert check_alone(Path(made)).returncode == 0
    assert cli.main(["export", delta, "--apply", "--since", made, "--out", str(tmp_path / "x")]) == 2
    assert "apply it to the export that it was made from" in capsys.readouterr().err
    assert cli.main(["export", delta, "--apply", "--out", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()
    with pytest.raises(standalone.ExportError, match="is a delta, not an export"):
        standalone.Recommender(delta)


def test_a_damaged_delta_makes_nothing(two_days, tmp_path: Path) -> None:
    from turbogr.exports.delta_folder import write_delta

    old, new, _ = two_days
    write_delta(old, new, tmp_path / "delta")
    with (tmp_path / "delta" / "changes.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(UserError, match="does not become what was exported"):
        apply_to(old, tmp_path / "delta", tmp_path / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["delta"]


def test_weights_are_written_and_mapped_to_public_names(run: Path, tmp_path: Path) -> None:
    export_weights(run, tmp_path / "weights")
    trained = load_model(run)
    ours, public = load_weights(tmp_path / "weights"), load_weights(tmp_path / "weights", "public")
    for name, parameter in trained.task.model.named_parameters():
        assert torch.equal(ours[name], parameter)
    assert torch.equal(ours["tables.item"], trained.tables["item"])
    assert torch.equal(public[ITEMS_NAME][1:], trained.tables["item"]) and not public[ITEMS_NAME][0].any()
    assert torch.equal(public["_hstu._attention_layers.1._uvqk"], ours["blocks.1.uvqk"])
    assert torch.equal(public["_hstu._attention_layers.0._o.weight"], ours["blocks.0.out_weight"].T)
    with pytest.raises(UserError, match="has no weights"):
        load_weights(run)
    assert cli.main(["export", str(run), "--format", "weights", "--out", str(tmp_path / "again")]) == 0


@pytest.mark.skipif(OLD_RUNS is None, reason="TURBOGR_TEST_OLD_RUNS is not set: it names the folder of old runs")
def test_a_run_of_0_1_0_is_exported(tmp_path: Path) -> None:
    source = Path(str(OLD_RUNS)) / "0.1.0"
    export(source / "run", tmp_path / "out", data=source / "data")
    done = check_alone(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
