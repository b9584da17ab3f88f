"""A Hub on the loopback interface: as much of it as pushing a model and loading it again need, and its failures."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import RLock, Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_madeUpForThisTest"
Files = dict[str, bytes]


class Fault(NamedTuple):
    """What a request meets in place of its answer: an error, or a cut connection, before it is done or after."""

    status: int = 0
    text: str = ""
    headers: dict[str, str] = {}  # noqa: RUF012, never changed
    is_done: bool = False


class Hub(ThreadingHTTPServer):
    """Files by repository, branch and path; requests by method and path, with the token each of them carried.

    Tests may set `fault`, called with the number, method and path of each request, and `taken`, names of datasets.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, Files]] = {}
        self.commits: dict[tuple[str, str], list[str]] = {}
        self.starts: dict[tuple[str, str], str] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.unknown: list[str] = []
        self.lock = RLock()
        self.fault: Callable[[int, str, str], Fault | None] = (
            lambda number, method, path: None
        )
        self.taken: set[str] = set()
        self.created: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def head(self, repository: str, branch: str) -> str:
        """Of as many digits as those of a commit have; another one after each commit."""
        n_commits = len(self.commits.get((repository, branch), []))
        if n_commits == 0 and (repository, branch) in self.starts:
            return self.starts[repository, branch]
        return sha1(f"{repository} {branch} {n_commits}".encode()).hexdigest()

    def commit(
        self,
        repository: str,
        branch: str,
        files: Files,
        message: str = "by somebody else",
    ) -> None:
        """Replace a branch's files, in one commit."""
        with self.lock:
            self.files[repository][branch] = files
            self.commits.setdefault((repository, branch), []).append(message)

    def handle_error(self, *_: Any) -> None:
        """A client that is killed goes without a word."""


def entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": path}


class RefusedError(Exception):
    """An error to answer with."""

    def __init__(self, status: int, code: str, text: str = "") -> None:
        self.fault = Fault(status, text, {"X-Error-Code": code} if code else {})


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in two packets takes 40 ms

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        body = self._body()
        authorization = self.headers.get("Authorization", "")
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append((self.command, path, authorization))
        fault = self.server.fault(number, self.command, path)
        if fault is not None and not fault.is_done:
            return self._fail(fault)
        self.is_cut = fault is not None
        try:
            with self.server.lock:
                self._answer_to(
                    path,
                    [unquote(part) for part in url.path.split("/")],
                    url.query,
                    body,
                )
        except RefusedError as error:
            self._fail(error.fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815, the base class's names

    def _answer_to(self, path: str, parts: list[str], query: str, body: bytes) -> None:
        hub = self.server
        if path == "/api/whoami-v2":
            return self._answer({"name": "me", "type": "user", "orgs": []})
        if path == "/api/validate-yaml":
            if b"refused: true" in body:
                raise RefusedError(
                    400,
                    "",
                    json.dumps({"errors": [{"message": "refused is not allowed"}]}),
                )
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repository = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if repository in hub.files or repository in hub.taken:
                there = {
                    "error": "You already created this repo",
                    "url": f"{hub.address}/{repository}",
                }
                raise RefusedError(409, "", json.dumps(there))
            hub.created.append(wanted)
            hub.files[repository] = {"main": {".gitattributes": b""}}
            return self._answer(
                {"url": f"{hub.address}/{repository}", "name": repository}
            )
        parts = (
            parts[3:]
            if path.startswith(("/api/models/", "/api/datasets/"))
            else parts[1:]
        )
        parts = parts[1:] if parts[0] == "datasets" else parts
        repository, name = "/".join(parts[:2]), "/".join(parts[4:])
        action, revision, *_ = [*parts[2:4], "", ""]
        if repository not in hub.files:
            raise RefusedError(
                404, "RepoNotFound", json.dumps({"error": "Repository not found"})
            )
        if action == "refs":
            heads = [
                {"name": each, "ref": f"refs/heads/{each}", "targetCommit": ""}
                for each in hub.files[repository]
            ]
            return self._answer({"branches": heads, "converts": [], "tags": []})
        if action == "branch":
            return self._branch(repository, revision, body)
        branch = self._named(repository, revision or "main")
        files = hub.files[repository][branch]
        if action == "resolve":
            self._file(repository, branch, name)
        elif action == "tree":
            own = {
                n: c for n, c in files.items() if not name or n.startswith(f"{name}/")
            }
            if name and not own:
                raise RefusedError(404, "EntryNotFound")
            self._answer([entry(each, content) for each, content in own.items()])
        elif action == "paths-info":
            wanted = parse_qs(body.decode())["paths"]
            self._answer(
                [
                    entry(each, content)
                    for each, content in files.items()
                    if each in wanted
                ]
            )
        elif action in ("", "revision"):
            names = [{"rfilename": name} for name in files]
            head = hub.head(repository, branch)
            self._answer(
                {
                    "id": repository,
                    "sha": head,
                    "siblings": names,
                    "tags": [],
                    "private": False,
                }
            )
        elif action == "preupload":
            self._answer(
                {
                    "files": [
                        self._mode(files, entry["path"])
                        for entry in json.loads(body)["files"]
                    ]
                }
            )
        elif action == "commit":
            self._commit(repository, branch, body, "create_pr=1" in query)
        else:
            hub.unknown.append(f"{self.command} {path}")
            raise RefusedError(404, "")

    def _branch(self, repository: str, branch: str, body: bytes) -> None:
        branches = self.server.files[repository]
        if self.command == "DELETE":
            del branches[branch]
            self.server.commits.pop((repository, branch), None)
        else:
            if branch in branches:
                raise RefusedError(
                    409, "", json.dumps({"error": "Reference already exists"})
                )
            start = self._named(
                repository, json.loads(body or b"{}").get("startingPoint") or "main"
            )
            branches[branch] = dict(branches[start])
            self.server.starts[repository, branch] = self.server.head(repository, start)
        self._answer({})

    def _named(self, repository: str, revision: str) -> str:
        """The branch of that name, or whose newest commit it is."""
        for branch in self.server.files[repository]:
            if revision in (branch, self.server.head(repository, branch)):
                return branch
        raise RefusedError(404, "RevisionNotFound")

    def _mode(self, files: Files, path: str) -> dict[str, Any]:
        found = {"path": path, "uploadMode": "regular", "shouldIgnore": False}
        if path in files:
            found["oid"] = sha1(
                b"blob %d\0" % len(files[path]) + files[path]
            ).hexdigest()
        return found

    def _commit(self, repository: str, branch: str, body: bytes, is_pr: bool) -> None:
        hub = self.server
        header, *entries = (json.loads(line) for line in body.splitlines())
        parent = header["value"].get("parentCommit")
        if parent not in (None, hub.head(repository, branch)):
            raise RefusedError(
                412,
                "",
                json.dumps(
                    {
                        "error": "A commit has happened since. Please refresh and try again."
                    }
                ),
            )
        files = dict(hub.files[repository][branch])
        for entry in entries:
            path = entry["value"]["path"]
            if entry["key"] == "file":
                files[path] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "deletedFolder":
                files = {n: c for n, c in files.items() if not n.startswith(path)}
            elif path in files:
                del files[path]
            else:
                raise RefusedError(
                    404, "EntryNotFound", json.dumps({"error": f"{path} doesn't exist"})
                )
        pr = None
        if is_pr:
            number = 1 + sum(
                name.startswith("refs/pr/") for name in hub.files[repository]
            )
            pr, branch = (
                f"{hub.address}/{repository}/discussions/{number}",
                f"refs/pr/{number}",
            )
        hub.commit(repository, branch, files, header["value"]["summary"])
        oid = hub.head(repository, branch)
        url = f"{hub.address}/{repository}/commit/{oid}"
        self._answer({"commitUrl": url, "commitOid": oid, "pullRequestUrl": pr})

    def _file(self, repository: str, branch: str, name: str) -> None:
        content = self.server.files[repository][branch].get(name)
        headers = {"X-Repo-Commit": self.server.head(repository, branch)}
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", **headers})
        else:
            self._send(
                200, content, {"ETag": f'"{sha1(content).hexdigest()}"', **headers}
            )

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().strip(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _fail(self, fault: Fault) -> None:
        self.is_cut = fault.status == 0
        kind = "application/json" if fault.text.startswith("{") else "text/plain"
        self._send(
            fault.status, fault.text.encode(), {"Content-Type": kind, **fault.headers}
        )

    def _answer(self, content: Any) -> None:
        self._send(
            200, json.dumps(content).encode(), {"Content-Type": "application/json"}
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        if self.is_cut:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
