"""Files: one writer under a random name, readers of regular files, locks that follow no link, JSON without NaN."""

import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenmix import files
from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import log


@contextmanager
def never_blocks(seconds: int = 5) -> Iterator[None]:
    """Fail where the block waits, as an open pipe does, instead of waiting for ever."""

    def fail(*_: object) -> None:
        raise AssertionError("blocked")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


READERS: dict[str, Callable[[Path], object]] = {
    "open_regular": files.open_regular,
    "check_regular": files.check_regular,
    "read_bytes": files.read_bytes,
    "read_text": files.read_text,
    "read_json": files.read_json,
    "replace_file": lambda path: files.replace_file(path, b""),
    "write_json": lambda path: files.write_json(path, 1),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_and_a_folder_are_refused_and_not_waited_for(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for entry in ("pipe.json", "folder.json"):
        with never_blocks(), pytest.raises(UserError, match=r"is a folder, a pipe or a device"):
            READERS[name](tmp_path / entry)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder.json", "pipe.json"]


def test_a_file_to_append_to_is_no_pipe_and_no_link(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("pipe", "link"):
        with never_blocks(), pytest.raises((UserError, OSError)):
            files.open_to_append(tmp_path / name)
    with files.open_to_append(tmp_path / "target") as file:
        assert file.tell() == 4
        file.write(" more")
    assert (tmp_path / "target").read_text() == "kept more"


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_nothing_is_written_through_a_link(tmp_path: Path, kind: str):
    target, path = tmp_path / "target", tmp_path / "file"
    target.write_text("kept")
    path.symlink_to(target) if kind == "symbolic" else path.hardlink_to(target)
    files.replace_file(path, b"new")
    assert (target.read_text(), path.read_text()) == ("kept", "new")
    assert not path.is_symlink()


def test_a_file_is_as_readable_as_any_other(tmp_path: Path):
    before = os.umask(0o027)
    try:
        files.replace_file(tmp_path / "file", b"")
        with files.new_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "folder")] == [0o640, 0o750]


def test_a_disk_that_refuses_a_library_s_files_is_an_os_error_with_the_folder(tmp_path: Path):
    """safetensors and tokenizers raise `Exception` with a number in its text."""
    with pytest.raises(OSError, match="out") as caught, files.new_folder(tmp_path / "new" / "out"):
        raise Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "new" / "out"))
    with pytest.raises(OSError, match="file") as caught, files.replacing(tmp_path / "file"):
        raise Exception("I/O error: No space left on device (os error 28)")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    for error in (ValueError("other"), OSError("other"), UserError("other (os error 2)")):
        with pytest.raises(type(error), match="other") as same, files.new_folder(tmp_path / "out"):
            raise error
        assert same.value is error


def test_a_folder_that_cannot_be_made_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(files.DiskError, match=r"cannot write .*new/out \(Permission denied\); give another --out"):
        files.check_new(tmp_path / "new" / "out")
    monkeypatch.undo()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("new")
    for name, message in (("file/x", "file is not a folder"), ("link", "link is a link to new")):
        with pytest.raises(UserError, match=message):
            files.check_new(tmp_path / name)
    files.check_new(tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "../here"):
        with pytest.raises(UserError, match="is the current folder or a mount, which is not replaced"):
            files.check_new(Path(name))
    monkeypatch.setattr(os.path, "ismount", lambda place: place == tmp_path / "mount")
    (tmp_path / "mount").mkdir()
    with pytest.raises(UserError, match="mount is the current folder or a mount"):
        files.check_new(tmp_path / "mount")


def test_a_guessed_name_of_a_partial_folder_is_not_followed(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    for name in (".out.partial", ".out.before", ".partial-"):
        (tmp_path / name).symlink_to(victim)
    for content in ("one", "two"):
        with files.new_folder(tmp_path / "out") as partial:
            (partial / "file").write_text(content)
            if content == "two":
                (tmp_path / ".out.before").unlink(missing_ok=True)
    assert (tmp_path / "out" / "file").read_text() == "two"
    assert (victim / "file").read_text() == "kept"


@pytest.mark.parametrize("kind", ["hard", "symbolic", "pipe"])
def test_a_lock_that_is_not_a_file_of_its_own_is_refused(tmp_path: Path, kind: str):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("kept")
    run.mkdir()
    make = {"hard": run.joinpath(".lock").hardlink_to, "symbolic": run.joinpath(".lock").symlink_to}
    os.mkfifo(run / ".lock") if kind == "pipe" else make[kind](victim)
    with never_blocks(), pytest.raises(UserError, match=r"is a link|not a file of its own"), files.one_writer(run):
        pass
    assert victim.read_text() == "kept"


def test_a_hard_link_as_the_writer_is_replaced(tmp_path: Path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("kept")
    run.mkdir()
    (run / ".writer").hardlink_to(victim)
    with files.one_writer(run):
        assert "process" in (run / ".writer").read_text()
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("written", ["pipe", "large", None])
def test_a_second_writer_is_told_who_writes_whatever_the_note_is(tmp_path: Path, written: str | None):
    with files.one_writer(tmp_path):
        if written is not None:
            (tmp_path / ".writer").unlink()
        if written == "pipe":
            os.mkfifo(tmp_path / ".writer")
        elif written == "large":
            (tmp_path / ".writer").write_bytes(b"x" * (1 << 20))
        expected = {"pipe": "another process", "large": "x{200};", None: f"process {os.getpid()} on "}[written]
        for refused in (files.one_writer(tmp_path), _checked(tmp_path)):
            with never_blocks(), pytest.raises(UserError, match=rf"is being written by {expected}"), refused:
                pass
    files.check_no_writer(tmp_path)


@contextmanager
def _checked(folder: Path) -> Iterator[None]:
    files.check_no_writer(folder)
    yield


def test_what_a_killed_writer_left_is_unused_and_removed(tmp_path: Path):
    script = (
        "import os, sys, pathlib; from tokenmix import files; root = pathlib.Path(sys.argv[1])\n"
        "with files.new_folder(root / 'folder') as a, files.replacing(root / 'file') as b: os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    assert files.is_unused(tmp_path)
    with files.one_writer(tmp_path):
        files.remove_partial(tmp_path)
        assert files.is_unused(tmp_path)
    (tmp_path / "file").touch()
    assert not files.is_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "file"]


def test_json_has_no_nan_and_reads_none(tmp_path: Path):
    def refuse(word: str) -> None:
        raise AssertionError(word)

    value = {"a": math.nan, "b": [1.5, math.inf, -math.inf], "c": {"d": (math.nan, "NaN")}, "e": tmp_path, "f": 1e300}
    for indent in (2, None):
        files.write_json(tmp_path / "value.json", value, indent)
        found = json.loads((tmp_path / "value.json").read_text(), parse_constant=refuse)
        assert found == {"a": None, "b": [1.5, None, None], "c": {"d": [None, "NaN"]}, "e": str(tmp_path), "f": 1e300}
    (tmp_path / "value.json").write_text('{"a": NaN, "b": -Infinity, "c": 1e999, "d": 0.5}')
    assert files.read_json(tmp_path / "value.json") == {"a": None, "b": None, "c": None, "d": 0.5}


@pytest.mark.parametrize("name", ["\x1b]0;PWN\x07.png", "a\rb\nc", "\x9b31m", "\u202egnp.exe", "\udcff"])
def test_control_characters_of_names_are_not_printed(name: str, capsys: pytest.CaptureFixture[str]):
    log(f"left out: {name}")
    said = capsys.readouterr().err
    assert said.startswith("tokenmix: left out: ")
    assert said.removesuffix("\n").isprintable()


def test_an_error_names_the_file_and_not_its_random_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(OSError, match="No such file") as caught:
        files.replace_file(tmp_path / "missing" / "file.json", b"")
    assert caught.value.filename == str(tmp_path / "missing" / "file.json")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as caught:
        files.replace_file(tmp_path / "file.json", b"")
    assert caught.value.filename == str(tmp_path / "file.json")
    assert not list(tmp_path.iterdir())


def test_a_strangers_folder_is_copied_without_links_and_pipes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep/file").write_text("kept")
    (source / files.LOCK).touch()

    def copied(name: str) -> Path:
        (tmp_path / name).mkdir()
        files.copy_folder(source, tmp_path / name)
        return tmp_path / name

    assert [path.name for path in sorted(copied("whole").rglob("*"))] == ["deep", "file"]
    for place in (".", "..", "/usr", "deep/file", "nowhere"):
        (source / "deep/link").symlink_to(place)
        with pytest.raises(UserError, match="link is a link to"):
            copied(f"linked-{place.replace('/', '-')}")
        (source / "deep/link").unlink()
    os.mkfifo(source / "deep/pipe")
    with never_blocks(), pytest.raises(UserError, match="is a folder, a pipe or a device"):
        copied("piped")


def test_a_link_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UserError, match="link is a link to real"), files.new_folder(tmp_path / "link"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
