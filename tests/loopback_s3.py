"""An S3 server on the loopback (moto), and in front of it a proxy that answers some requests wrongly."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "date", "server")

INTERNAL_ERROR = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on. `faults` maps the end of a path to what the next GETs of it meet: "500", "cut", or both."""

    protocol_version = "HTTP/1.1"
    server: Any

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data = answer.read()
        fault = self.server.next_fault(self.path) if self.command == "GET" else None
        self.server.seen.append((self.command, self.path.partition("?")[0], fault))
        if fault == "500":
            return self.answer(500, INTERNAL_ERROR, {"Content-Type": "application/xml"})
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
        if self.command == "HEAD":
            headers["Content-Length"] = answer.getheader("Content-Length", "0")
        return self.answer(answer.status, data, headers, cut=fault == "cut")

    def answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

    def log_message(self, *args: Any) -> None:
        pass


class LoopbackS3(ThreadingHTTPServer):
    """The proxy.

    Attributes:
        faults: what the next GETs of a path with this end meet, once each; for ever if it is a string.
        seen: method, path and fault of each request.
    """

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), Proxy)
        self.upstream, self.lock = upstream, threading.Lock()
        self.faults: dict[str, list[str] | str] = {}
        self.seen: list[tuple[str, str, str | None]] = []

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which botocore finds it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "2",
        }

    def next_fault(self, path: str) -> str | None:
        with self.lock:
            for end, faults in self.faults.items():
                if path.partition("?")[0].endswith(end) and faults:
                    return faults if isinstance(faults, str) else faults.pop(0)
        return None

    def gets(self, end: str) -> int:
        """How often a path with this end was read."""
        return sum(method == "GET" and path.endswith(end) for method, path, _ in self.seen)


@contextmanager
def loopback_s3() -> Iterator[LoopbackS3]:
    """The proxy and the server after it."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    proxy = LoopbackS3(moto.get_host_and_port()[1])
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
        moto.stop()
