"""Data at URLs: the samples, order and runs of local files, through a server that cuts connections and answers 500."""

import importlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest
import safetensors.torch
import torch
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from loopback_s3 import LoopbackS3, loopback_s3
from tokenmix.errors import UserError
from tokenmix.lab.data.images import load_images
from tokenmix.lab.data.lookup import local_copies, local_path, origin, short_name, with_absolute_paths
from tokenmix.lab.tasks.text.corpus import load_text
from tokenmix.lab.tasks.text.labelled import load_labelled
from tokenmix.lab.train import trainer
from tokenmix.lab.train.run import evaluate, train
from tokenmix.lab.train.sources import make_config
from verbs import printed, refused

CONFIG = make_config(
    model="vit_nano",
    model_kwargs={"depth": 1, "drop_rate": 0.1},
    epochs=2,
    batch_size=8,
    img_size=16,
    threads=1,
    device="cpu",
    log_every=2,
    checkpoint_every=1,
)
SPEC = "wds:{}/train-{{0..2}}.tar,{}/val-*.tar"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of ten for training and one for testing, in two classes with names."""
    folder = tmp_path_factory.mktemp("shards")
    for shard, name in enumerate(("train-0", "train-1", "train-2", "val-0")):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for n in range(10):
                file = io.BytesIO()
                Image.effect_noise((30 + n, 40), 20 + 100 * (n % 2)).convert("RGB").save(file, "png")
                for ending, data in (("png", file.getvalue()), ("cls", str(n % 2).encode())):
                    info = tarfile.TarInfo(f"{shard}-{n}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    (folder / "classes.txt").write_text("smooth\nrough\n")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LoopbackS3]:
    """A server that has the folder as s3://bucket/set."""
    with loopback_s3() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        system = fsspec.filesystem("s3")
        system.mkdir("bucket")
        system.put(str(folder), "bucket/set", recursive=True)
        yield server
        type(system).clear_instance_cache()


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: LoopbackS3) -> None:
    monkeypatch.setenv("TOKENMIX_DATA", str(tmp_path / "cache"))
    server.faults.clear()
    server.seen.clear()


def spec(place: Any) -> str:
    return SPEC.format(place, place)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "checkpoints" / "last" / "model.safetensors")


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_run_on_urls_through_faults_is_that_on_files(
    folder: Path, server: LoopbackS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A 500 and a cut connection on the way, a kill in the second epoch: bit for bit the run on local shards."""
    local = train(CONFIG.replace(data=spec(folder), out=tmp_path / "local"), quiet=True)
    server.faults |= {"train-1.tar": ["500", "cut"], "val-0.tar": ["cut"], "classes.txt": ["500"]}
    before, calls = trainer.TrainingLoop.start_batch, [0]

    def killed(self: Any, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise Killed
        before(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.TrainingLoop, "start_batch", killed)
        with pytest.raises(Killed):
            train(CONFIG.replace(data=spec("s3://bucket/set"), out=tmp_path / "run"), quiet=True)
    assert not any(map(len, server.faults.values())), "a fault was not met"
    read = server.gets(".tar")
    with pytest.raises(UserError, match="a file names a place on the network"):
        train(make_config(resume=tmp_path / "run"), quiet=True)
    run = train(make_config(resume=tmp_path / "run", data=spec("s3://bucket/set")), quiet=True)
    assert server.gets(".tar") == read, "shards were fetched again"
    assert all(torch.equal(value, weights(run)[key]) for key, value in weights(local).items())
    description = json.loads((run / "data.json").read_text())
    assert description["classes"] == ["smooth", "rough"]
    assert description["source"] == "wds: 4 shards in s3://bucket/set, read where they lie"
    assert evaluate(run, spec("s3://bucket/set"))["accuracy"] == evaluate(local)["accuracy"]


def test_a_cut_body_is_continued_and_not_begun_again(server: LoopbackS3, folder: Path, tmp_path: Path):
    server.faults["train-0.tar"] = ["cut", "cut"]
    (copy,) = local_copies(["s3://bucket/set/train-0.tar"], tmp_path)
    assert copy.read_bytes() == (folder / "train-0.tar").read_bytes()
    assert server.gets("train-0.tar") == 3


@pytest.mark.parametrize("fault", ["500", "cut"])
def test_a_fault_that_stays_is_one_line(
    server: LoopbackS3, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    server.faults["train-2.tar"] = fault
    run = tmp_path / "run"
    error = refused_after_log(capsys, "train", "--data", spec("s3://bucket/set"), "--device", "cpu", "--out", str(run))
    assert "s3://bucket/set/train-2.tar cannot be read (" in error
    assert error.endswith("); check address, network and credentials\n")
    assert not run.exists()
    # What came is kept, and no part of what did not.
    kept = {path.name for path in (tmp_path / "cache").rglob("*.tar")}
    assert "train-2.tar" not in kept
    assert "train-0.tar" in kept


def refused_after_log(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    from tokenmix.lab.cli import main

    assert main(words) == 2
    log, error = capsys.readouterr().err.splitlines(keepends=True)
    assert log.startswith("tokenmix: fetching ")
    return error


def test_mistakes_in_urls(capsys: pytest.CaptureFixture[str]):
    for data, message in (
        ("wds:s3://bucket/set/train-{0..9}.tar", "s3://bucket/set/train-3.tar does not exist; check the address"),
        ("wds:s3://bucket/none-*.tar", "wds:s3://bucket/none-*.tar: no file fits it"),
        ("wds:s3://no-bucket/a.tar", "s3://no-bucket/a.tar does not exist"),
        ("wds:s3://bucket/../a.tar", "'s3://bucket/../a.tar' is not a plain URL"),
        ("wds:nope://bucket/a.tar", "nope://bucket/a.tar: nope:// is not read; give a path, or a URL"),
        ("imagefolder:s3://bucket/set", "s3://bucket/set is a folder; give the URL of a file, shards (wds:)"),
    ):
        assert message in refused(capsys, "train", "--data", data), data


def test_a_file_system_that_is_not_installed_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gs://bucket/a.tar needs gcsfs: pip install 'tokenmix\[streaming\]'"):
        local_copies(["gs://bucket/a.tar"], tmp_path)


def test_a_copy_is_fetched_again_when_the_file_has_changed(server: LoopbackS3):
    system, url = fsspec.filesystem("s3"), "s3://bucket/changing.txt"
    for content, reads in ((b"one", 1), (b"one", 1), (b"two", 2)):
        if content != b"one" or reads == 1:
            system.pipe(url, content)
        assert local_path(url).read_bytes() == content
        assert server.gets("changing.txt") == reads
    local_path(url).unlink()
    assert local_path(url).read_bytes() == b"two"


def test_a_kill_while_fetching_leaves_no_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path):
    class Dying(LocalFileSystem):
        cachable = False

        def get_file(self, path: str, copy: str) -> None:
            Path(copy).write_bytes(b"par")
            raise Killed

    importlib.import_module("datasets")  # Its import would copy what is patched here.
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **options: (Dying(), f"{folder}/train-0.tar"))
    with pytest.raises(Killed):
        local_copies(["s3://bucket/set/train-0.tar"], tmp_path)
    assert not list(tmp_path.rglob("*train-0.tar*"))


class Stores(BaseHTTPRequestHandler):
    """One file, a.txt, on Google Cloud Storage, in a data set of the Hugging Face hub, and on the web."""

    def do_GET(self) -> None:
        path, _, query = unquote(self.path).partition("?")
        listed: dict[str, Any] = {
            "/storage/v1/b/bucket/o/a.txt": {"bucket": "bucket", "name": "a.txt", "size": "4", "generation": "1"},
            "/storage/v1/b/bucket/o": {},
            "/api/datasets/me/set": {"id": "me/set", "sha": "0" * 40, "private": False},
            "/api/datasets/me/set/tree/main": [{"type": "file", "oid": "1", "size": 4, "path": "a.txt"}],
        }
        missing = not path.endswith("/a.txt") and path not in listed
        body = b"text" if path not in listed or "alt=media" in query else json.dumps(listed[path]).encode()
        self.send_response(404 if missing else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("url", ["gs://bucket/a.txt", "hf://datasets/me/set/a.txt", "http://HOST/a.txt"])
def test_other_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str):
    with ThreadingHTTPServer(("127.0.0.1", 0), Stores) as store:
        Thread(target=store.serve_forever).start()
        host = f"127.0.0.1:{store.server_port}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}")
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": f"http://{host}"})
        try:
            (copy,) = local_copies([url.replace("HOST", host)], tmp_path)
            with pytest.raises(UserError, match="does not exist; check the address"):
                local_copies([url.replace("HOST", host).replace("a.txt", "b.txt")], tmp_path)
        finally:
            store.shutdown()
    assert copy.read_bytes() == b"text"
    assert origin(copy, tmp_path) == url.replace("HOST", host)


def test_specifications_with_urls(tmp_path: Path):
    two = "wds:s3://bucket/flowers/a-{0..9}.tar,s3://bucket/flowers/b.tar"
    assert with_absolute_paths(two) == two
    assert short_name(two) == "wds-flowers"
    assert origin(tmp_path / "remote/s3/bucket/set", tmp_path) == "s3://bucket/set"
    assert origin(tmp_path, tmp_path) == str(tmp_path.resolve())


def test_get_fetches_before_a_run(server: LoopbackS3, capsys: pytest.CaptureFixture[str]):
    assert "wds: 4 shards in s3://bucket/set" in printed(capsys, "data", "get", spec("s3://bucket/set"))
    read = server.gets(".tar")
    assert len(load_images(spec("s3://bucket/set"), img_size=8).train) == 30
    assert server.gets(".tar") == read == 4


def test_tables_and_texts_at_urls_are_those_of_files(server: LoopbackS3, tmp_path: Path):
    rows = [{"text": f"word number {n}", "label": "ab"[n % 2]} for n in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fsspec.filesystem("s3").put(str(tmp_path / "a.jsonl"), "bucket/a.jsonl")
    server.faults["a.jsonl"] = ["500", "cut"]
    there, here = load_labelled("jsonl:s3://bucket/a.jsonl"), load_labelled(f"jsonl:{tmp_path}/a.jsonl")
    assert (there.train.texts, there.test.texts) == (here.train.texts, here.test.texts)
    assert there.source == "jsonl: s3://bucket/a.jsonl, a tenth of the rows held out"
    there, here = load_text("text:s3://bucket/a.jsonl"), load_text(f"text:{tmp_path}/a.jsonl")
    assert (list(there.train), there.digest) == (list(here.train), here.digest)


def test_tables_in_a_folder_at_a_url_by_datasets(server: LoopbackS3, tmp_path: Path):
    for part, count in (("train-0", 40), ("train-1", 20), ("test-0", 10)):
        rows = [{"text": f"{part} {n}", "label": "ab"[n % 2]} for n in range(count)]
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fsspec.filesystem("s3").put(str(tmp_path / "set"), "bucket/tables", recursive=True)
    server.faults |= {"train-1.jsonl": ["500", "cut"], "test-0.jsonl": ["cut"]}
    there, here = load_labelled("hf:s3://bucket/tables#text,label"), load_labelled(f"hf:{tmp_path}/set#text,label")
    assert (there.train.texts, there.test.texts) == (here.train.texts, here.test.texts)
    assert torch.equal(there.train.labels, here.train.labels)
    assert not any(map(len, server.faults.values()))


@pytest.mark.slow  # `datasets` asks for two hundred patterns of names.
@pytest.mark.usefixtures("server")
def test_an_empty_folder_at_a_url_by_datasets():
    with pytest.raises(UserError, match=r"hf:s3://bucket/nothing#text cannot be read \(EmptyDatasetError"):
        load_text("hf:s3://bucket/nothing#text")
