"""Records which files this command has written and what they contained before, so that no other file is lost."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from hf_captionrl.io import LineFile, write_json

__all__ = ["KeptFiles", "file_digest"]


class KeptFiles:
    """The record beside the first output.

    `NAME.files.json` has the digest of each file that was written, None while it is being written. A file with another content was
    not written by this command: it is replaced only after its content has been appended to `NAME.old.jsonl`.
    """

    def __init__(self, first: Path) -> None:
        self.folder = first.parent
        self.record = first.with_suffix(".files.json")
        self.old = first.with_suffix(".old.jsonl")
        self._digests: dict[str, str | None] = {}
        if self.record.is_file():
            self._digests = json.loads(self.record.read_text(encoding="utf-8"))

    def is_ours(self, path: Path) -> bool:
        """Whether this command wrote the file as it is."""
        name = self.name_of(path)
        return name in self._digests and self._digests[name] in (None, file_digest(path))

    def foreign(self, paths: Iterable[Path]) -> list[Path]:
        """The files that exist and were not written by this command."""
        return [path for path in paths if path.exists() and not self.is_ours(path)]

    def before_writing(self, paths: Iterable[Path]) -> None:
        """Keep the contents of files that this command did not write, then record that all these files are about to be written."""
        paths = list(paths)
        lines = []
        for path in self.foreign(paths):
            content = path.read_bytes()
            try:
                kept = {"text": content.decode("utf-8")}
            except UnicodeDecodeError:
                kept = {"base64": base64.b64encode(content).decode()}
            lines.append(json.dumps({"file": self.name_of(path), **kept}, ensure_ascii=False) + "\n")
        if lines:
            with LineFile(self.old) as file:
                file.truncate(len(self._old_lines()))  # a full disk may have left an incomplete line
                file.append_bytes("".join(lines).encode("utf-8"))
        self._digests |= {self.name_of(path): None for path in paths}
        write_json(self.record, self._digests)

    def after_writing(self, paths: Iterable[Path]) -> None:
        """Record what was written; a file that was not written is forgotten."""
        for path in paths:
            self._digests.pop(self.name_of(path), None)
            if path.is_file():
                self._digests[self.name_of(path)] = file_digest(path)
        write_json(self.record, self._digests)

    def old_texts(self) -> dict[str, str]:
        """The earliest text of each replaced file, by `name_of`."""
        found: dict[str, str] = {}
        # Only a line feed ends a line: texts may contain other separators.
        for line in self._old_lines().split(b"\n")[:-1]:
            entry = json.loads(line)
            found.setdefault(entry["file"], entry.get("text", ""))
        return found

    def _old_lines(self) -> bytes:
        """The complete lines of the file of old contents."""
        data = self.old.read_bytes() if self.old.is_file() else b""
        return data[: data.rfind(b"\n") + 1]

    def name_of(self, path: Path) -> str:
        """A file's name in the record, relative to the first output."""
        return Path(os.path.relpath(os.path.abspath(path), os.path.abspath(self.folder))).as_posix()


def file_digest(path: Path) -> str:
    """Digest of the content of a file."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
