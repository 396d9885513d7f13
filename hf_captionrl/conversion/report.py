"""The report of a conversion."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["FileRecord", "Report"]


@dataclass(frozen=True)
class FileRecord:
    """Name, size in bytes and hash of a file."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path, name: str | None = None) -> FileRecord:
        """Read a file."""
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(name or path.name, path.stat().st_size, digest)


@dataclass
class Report:
    """Files that a conversion read and wrote."""

    kind: str  # what the source is, such as `"transformers"` or `"blip"`
    source: str
    output: str  # folder or file that was written
    read: list[FileRecord] = field(default_factory=list)
    written: list[FileRecord] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)  # names of other files
    notes: list[str] = field(default_factory=list)  # notes for the user

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [f"read   {f.name}  {f.bytes:,} bytes  sha256 {f.sha256}" for f in self.read]
        lines += [f"wrote  {f.name}  {f.bytes:,} bytes  sha256 {f.sha256}" for f in self.written]
        lines += [f"copied {', '.join(self.copied)}"] if self.copied else []
        return [*lines, *self.notes, f"{self.output}: {self.kind}."]
