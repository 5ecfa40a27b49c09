"""The folder keeps what it is given, trusts nothing else, and never fails a run."""

import errno
import os
import pathlib
import stat
import subprocess
import sys

import pytest

from jaxoffload.store import folder
from jaxoffload.store.folder import Folder

DATA = bytes(range(256)) * 8


@pytest.fixture
def made(tmp_path):
    return Folder(str(tmp_path / "a" / "b"), 1 << 20)


def file_of(made, name):
    return pathlib.Path(made.path, name)


def test_entries_come_back_and_belong_to_the_user_alone(made):
    assert made.read("x") is None and made.entries() == [] and made.clear() == 0
    assert made.write("x", DATA) and made.write("y", b"")
    again = Folder(made.path, made.limit)
    assert again.read("x") == DATA and again.read("y") == b"" and again.read("z") is None
    assert made.write("x", b"other") and again.read("x") == b"other"
    assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o700
    assert {stat.S_IMODE(f.stat().st_mode) for f in pathlib.Path(made.path).iterdir()} == {0o600}
    assert [entry.name for entry in made.entries()] == ["y", "x"]
    assert made.clear() > 5 and made.entries() == []


def damages():
    size = len(DATA) + 40
    yield from ((f"bit {at}", at) for at in (0, 7, 8, 39, 40, size - 1))
    yield from ((f"cut at {at}", -at) for at in (0, 7, 39, 40, size - 1))


@pytest.mark.parametrize("how", [d[1] for d in damages()], ids=[d[0] for d in damages()])
def test_what_is_damaged_is_absent_until_it_is_written_anew(made, how, request):
    made.write("x", DATA)
    path = file_of(made, "x")
    text = bytearray(path.read_bytes())
    if request.node.callspec.id.startswith("bit"):
        text[how] ^= 4
    else:
        del text[-how:]
    path.write_bytes(text)
    assert made.read("x") is None
    assert made.write("x", DATA) and made.read("x") == DATA


def test_an_entry_under_another_name_is_absent(made):
    made.write("x", DATA)
    os.rename(file_of(made, "x"), file_of(made, "y"))
    assert made.read("y") is None


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_not_used(made, mode, caplog):
    made.write("x", DATA)
    os.chmod(made.path, mode)
    folder._say.cache_clear()
    assert made.read("x") is None and not made.write("y", DATA) and made.entries() == []
    assert made.clear() == 0 and file_of(made, "x").exists()
    assert "others may write" in caplog.text and caplog.text.count(made.path) == 1


def test_what_belongs_to_another_user_is_not_used(made, monkeypatch):
    made.write("x", DATA)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert made.read("x") is None and not made.write("y", DATA)
    monkeypatch.undo()
    real = os.fstat

    def entry_of_another(handle):
        found = real(handle)
        if stat.S_ISDIR(found.st_mode):
            return found
        return os.stat_result((*found[:4], me + 1, *found[5:]))

    monkeypatch.setattr(os, "fstat", entry_of_another)
    assert made.read("x") is None
    monkeypatch.undo()
    assert made.read("x") == DATA


def test_links_and_pipes_are_not_read(made, tmp_path):
    made.write("x", DATA)
    os.rename(file_of(made, "x"), tmp_path / "x")
    os.symlink(tmp_path / "x", file_of(made, "x"))
    os.mkfifo(file_of(made, "pipe"))
    assert made.read("x") is None and made.read("pipe") is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "rename"])
def test_a_folder_that_cannot_be_written_to_is_no_store(made, monkeypatch, code, call):
    made.write("before", DATA)
    later, calls, real = Folder(made.path, made.limit), [], getattr(os, call)

    def refuse(*given, **named):
        if call == "open" and not given[1] & os.O_CREAT:
            return real(*given, **named)
        calls.append(given)
        raise OSError(code, os.strerror(code))

    if call == "mkdir":
        made.clear()
        os.rmdir(made.path)
    monkeypatch.setattr(os, call, refuse)
    assert not later.write("x", DATA)
    tried = len(calls)
    assert tried and not later.write("y", DATA) and len(calls) == tried, "one try is enough"
    monkeypatch.undo()
    assert later.read("before") == (None if call == "mkdir" else DATA)
    left = os.listdir(made.path) if call != "mkdir" else []
    assert left == ([] if call == "mkdir" else ["before"])


def test_a_path_through_a_file_is_no_store(tmp_path):
    (tmp_path / "file").write_text("")
    made = Folder(str(tmp_path / "file" / "kept"), 1 << 20)
    assert not made.write("x", DATA) and made.read("x") is None and made.entries() == []


def test_the_least_recently_used_goes_first(tmp_path):
    made = Folder(str(tmp_path / "kept"), 10 * (len(DATA) + 40))
    for number in range(10):
        made.write(f"x{number}", DATA)
        os.utime(file_of(made, f"x{number}"), (1000 + number, 1000 + number))
    assert made.read("x0") == DATA  # which notes the use
    assert made.write("y", DATA)
    names = {entry.name for entry in made.entries()}
    assert names == {"x0", *(f"x{n}" for n in range(3, 10)), "y"}
    assert sum(entry.bytes for entry in made.entries()) <= made.limit
    assert not made.write("large", bytes(made.limit)) and made.read("x0") == DATA


def test_what_a_killed_process_left_goes_once_it_is_old(made):
    made.write("x", DATA)
    old, new = file_of(made, "1.tmp"), file_of(made, "2.tmp")
    for path in (old, new):
        path.write_bytes(DATA)
    os.utime(old, (1000, 1000))
    assert [entry.name for entry in made.entries()] == ["x"]
    Folder(made.path, made.limit).write("y", DATA)
    assert not old.exists() and new.exists()
    made.clear()
    assert not new.exists()


WRITER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("folder", sys.argv[1])
folder = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folder)
made = folder.Folder(sys.argv[2], 1 << 16)
for turn in range(150):
    for name in "abcdef":
        data = made.read(name)
        assert data is None or data == name.encode() * 5000 + data[-1:], name
        made.write(name, name.encode() * 5000 + sys.argv[3].encode())
print(all(made.read(name) is not None for name in "abcdef"))
"""


def test_processes_that_write_at_once_leave_whole_entries(tmp_path):
    path = str(tmp_path / "kept")
    script = [sys.executable, "-c", WRITER, folder.__file__, path]
    running = [
        subprocess.Popen([*script, str(n)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for n in range(3)
    ]
    for process in running:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
        assert out == b"True\n" and not err
    assert {len(Folder(path, 1 << 16).read(name)) for name in "abcdef"} == {5001}
    assert set(os.listdir(path)) == set("abcdef")
