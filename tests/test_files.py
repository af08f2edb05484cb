from __future__ import annotations

import os
import stat

import pytest

from turbogr.files import replace_text


def test_text_is_replaced_and_readable_like_any_file(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "one")
    replace_text(path, "zwei ü\n")
    assert path.read_text(encoding="utf-8") == "zwei ü\n"
    reference = tmp_path / "b"
    reference.write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(reference.stat().st_mode)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "a.json"
    replace_text(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
