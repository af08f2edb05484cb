from __future__ import annotations

import os
import socket
import stat

import pytest

from turbogr.errors import UserError
from turbogr.files import atomic_file, check_writable, replace_text


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


def test_a_failure_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "missing" / "a.json"
    with pytest.raises(FileNotFoundError) as missing:
        replace_text(path, "new")
    assert missing.value.filename == str(path)

    path = tmp_path / "a.json"
    with pytest.raises(OSError, match=r"Is a directory: '.*/a\.json'") as failed, atomic_file(path) as temporary:
        raise IsADirectoryError(21, "Is a directory", str(temporary))
    assert failed.value.filename == str(path)
    with pytest.raises(FileNotFoundError) as other, atomic_file(path):
        (tmp_path / "other").read_text()
    assert other.value.filename == str(tmp_path / "other")
    path.mkdir()
    with pytest.raises(OSError, match=r"a\.json") as failed:
        replace_text(path, "new")
    assert ".part" not in str(failed.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.fixture(params=["pipe", "socket", "link to a pipe", "link to itself"])
def special(request, tmp_path, monkeypatch):
    """A path that is not a regular file, and what the message calls it; the folder must not change."""
    path = tmp_path / "a.json"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        monkeypatch.chdir(tmp_path)  # the address of a socket must be short
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    elif request.param == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    else:
        path.symlink_to("a.json")
    before = sorted((entry.name, entry.lstat().st_mode) for entry in tmp_path.iterdir())
    words = {"socket": "is a socket", "link to itself": "is a link to itself"}
    yield path, words.get(request.param, "is a pipe")
    assert sorted((entry.name, entry.lstat().st_mode) for entry in tmp_path.iterdir()) == before


def test_a_special_file_is_never_replaced(special):
    path, words = special
    with pytest.raises(UserError, match=rf"^--out .*a\.json {words}.*; .*name"):
        check_writable(path, "--out")
    with pytest.raises(UserError, match=rf"a\.json {words}"):
        replace_text(path, "new")
    with pytest.raises(UserError, match=rf"a\.json {words}"), atomic_file(path):
        raise AssertionError("the work has begun")


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "here").mkdir()
    link, target = tmp_path / "here" / "a.json", tmp_path / "disk" / "b.json"
    link.symlink_to("../disk/b.json")
    for text in ("new", "newer"):
        check_writable(link, "--out")
        replace_text(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert [*(tmp_path / "disk").iterdir(), *(tmp_path / "here").iterdir()] == [target, link]
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "gone" / "a.json")
    with pytest.raises(UserError, match=r"--out .*dangling: the folder .*gone does not exist"):
        check_writable(dangling, "--out")
    with pytest.raises(FileNotFoundError) as missing:
        replace_text(dangling, "new")
    assert missing.value.filename == str(dangling)


def test_a_target_is_checked_before_the_work(tmp_path, monkeypatch):
    check_writable(tmp_path / "a.json", "--out")
    with pytest.raises(UserError, match=r"--out .*b/a\.json: the folder .*b does not exist; create it"):
        check_writable(tmp_path / "b" / "a.json", "--out")
    with pytest.raises(UserError, match="is a folder"):
        check_writable(tmp_path, "--out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match="is not writable"):
        check_writable(tmp_path / "a.json", "--out")
