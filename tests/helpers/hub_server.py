"""A Hub on the loopback interface: as much of it as pushing a model to a branch and loading it again need."""

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


class Hub(ThreadingHTTPServer):
    """Files by repository, branch and path; requests by method and path, with the token each of them carried."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, dict[str, bytes]]] = {}
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
            self.server.files.setdefault(f"me/{name}", {"main": {}})
            self._answer({"url": f"{self.server.address}/me/{name}", "name": f"me/{name}"})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif path.startswith("/api/models/"):
            repository, action, branch = _parts(path.removeprefix("/api/models/"))
            if action == "branch":
                branches = self.server.files[repository]
                branches[branch] = dict(branches["main"])
                self._answer({})
            elif self._branch(repository, branch) is None:
                self._no_such_branch()
            elif action == "preupload":
                wanted = [entry["path"] for entry in json.loads(body)["files"]]
                self._answer(
                    {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in wanted]}
                )
            elif action == "commit":
                self._commit(repository, branch, body)
            else:
                self._unknown(path)
        else:
            self._unknown(path)

    def do_GET(self) -> None:
        path = self._remember()
        if path == "/api/whoami-v2":
            self._answer({"name": "me", "type": "user", "orgs": []})
            return
        repository, action, rest = _parts(path.removeprefix("/api/models/").removeprefix("/"))
        revision, _, name = rest.partition("/")
        branch = self._branch(repository, revision or "main")
        if branch is None:
            self._no_such_branch()
        elif action == "resolve":
            self._file(repository, branch, name)
        elif action == "tree":
            entries = self.server.files[repository][branch].items()
            self._answer([{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in entries])
        elif action in ("", "revision"):
            names = [{"rfilename": name} for name in self.server.files[repository][branch]]
            commit = _commit_of(repository, branch)
            self._answer({"id": repository, "sha": commit, "siblings": names, "tags": [], "private": False})
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

    def _branch(self, repository: str, revision: str) -> str | None:
        """The branch of that name, or whose newest commit it is."""
        branches = self.server.files.get(repository, {})
        found = (name for name in branches if revision in (name, _commit_of(repository, name)))
        return next(found, None)

    def _commit(self, repository: str, branch: str, body: bytes) -> None:
        files = self.server.files[repository][branch]
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFile":
                del files[entry["value"]["path"]]
        commit = _commit_of(repository, branch)
        url = f"{self.server.address}/{repository}/commit/{commit}"
        self._answer({"commitUrl": url, "commitOid": commit, "pullRequestUrl": None})

    def _file(self, repository: str, branch: str, name: str) -> None:
        content = self.server.files[repository][branch].get(name)
        commit = _commit_of(repository, branch)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
        self._send(200, content, headers)

    def _no_such_branch(self) -> None:
        self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})

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


def _parts(path: str) -> tuple[str, str, str]:
    """Of "me/plain/tree/main": the repository, the action, and the rest."""
    owner, name, action, rest = [*path.split("/", 3), "", "", ""][:4]
    return f"{owner}/{name}", action, rest


def _commit_of(repository: str, branch: str) -> str:
    """As many digits as those of a commit have; each branch has only its newest."""
    return sha1(f"{repository} {branch}".encode()).hexdigest()


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
