"""Repositories of the small Hub: commits of complete trees, in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Blob:
    """A file in a commit."""

    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class Commit:
    sha: str
    parent: str | None
    title: str
    files: dict[str, Blob]


@dataclass
class Repo:
    """A repository: commits by id, and branches and tags that refer to them."""

    repo_id: str
    repo_type: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pull_requests: list[dict[str, Any]] = field(default_factory=list)

    def propose(self, number: int, files: dict[str, Blob], *, author: str, title: str, status: str = "open") -> str:
        """A pull request that adds files to the main branch; returns its revision."""
        revision = f"refs/pr/{number}"
        self.branches[revision] = self.branches["main"]
        self.commit(revision, title, {**self.commits[self.branches["main"]].files, **files})
        self.pull_requests.append({"num": number, "author": {"name": author}, "title": title, "status": status})
        return revision

    def commit(self, branch: str, title: str, files: dict[str, Blob]) -> Commit:
        parent = self.branches.get(branch)
        listing = "".join(f"{path} {blob.oid}\n" for path, blob in sorted(files.items()))
        sha = hashlib.sha1(f"{self.repo_type}/{self.repo_id}\n{parent}\n{title}\n{listing}".encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, title, files)
        self.branches[branch] = sha
        return self.commits[sha]

    def at(self, revision: str) -> Commit | None:
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        return self.commits.get(sha)

    @property
    def files(self) -> dict[str, bytes]:
        """Files on the main branch."""
        return {path: blob.data for path, blob in self.commits[self.branches["main"]].files.items()}
