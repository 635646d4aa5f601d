"""A Hugging Face hub on the loopback: repositories of models in memory, as far as huggingface_hub asks for them."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"


class FakeHub(BaseHTTPRequestHandler):
    """Small files only: all of them go with the commit."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, dict[str, bytes]]

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, json.dumps({"error": code}).encode(), X_Error_Code=code, X_Error_Message=code)

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "/api/validate-yaml":
            return self.answer_json({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "Unauthorized")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            known = name in self.repositories
            self.repositories.setdefault(name, {})
            return self.answer_json({"url": f"{self.home()}/{name}"}, 409 if known else 200)
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if found is None or found[1] not in self.repositories:
            return self.refuse(404, "RepoNotFound")
        if found[2] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self.answer_json(
                {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}
            )
        for line in body.decode().splitlines():
            row = json.loads(line)
            if row["key"] == "file":
                self.repositories[found[1]][row["value"]["path"]] = base64.b64decode(row["value"]["content"])
        return self.answer_json(
            {
                "success": True,
                "commitOid": self.commit(found[1]),
                "commitUrl": f"{self.home()}/{found[1]}/commit/0",
                "pullRequestUrl": None,
            }
        )

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        asked = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/\w+)?", path)
        listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+/?(.*)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path)
        name = next((m[1] for m in (asked, listed, file) if m), "")
        if name not in self.repositories:
            return self.refuse(404, "RepoNotFound")
        files = self.repositories[name]
        if file is not None:
            if file[2] not in files:
                return self.refuse(404, "EntryNotFound")
            data = files[file[2]]
            return self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=self.commit(name))
        if listed is not None:
            return self.answer_json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in files.items()
                ]
            )
        return self.answer_json(
            {
                "id": name,
                "modelId": name,
                "sha": self.commit(name),
                "private": False,
                "tags": [],
                "downloads": 0,
                "siblings": [{"rfilename": p} for p in files],
            }
        )

    do_HEAD = do_GET

    def home(self) -> str:
        return f"http://{self.headers['Host']}"

    def commit(self, name: str) -> str:
        return hashlib.sha1(repr(sorted(self.repositories[name].items())).encode()).hexdigest()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def fake_hub() -> Iterator[tuple[str, dict[str, dict[str, bytes]]]]:
    """The address of a hub, and its repositories: the files of each by name."""
    repositories: dict[str, dict[str, bytes]] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (FakeHub,), {"repositories": repositories}))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", repositories
    finally:
        server.shutdown()
        server.server_close()
