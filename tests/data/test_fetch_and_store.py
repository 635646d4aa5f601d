"""Sources one after the other, the cache, concurrency; the network is a local folder or is switched off."""

import errno
import gzip
import hashlib
import multiprocessing
import os
import shutil
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torchvision.datasets import FashionMNIST

from tokenmix.errors import UserError
from tokenmix.lab.data.fetch import FetchError, apt_package, check_digest, download, first_that_works
from tokenmix.lab.data.images import load_images, sets
from tokenmix.lab.data.lookup import cache_root, stored_path
from tokenmix.lab.data.store import fetched


def idx(tensor: Tensor) -> bytes:
    head = bytes([0, 0, 8, tensor.dim()]) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return head + tensor.numpy().tobytes()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address of this machine that gives its files; of `cut` it gives less than it announces."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "home"))

        def do_GET(self) -> None:
            if self.path != "/cut":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")
            return None

        def log_message(self, *arguments: Any) -> None:
            return

    (tmp_path / "home").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "home", f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_download_and_digest(home: tuple[Path, str], tmp_path: Path):
    (home[0] / "source").write_bytes(b"pictures")
    copy = download(f"{home[1]}source", tmp_path / "copy")
    assert copy.read_bytes() == b"pictures"
    check_digest([copy], hashlib.sha256(b"pictures").hexdigest())
    check_digest([copy, copy], hashlib.sha512(b"picturespictures").hexdigest(), "sha512")
    with pytest.raises(FetchError, match=r"copy has sha256 .* expected 0000"):
        check_digest([copy], "0" * 64)


def test_what_is_wrong_with_an_address_is_one_line(home: tuple[Path, str], tmp_path: Path):
    wrong = {
        "http://127.0.0.1:9/x": "refused",
        f"{home[1]}missing": "404",
        f"{home[1]}cut": "4 bytes read, 96 more",
        "gopher://x": "No connection adapters",
        "http://no-such-host.invalid/x": "",
    }
    for url, message in wrong.items():
        with pytest.raises(FetchError, match=message) as caught:
            download(url, tmp_path / "x")
        assert "\n" not in str(caught.value)
        assert 0 < len(str(caught.value)) < 120
    (home[0] / "source").write_bytes(bytes(1 << 20))
    with pytest.raises(OSError, match="No space left"):
        download(f"{home[1]}source", Path("/dev/full"))


def test_sources_are_tried_in_order():
    def fail() -> str:
        raise FetchError("it is closed")

    assert first_that_works("x", [("home", fail), ("package", lambda: "got it"), ("never", fail)]) == "got it"
    with pytest.raises(FetchError, match="home: it is closed; second: it is closed"):
        first_that_works("x", [("home", fail), ("second", fail)])


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not on this machine")
@pytest.mark.parametrize("has_lists", [True, False])
def test_debian_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_lists: bool):
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: pictures\nVersion: 1:2.0-1\nArchitecture: all\nMaintainer: A <a@b.c>\nDescription: x\n"
    )
    (tree / "usr").mkdir()
    (tree / "usr" / "a.txt").write_text("hello")
    deb = tmp_path / "made.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", str(tree), str(deb)], check=True, capture_output=True)
    # Stands for apt-get; without lists it knows the package only after an update in a private folder.
    give = f"cp {deb} ./pictures_1%3a2.0-1_all.deb"
    script = (
        give
        if has_lists
        else (
            f'case "$*" in *Lists=*update) touch updated;; *download*) [ -e updated ] && {give} || '
            "{ echo 'E: Unable to locate package pictures' >&2; exit 100; };; esac"
        )
    )
    program(tmp_path / "bin", "apt-get", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    work = tmp_path / "work"
    work.mkdir()
    root, version = apt_package("pictures", work)
    assert (root / "usr" / "a.txt").read_text() == "hello"
    assert version == "1:2.0-1"


def test_clients_that_fail_or_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program(tmp_path / "bin", "apt-get", "echo 'E: Unable to locate package pictures' >&2; exit 100")
    program(tmp_path / "bin", "dpkg", ":")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin")
    with pytest.raises(FetchError, match="Unable to locate package pictures"):
        apt_package("pictures", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(FetchError, match="apt-get is not on this machine"):
        apt_package("pictures", tmp_path)


def test_cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOKENMIX_DATA", raising=False)
    assert cache_root() == Path.home() / ".cache" / "tokenmix" / "data"
    monkeypatch.setenv("TOKENMIX_DATA", str(tmp_path))
    assert cache_root() == tmp_path
    assert cache_root("other") == Path("other")


def test_fetched_once(tmp_path: Path):
    calls = []

    def fetch(folder: Path):
        calls.append(folder)
        assert not list(folder.iterdir())
        (folder / "rubbish").write_text("x")
        return {"a": torch.arange(3)}, {"source": "here"}

    for _ in range(2):
        tensors, notes = fetched("thing", tmp_path, fetch)
        assert tensors["a"].tolist() == [0, 1, 2]
        assert notes["source"] == "here"
    assert len(calls) == 1
    assert not calls[0].exists()


def test_failed_fetch_leaves_nothing_and_says_what_to_do(tmp_path: Path):
    def fetch(folder: Path):
        (folder / "half").write_bytes(bytes(100))
        raise FetchError("home: closed")

    with pytest.raises(UserError, match=r"home: closed.*--data digits.*TOKENMIX_DATA"):
        fetched("thing", tmp_path, fetch)
    assert [p.name for p in tmp_path.iterdir()] == ["thing.lock"]


@pytest.mark.parametrize("root", ["/proc/nowhere", __file__])
def test_cache_that_cannot_be_written(root: str):
    with pytest.raises(UserError, match=r"cannot keep thing.*TOKENMIX_DATA"):
        fetched("thing", root, lambda folder: ({"a": torch.ones(1)}, {}))


def test_full_disk(tmp_path: Path):
    def fetch(folder: Path):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match=r"No space left.*free space"):
        fetched("thing", tmp_path, fetch)
    assert [p.name for p in tmp_path.iterdir()] == ["thing.lock"]


def test_damaged_cache_is_fetched_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored_path("thing", tmp_path).write_bytes(b"cut off")
    tensors, _ = fetched("thing", tmp_path, lambda folder: ({"a": torch.ones(1)}, {}))
    assert tensors["a"].tolist() == [1]
    assert "damaged" in capsys.readouterr().err
    assert fetched("thing", tmp_path, lambda folder: pytest.fail("not kept"))[0]["a"].tolist() == [1]


@pytest.mark.parametrize("content", ["of another set", "of nobody", "with another note", "a pipe"])
def test_a_whole_file_of_other_content_is_fetched_again(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
):
    path = stored_path("thing", tmp_path)
    for name in ("thing", "other"):
        fetched(name, tmp_path, lambda folder: ({"a": torch.ones(1)}, {"source": "here"}))
    if content == "of another set":
        shutil.copy(stored_path("other", tmp_path), path)
    elif content == "of nobody":
        save_file({"x": torch.zeros(3)}, path)
    elif content == "with another note":
        with safe_open(path, "pt") as file:
            notes = file.metadata()
        save_file({"a": torch.ones(1)}, path, {**notes, "source": "there"})
    else:
        path.unlink()
        os.mkfifo(path)
    if content == "a pipe":
        with pytest.raises(UserError, match="a pipe or a device"):
            fetched("thing", tmp_path, lambda folder: ({"a": torch.ones(1)}, {"source": "here"}))
        return
    capsys.readouterr()
    for _ in range(2):
        tensors, notes = fetched("thing", tmp_path, lambda folder: ({"a": torch.ones(1)}, {"source": "here"}))
        assert (tensors["a"].tolist(), notes) == ([1.0], {"source": "here"})
    assert capsys.readouterr().err.count("it is fetched again") == 1


def _slow_fetch(root: Path, log: Path) -> None:
    def fetch(folder: Path):
        with log.open("a") as file:
            file.write("fetched\n")
        time.sleep(0.2)
        return {"a": torch.ones(1)}, {}

    fetched("thing", root, fetch)


def test_concurrent_runs_fetch_once(tmp_path: Path):
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=_slow_fetch, args=(tmp_path / "cache", log)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0, 0]
    assert log.read_text() == "fetched\n"


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path):
    """Opened as a file usually is, it would empty what it points to."""
    (tmp_path / "letters").write_text("kept")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thing.lock").symlink_to(tmp_path / "letters")
    with pytest.raises(UserError, match=r"cannot keep thing.*symbolic links"):
        fetched("thing", tmp_path / "cache", lambda _: ({"a": torch.ones(1)}, {}))
    assert (tmp_path / "letters").read_text() == "kept"


FILES = [name for name, _ in FashionMNIST.resources]


@pytest.fixture
def tiny_fashion(home: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The publisher's four files, tiny."""
    content = hashlib.sha256()
    for name in FILES:
        count = 20 if name.startswith("train") else 10
        tensor = torch.arange(count) % 10 if "labels" in name else torch.randint(0, 256, (count, 28, 28))
        content.update(idx(tensor.byte()))
        (home[0] / name).write_bytes(gzip.compress(idx(tensor.byte())))
    monkeypatch.setattr(sets, "CONTENT", content.hexdigest())
    monkeypatch.setattr(sets, "HOME", home[1])
    return home[0]


def test_fashion_mnist_from_its_home(tiny_fashion: Path, tmp_path: Path):
    data = load_images("fashion-mnist", root=tmp_path / "cache")
    assert (len(data.train), len(data.test), data.img_size, data.channels) == (20, 10, (28, 28), 1)
    assert "publisher's files" in data.source
    assert data.flip
    shutil.rmtree(tiny_fashion)
    assert len(load_images("fashion-mnist", root=tmp_path / "cache", img_size=32).train) == 20


def forged(file: Path) -> None:
    """Put labels of the right form, and other numbers, into the file."""
    count = 20 if file.name.startswith("train") else 10
    file.write_bytes(gzip.compress(idx(torch.zeros(count).byte())))


def test_a_forged_source_is_refused_and_the_next_one_serves(
    tiny_fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    packed = tmp_path / "root" / "usr" / "share" / "datasets" / "fashion-mnist"
    packed.mkdir(parents=True)
    for name in FILES:
        # As Debian does: the same content, packed in another way.
        (packed / name).write_bytes(gzip.compress(gzip.decompress((tiny_fashion / name).read_bytes()), 1, mtime=0))
    forged(tiny_fashion / FILES[3])
    monkeypatch.setattr(sets, "apt_package", lambda package, folder: (tmp_path / "root", "1.0"))
    assert "Debian package dataset-fashion-mnist 1.0" in load_images("fashion-mnist", root=tmp_path / "cache").source
    assert "has sha256" in capsys.readouterr().err


@pytest.mark.parametrize(("damage", "reason"), [("forged", "sha256"), ("no archive", "cannot be read")])
def test_fashion_mnist_from_nowhere(
    tiny_fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, reason: str
):
    if damage == "forged":
        forged(tiny_fashion / FILES[1])
    else:
        (tiny_fashion / FILES[0]).write_bytes(b"other")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=rf"{reason}.*Debian package.*apt-get is not.*--data digits") as caught:
        load_images("fashion-mnist", root=tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_what_is_fetched_is_asked_for_by_https_first():
    assert sets.HOME.startswith("https://")
