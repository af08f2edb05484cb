"""Which backend computes an operator, and how a backend is added: by a file, by a call, by a plug-in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import turbogr
from turbogr import ops, plugins
from turbogr.errors import UserError
from turbogr.ops import plugin_operators, registry
from turbogr.ops.registry import Backend, register_backend, register_operator

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLOAT = torch.float32


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Operators, backends and components as they were."""
    operators, added = {name: list(found) for name, found in registry._operators.items()}, set(plugin_operators._added)
    components = dict(plugins._components)
    yield
    registry._operators.clear()
    registry._operators.update(operators)
    plugin_operators._added.clear()
    plugin_operators._added.update(added)
    plugins._components.clear()
    plugins._components.update(components)
    ops.set_backend("auto")


def double(x: Tensor) -> Tensor:
    return x + x


def double_fast(x: Tensor) -> Tensor:
    return x * 2


def test_the_backend_for_this_device_comes_first_and_the_reference_last() -> None:
    register_operator("double", reference=double)
    register_backend("double", Backend("anywhere"), lambda x: x)
    register_backend("double", Backend("gpu", devices=("cuda",)), lambda x: x)
    register_backend("double", Backend("fast", devices=("cpu",), dtypes=(FLOAT,)), double_fast)
    names = [found.backend.name for found in registry.operators()["double"]]
    assert names == ["gpu", "fast", "anywhere", "reference"]
    assert registry.choose("double", CPU, FLOAT) is double_fast
    assert served("double", CUDA) == ("gpu", "the fastest that can run here")
    assert served("double", CPU) == ("fast", "gpu: it runs on cuda only")
    assert served("double", CPU, torch.float64) == (
        "anywhere",
        "gpu: it runs on cuda only; fast: it computes in float32 only",
    )


def served(operator: str, device: torch.device, dtype: torch.dtype = FLOAT) -> tuple[str, str]:
    (found,) = [service for service in registry.services(device, dtype) if service.operator == operator]
    return found.backend, found.why


def test_a_backend_s_name_need_not_be_a_device() -> None:
    register_operator("double", reference=double)
    register_backend("double", Backend("fast", devices=("cpu",), dtypes=(FLOAT,)), double_fast)
    assert registry.choices() == ["auto", "cpu", "triton", "fast", "reference"]
    with registry.backend("fast"):
        assert registry.choose("double", CPU, FLOAT) is double_fast
        assert served("double", CPU) == ("fast", "chosen by name")
        assert served("embed", CPU)[1].endswith("fast: not written for this operator")
        with pytest.raises(UserError, match=r"backend 'fast' cannot serve 'double' on cuda in .*: it runs on cpu only"):
            registry.choose("double", CUDA, FLOAT)


def test_an_unknown_backend_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown backend 'referense'; choose from auto, .*'reference'"):
        ops.set_backend("referense")


def test_a_backend_with_a_problem_is_passed_over_and_refused_by_name() -> None:
    register_operator("double", reference=double)
    register_backend("double", Backend("fast", devices=("cpu",), problem="its library is missing"), double_fast)
    with pytest.warns(UserWarning, match="running on the slower reference operators: its library is missing"):
        assert registry.choose("double", CPU, FLOAT) is double
    with pytest.raises(UserError, match="backend 'fast' cannot run on this machine: its library is missing"):
        ops.set_backend("fast")
    assert registry.choose("double", CPU, FLOAT) is double


def test_an_operator_is_called_by_its_first_tensor() -> None:
    double_operator = register_operator("double", reference=double)
    register_backend("double", Backend("fast", devices=("cpu",), dtypes=(FLOAT,)), lambda x: x * 3)
    assert double_operator(torch.tensor(2.0)) == 6
    assert double_operator(torch.tensor(2.0, dtype=torch.float64)) == 4
    with pytest.raises(TypeError, match="needs a tensor"):
        double_operator(2.0)


def test_an_operator_needs_a_reference_and_a_backend_an_operator() -> None:
    with pytest.raises(TypeError, match="operator 'double' has no reference"):
        register_operator("double")
    with pytest.raises(UserError, match=r"there is no operator 'embedd'.*'embed'"):
        register_backend("embedd", Backend("fast"), double)


def test_a_plug_in_adds_an_operator_and_a_backend() -> None:
    plugins.register("operator", "double")(double)

    @plugins.register("backend", "fast", operator="double")
    @ops.serves(devices=["cpu"], dtypes=[FLOAT])
    def fast(x: Tensor) -> Tensor:
        return x * 2

    assert registry.choose("double", CPU, FLOAT) is fast
    assert registry.choose("double", CPU, torch.float64) is double
    assert torch.equal(ops.operator("double")(torch.ones(2)), torch.full((2,), 2.0))
    assert "fast" in plugins.names("backend")
    plugins.register("backend", "fast", operator="double")(double_fast)  # the same plug-in, loaded again
    assert registry.choose("double", CPU, torch.float64) is double_fast


def test_a_plug_in_does_not_replace_what_is_built_in() -> None:
    with pytest.raises(UserError, match=r"the operator 'embed' of .* exists already"):
        plugins.register("operator", "embed")(double)
    with pytest.raises(UserError, match=r"the backend 'cpu' of .* exists already: operator 'embed' has"):
        plugins.register("backend", "cpu", operator="embed")(double)
    with pytest.raises(UserError, match="the operator 'None', which does not exist"):
        plugins.register("backend", "mine")(double)
    with pytest.raises(UserError, match=r"the operator 'embedd', which does not exist.*'embed'"):
        plugins.register("backend", "mine", operator="embedd")(double)


def test_a_plug_in_s_backend_of_a_built_in_operator_is_used_only_when_it_is_named() -> None:
    plugins.register("backend", "mine", operator="unique_rows")(double)
    with registry.backend("mine"):
        assert registry.choose("unique_rows", CPU, FLOAT) is double
    assert served("unique_rows", CPU)[0] != "mine"
    assert served("unique_rows", CUDA) == (
        "reference",
        "cpu: it runs on cpu only; mine: used only when it is chosen by name",
    )


BACKEND_FILE = '''
"""keyed_dropout on a simulated accelerator."""

import torch
from torch import Tensor

from turbogr.ops.keyed_dropout import reference
from turbogr.ops.registry import Backend

BACKEND = Backend("simulated", devices=("cpu",), dtypes=(torch.float64, torch.bfloat16))


def keyed_dropout(x: Tensor, dropout: object, keys: Tensor) -> Tensor:
    print("simulated")
    return reference.keyed_dropout(x, dropout, keys)
'''
PROGRAM = """
import json, torch
from turbogr import ops, plugins
from turbogr.config import Config, TrainConfig
from turbogr.ops import registry
from turbogr.random import Dropout

def drop(dtype):
    return ops.keyed_dropout(torch.ones(3, 4, dtype=dtype), Dropout(0.5, 1), torch.arange(3))

drop(torch.float64)
ops.set_backend("simulated")
drop(torch.bfloat16)
Config(train=TrainConfig(backend="simulated")).check_names()
found = [(b.name, b.problem) for b in registry.backends()]
try:
    drop(torch.float32)
except Exception as error:
    print(json.dumps({"backends": found, "error": str(error), "names": plugins.names("backend")}))
"""


def test_a_file_in_an_operator_s_folder_is_a_backend(tmp_path: Path) -> None:
    """The file is all that is added: no list of names, no registration elsewhere."""
    package = Path(turbogr.__file__).parent
    shutil.copytree(package, tmp_path / "turbogr", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "turbogr/ops/keyed_dropout/simulated.py").write_text(BACKEND_FILE)
    (tmp_path / "turbogr/ops/embedding/absent.py").write_text("import a_library_that_nobody_has\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert (first, second) == ("simulated", "simulated")
    said = json.loads(last)
    assert ["simulated", None] in said["backends"]
    assert ["absent", "it cannot be imported: No module named 'a_library_that_nobody_has'"] in said["backends"]
    assert "simulated" in said["names"]
    assert said["error"].endswith("in torch.float32: it computes in float64, bfloat16 only")
