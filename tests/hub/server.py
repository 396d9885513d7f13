"""A small Hub for tests: repositories in memory, the requests of its client, and planted faults."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_ROUTES: list[tuple[re.Pattern[str], Callable[..., None]]] = []


class HubError(Exception):
    """An error response."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def route(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def keep(method: Callable[..., None]) -> Callable[..., None]:
        _ROUTES.append((re.compile(pattern), method))
        return method

    return keep


def oid_of(data: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Commit:
    sha: str
    title: str
    files: dict[str, bytes]


@dataclass
class Repo:
    """A repository: commits by id, and branches that refer to them."""

    repo_id: str
    repo_type: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    pull_requests: list[dict[str, Any]] = field(default_factory=list)

    def propose(self, number: int, files: dict[str, bytes], *, author: str, title: str, status: str = "open") -> str:
        """A pull request that adds files to the main branch; returns its revision."""
        revision = f"refs/pr/{number}"
        self.branches[revision] = self.branches["main"]
        self.commit(revision, title, {**self.commits[self.branches["main"]].files, **files})
        self.pull_requests.append({"num": number, "author": {"name": author}, "title": title, "status": status})
        return revision

    def commit(self, branch: str, title: str, files: dict[str, bytes]) -> Commit:
        sha = hashlib.sha1(f"{self.repo_type}/{self.repo_id}, commit {len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = Commit(sha, title, files)
        self.branches[branch] = sha
        return self.commits[sha]

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.branches.get(revision) or revision)

    @property
    def files(self) -> dict[str, bytes]:
        """Files on the main branch."""
        return self.commits[self.branches["main"]].files


WRITE = "hf_" + "Wt7" * 11 + "W"
"""A token with write permission. Concatenated, so that a search for tokens in the source finds none."""
READ = "hf_" + "Rd5" * 11 + "R"
"""A token with read permission only."""
WRONG = "hf_" + "Xx3" * 11 + "X"
"""An invalid token."""

USER = "tester"
DATE = "2026-01-01T00:00:00.000Z"
_TYPES = {"models": "model", "datasets": "dataset", "spaces": "space"}


class HubServer:
    """Runs during the `with` block; `url` is its address."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens = {WRITE: "write", READ: "read"}
        self.faults: list[tuple[str, int | str]] = []
        self.requests: list[tuple[str, str, int | str]] = []
        self.lock = threading.RLock()

    def __enter__(self) -> HubServer:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def fail(self, pattern: str, action: int | str) -> None:
        """Requests `METHOD /path` that match get a status, or `"cut"`: the connection is closed."""
        self.faults.append((pattern, action))

    def add(self, repo_id: str, files: dict[str, bytes], repo_type: str = "model") -> Repo:
        """Create a public repository with files, as another user would."""
        repo = self.repos[repo_type, repo_id] = Repo(repo_id, repo_type, private=False)
        repo.commit("main", "Add files", files)
        return repo

    def repo(self, repo_id: str, repo_type: str = "model") -> Repo:
        return self.repos[repo_type, repo_id]


_ID = r"(?P<repo_id>[\w.-]+(?:/[\w.-]+)?)"
_API = rf"/api/(?P<kind>models|datasets|spaces)/{_ID}"


class _Handler(BaseHTTPRequestHandler):
    """Finds the method for a request, applies planted faults, and sends the response."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the client's acknowledgement

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        address = urlsplit(self.path)
        self.query = parse_qs(address.query)
        request = f"{self.command} {address.path}"
        fault = next((action for pattern, action in self.hub.faults if re.search(pattern, request)), None)
        if fault == "cut":
            self.hub.requests.append((self.command, address.path, "cut"))
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if isinstance(fault, int):
            self._send(fault, {"error": "planted"}, {"Retry-After": "0"} if fault == 429 else {})
            return
        try:
            with self.hub.lock:
                for pattern, method in _ROUTES:
                    if found := pattern.fullmatch(request):
                        method(self, **{key: unquote(value or "") for key, value in found.groupdict().items()})
                        return
            raise HubError(404, f"no route for {request}", "EntryNotFound")
        except HubError as error:
            extra = {"X-Error-Message": error.message} | ({"X-Error-Code": error.code} if error.code else {})
            self._send(error.status, {"error": error.message}, extra)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._handle
        raise AttributeError(name)

    def _send(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        kind = "application/octet-stream" if isinstance(value, bytes) else "application/json"
        self.hub.requests.append((self.command, urlsplit(self.path).path, status))
        self.send_response(status)
        for name, text in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # Permissions

    def _role(self) -> str | None:
        """`write`, `read`, or None without a token."""
        given = self.headers.get("Authorization")
        if not given:
            return None
        role = self.hub.tokens.get(given.removeprefix("Bearer "))
        if role is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return role

    def _readable(self, repo_type: str, repo_id: str) -> Repo:
        role = self._role()
        repo = self.hub.repos.get((repo_type, repo_id))
        if repo is None or (repo.private and role is None):
            raise HubError(404 if role else 401, "Repository not found", "RepoNotFound")
        return repo

    def _may_write(self, namespace: str) -> None:
        if self._role() != "write" or namespace != USER:
            status = 403 if self._role() else 401
            raise HubError(status, f"You don't have the rights to create a model under the namespace {namespace!r}")

    def _writable(self, kind: str, repo_id: str) -> Repo:
        self._may_write(repo_id.split("/")[0])
        return self._readable(_TYPES[kind], repo_id)

    @staticmethod
    def _commit_at(repo: Repo, revision: str) -> Commit:
        commit = repo.at(revision)
        if commit is None:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Accounts and repositories

    @route("POST /api/repos/create")
    def _create(self) -> None:
        asked = json.loads(self.body)
        namespace, repo_type = asked.get("organization") or USER, asked.get("type") or "model"
        repo_id = f"{namespace}/{asked['name']}"
        self._may_write(namespace)
        prefix = {"model": "", "dataset": "datasets/", "space": "spaces/"}[repo_type]
        answer = {"url": f"{self.hub.url}/{prefix}{repo_id}", "name": repo_id}
        if (repo_type, repo_id) in self.hub.repos:
            self._send(409, {"error": "You already created this repo", **answer})
            return
        repo = self.hub.repos[repo_type, repo_id] = Repo(repo_id, repo_type, asked.get("visibility") == "private")
        repo.commit("main", "initial commit", {".gitattributes": b""})
        self._send(200, answer)

    @route("POST /api/validate-yaml")
    def _validate(self) -> None:
        self._send(200, {"errors": [], "warnings": []})

    @route(rf"GET {_API}(?:/revision/(?P<revision>[^/]+))?")
    def _info(self, kind: str, repo_id: str, revision: str) -> None:
        repo = self._readable(_TYPES[kind], repo_id)
        commit = self._commit_at(repo, revision or "main")
        files = [{"rfilename": path} for path in sorted(commit.files)]
        more = {"private": repo.private, "siblings": files, "tags": [], "lastModified": DATE}
        self._send(200, {"id": repo_id, "sha": commit.sha, **more})

    @route(rf"GET {_API}/discussions")
    def _discussions(self, kind: str, repo_id: str) -> None:
        repo = self._readable(_TYPES[kind], repo_id)
        asked = {key: values[0] for key, values in self.query.items()}
        more = {"repo": {"name": repo_id, "type": repo.repo_type}, "createdAt": DATE, "isPullRequest": True}
        found = [
            {**pull_request, **more}
            for pull_request in repo.pull_requests
            if asked.get("author") in (None, pull_request["author"]["name"])
            and asked.get("status") in (None, pull_request["status"])
        ]
        self._send(200, {"count": len(found), "start": 0, "discussions": found})

    @route(rf"POST {_API}/branch/(?P<name>[^/]+)")
    def _branch(self, kind: str, repo_id: str, name: str) -> None:
        repo, asked = self._writable(kind, repo_id), json.loads(self.body or b"{}")
        repo.branches[name] = self._commit_at(repo, asked.get("startingPoint") or "main").sha
        self._send(200, {})

    @route(rf"GET {_API}/tree/(?P<revision>[^/]+)/?(?P<under>.*)")
    def _tree(self, kind: str, repo_id: str, revision: str, under: str) -> None:
        files = self._commit_at(self._readable(_TYPES[kind], repo_id), revision).files
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": oid_of(data)}
            for path, data in sorted(files.items())
            if path.startswith(under)
        ]
        self._send(200, entries)

    @route(rf"POST {_API}/preupload/(?P<revision>[^/]+)")
    def _preupload(self, kind: str, repo_id: str, revision: str) -> None:
        """All files, large ones too, are part of the commit; those that are there already are left out by the client."""
        files = self._commit_at(self._writable(kind, repo_id), revision).files
        answer = []
        for path in [asked["path"] for asked in json.loads(self.body)["files"]]:
            oid = oid_of(files[path]) if path in files else None
            answer.append({"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": oid})
        self._send(200, {"files": answer})

    @route(rf"POST {_API}/commit/(?P<revision>[^/]+)")
    def _commit(self, kind: str, repo_id: str, revision: str) -> None:
        repo = self._writable(kind, repo_id)
        if revision not in repo.branches:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        files, title = dict(repo.commits[repo.branches[revision]].files), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                title = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                files.pop(value["path"])
            elif key == "deletedFolder":
                files = {path: data for path, data in files.items() if not path.startswith(value["path"])}
        commit = repo.commit(revision, title, files)
        self._send(200, {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{commit.sha}", "commitOid": commit.sha})

    # Reading

    @route(rf"(?:GET|HEAD) /(?P<kind>datasets/|spaces/)?{_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    def _resolve(self, kind: str, repo_id: str, revision: str, path: str) -> None:
        commit = self._commit_at(self._readable(_TYPES[kind.rstrip("/") or "models"], repo_id), revision)
        headers = {"X-Repo-Commit": commit.sha}
        data = commit.files.get(path)
        if data is None:
            extra = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", **headers}
            self._send(404, {"error": "Entry not found"}, extra)
        else:
            self._send(200, data, headers | {"ETag": f'"{oid_of(data)}"'})
