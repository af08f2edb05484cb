from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("check_layers", ROOT / "tools" / "check_layers.py")
check_layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_layers)

LIST = """# Title

```
csrc/            kernels
turbogr/
  low.py         the lowest, which says no.py
  mid/           in the middle
    inner.py     not a layer
  high.py        the highest
recipes/
  other.py       not a module
```
"""


@pytest.fixture
def tree(tmp_path):
    def write(**files):
        (tmp_path / "ARCHITECTURE.md").write_text(LIST)
        for name in ("low", "mid/__init__", "mid/inner", "high", "__init__"):
            path = tmp_path / "turbogr" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files.get(name.replace("/", "_"), ""))
        return tmp_path

    return write


def test_the_list_is_read_in_order():
    assert check_layers.read_layers(LIST) == ["low", "mid", "high"]
    with pytest.raises(ValueError, match="no list"):
        check_layers.read_layers("nothing")


@pytest.mark.parametrize(
    "source",
    [
        "import turbogr.high",
        "from turbogr.high import x",
        "from turbogr import high",
        "from turbogr import high as h",
        "from .. import high",
        "from ..high import x",
        "def f():\n    import turbogr.high.y",
    ],
)
def test_an_import_from_below_is_found(tree, source):
    root = tree(mid_inner=f"import os\n{source}\n")
    line = 3 if source.startswith("def") else 2
    assert check_layers.find_violations(root) == [
        f"turbogr/mid/inner.py:{line}: 'mid' stands above 'high' and imports it"
    ]
    assert check_layers.main(root) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from turbogr.low import x",
        "from turbogr import low, __version__",
        "import turbogr",
        "from turbogr.mid import inner",
        "from . import inner",
        "import torch.high",
        "from torch import high",
    ],
)
def test_what_is_allowed(tree, source):
    root = tree(mid___init__=source, __init__="from turbogr.high import x")
    assert check_layers.find_violations(root) == []
    assert check_layers.main(root) == 0


def test_a_module_missing_in_the_list_is_found(tree):
    root = tree()
    (root / "turbogr" / "extra.py").write_text("")
    assert check_layers.find_violations(root) == ["ARCHITECTURE.md: turbogr/extra is not in the list"]


def test_two_modules_with_one_name_are_found(tree):
    root = tree()
    (root / "turbogr" / "mid" / "high.py").write_text("")
    message = "turbogr/high.py, turbogr/mid/high.py: modules with the same name; rename one"
    assert check_layers.find_violations(root) == [message]


@pytest.mark.parametrize("folder", ["ops/mid", "commands", "bench"])
def test_commands_backends_and_benchmarks_may_share_a_name(tree, folder):
    root = tree()
    path = root / "turbogr" / folder / "high.py"
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert check_layers.shared_names(root) == []


def test_this_repository_has_no_violation():
    assert check_layers.find_violations(ROOT) == []
