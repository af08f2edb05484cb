from __future__ import annotations

import errno
import os
import socket
import stat

import pytest

from turbogr.errors import UserError
from turbogr.files import atomic_file, check_writable, no_link, remove_abandoned_files, replace_text


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failed_write_names_the_file_that_was_asked_for(tmp_path, number):
    path = tmp_path / "a.json"
    with pytest.raises(OSError, match=r"a\.json'$") as failed, atomic_file(path):
        raise OSError(number, os.strerror(number))  # the system names no file for a write
    assert failed.value.filename == str(path)


def test_the_umask_of_the_process_is_never_changed(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("another thread would make files with this umask"))
        replace_text(tmp_path / "a.json", "one")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o640


def test_files_of_killed_writers_are_removed_and_no_others(tmp_path):
    for name in (".a.json.ab12_xyz.part", ".a.json.0123abcd.part"):
        (tmp_path / name).write_text("left by a killed process")
    others = [".mine.part", "a.json.0123abcd.part", ".a.json.0123abcd", ".a.json.0123ABCD.part"]
    for name in others:
        (tmp_path / name).write_text("not ours")
    os.mkfifo(tmp_path / ".pipe.0123abcd.part")
    with atomic_file(tmp_path / "a.json") as written:
        remove_abandoned_files(tmp_path)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(
            [*others, ".pipe.0123abcd.part", written.name]
        )
        written.write_text("new")
    assert (tmp_path / "a.json").read_text() == "new"
    remove_abandoned_files(tmp_path / "a.json")
    remove_abandoned_files(tmp_path / "no such folder")


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    opened, removed = os.open, []

    def removed_before_it_is_locked(path, flags, *rest):
        handle = opened(path, flags, *rest)
        if not removed:
            removed.append(path)
            remove_abandoned_files(tmp_path)
        return handle

    monkeypatch.setattr(os, "open", removed_before_it_is_locked)
    replace_text(tmp_path / "a.json", "new")
    assert removed and [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


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
        replace_text(path, "new", follow_link=True)
    with pytest.raises(UserError, match=rf"a\.json {words}"), atomic_file(path, follow_link=True):
        raise AssertionError("the work has begun")


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "here").mkdir()
    link, target = tmp_path / "here" / "a.json", tmp_path / "disk" / "b.json"
    link.symlink_to("../disk/b.json")
    for text in ("new", "newer"):
        check_writable(link, "--out")
        replace_text(link, text, follow_link=True)
        assert link.is_symlink()
        assert target.read_text() == text
    assert [*(tmp_path / "disk").iterdir(), *(tmp_path / "here").iterdir()] == [target, link]
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "gone" / "a.json")
    with pytest.raises(UserError, match=r"--out .*dangling: the folder .*gone does not exist"):
        check_writable(dangling, "--out")
    with pytest.raises(FileNotFoundError) as missing:
        replace_text(dangling, "new", follow_link=True)
    assert missing.value.filename == str(dangling)


def test_a_link_that_the_user_has_not_named_is_not_followed(tmp_path):
    target, link = tmp_path / "mine.txt", tmp_path / "evaluation.json"
    target.write_text("mine")
    for points_to in (target, tmp_path / "gone" / "a.json", link):
        link.unlink(missing_ok=True)
        link.symlink_to(points_to)
        with pytest.raises(UserError, match="is a symbolic link, which is not followed"):
            os.close(no_link(str(link), os.O_WRONLY))
        replace_text(link, "new")
        assert not link.is_symlink() and link.read_text() == "new" and target.read_text() == "mine"
    with open(link, "ab", opener=no_link) as file:
        file.write(b"er")
    assert link.read_text() == "newer"


def test_a_target_is_checked_before_the_work(tmp_path, monkeypatch):
    check_writable(tmp_path / "a.json", "--out")
    with pytest.raises(UserError, match=r"--out .*b/a\.json: the folder .*b does not exist; create it"):
        check_writable(tmp_path / "b" / "a.json", "--out")
    with pytest.raises(UserError, match="is a folder"):
        check_writable(tmp_path, "--out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match="is not writable"):
        check_writable(tmp_path / "a.json", "--out")
