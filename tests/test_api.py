from __future__ import annotations

import subprocess
import sys

import pytest

import turbogr


def test_importing_the_package_is_cheap():
    code = "import sys, turbogr; sys.exit(bool({'torch', 'numpy', 'pyarrow', 'yaml'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", turbogr.__all__)
def test_every_name_is_there_and_documented(name):
    value = getattr(turbogr, name)
    assert callable(value)
    assert value.__doc__
    assert name in dir(turbogr)


def test_the_list_is_complete():
    assert set(turbogr.__all__) == turbogr._ORIGINS.keys()


def test_packages_do_not_hide_functions():
    # an import of a package sets its name on turbogr; none may take the place of a function
    code = (
        "import turbogr, turbogr.training.run, turbogr.evaluation, turbogr.report.page\n"
        "import turbogr.recommend, turbogr.data\n"
        "for name in turbogr.__all__: assert callable(getattr(turbogr, name)), name"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(("old", "new"), [("fit", "train"), ("evaluate_run", "evaluate")])
def test_the_names_of_0_1_0_work_and_warn_once(monkeypatch, old, new):
    monkeypatch.delitem(vars(turbogr), old, raising=False)  # as in a new process
    with pytest.warns(DeprecationWarning, match=rf"turbogr\.{old} is now turbogr\.{new}") as warned:
        found = [getattr(turbogr, old) for _ in range(2)]
    assert found == [getattr(turbogr, new)] * 2
    assert [warning.filename for warning in warned] == [__file__]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = turbogr.trian
