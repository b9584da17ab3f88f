"""A Hub on the loopback interface: as much of it as pushing a model and loading it again need."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

NOT_A_COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Files by repository; requests by method and path, with the token each of them carried."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.unknown: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self._body()
        path = self._remember()
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            self.server.files.setdefault(f"me/{name}", {})
            self._answer({"url": f"{self.server.address}/me/{name}", "name": f"me/{name}"})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            wanted = [entry["path"] for entry in json.loads(body)["files"]]
            self._answer(
                {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in wanted]}
            )
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").split("/commit/")[0], body)
        else:
            self._unknown(path)

    def do_GET(self) -> None:
        path = self._remember()
        if "/resolve/" in path:
            repository, _, rest = path.removeprefix("/").partition("/resolve/")
            self._file(repository, rest.partition("/")[2])
        elif "/tree/" in path:
            repository = "/".join(path.split("/")[3:5])
            entries = self.server.files.get(repository, {}).items()
            self._answer([{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in entries])
        elif path.startswith("/api/models/"):
            repository = "/".join(path.split("/")[3:5])
            names = [{"rfilename": name} for name in self.server.files.get(repository, {})]
            self._answer(
                {"id": repository, "sha": NOT_A_COMMIT, "siblings": names, "tags": [], "private": False}
            )
        elif path == "/api/whoami-v2":
            self._answer({"name": "me", "type": "user", "orgs": []})
        else:
            self._unknown(path)

    do_HEAD = do_GET  # noqa: N815, the base class's name

    def _remember(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Authorization", "")))
        return path

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().strip(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _commit(self, repository: str, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.server.files[repository][entry["value"]["path"]] = content
            elif entry["key"] == "deletedFile":
                del self.server.files[repository][entry["value"]["path"]]
        url = f"{self.server.address}/{repository}/commit/{NOT_A_COMMIT}"
        self._answer({"commitUrl": url, "commitOid": NOT_A_COMMIT, "pullRequestUrl": None})

    def _file(self, repository: str, name: str) -> None:
        content = self.server.files.get(repository, {}).get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": NOT_A_COMMIT})
            return
        headers = {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": NOT_A_COMMIT}
        self._send(200, content, headers)

    def _unknown(self, path: str) -> None:
        self.server.unknown.append(f"{self.command} {path}")
        self._send(404, b"{}", {})

    def _answer(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
