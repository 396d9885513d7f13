"""Names and contents of the caption files and captioners that commands take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_captionrl.evaluation.scored_captions import REFERENCES

if TYPE_CHECKING:
    from hf_captionrl.evaluation.caption_files import CaptionFile

__all__ = ["read_files", "source_names"]


def source_names(sources: Sequence[str | Path], names: Sequence[str] | None) -> list[str]:
    """Names of the sources: `--names`, or the names of files and models."""
    if names and len(names) != len(sources):
        raise ValueError(
            f"There are {len(sources)} sources of captions and {len(names)} --names. Use one name per source."
        )
    found = list(names or map(_own_name, sources))
    if not names and len(set(found)) < len(found):
        # runs/a/captions.jsonl and runs/b/captions.jsonl
        folders = [Path(source).resolve().parent.name for source in sources]
        here = [Path(source).exists() or Path(source).suffix == ".jsonl" for source in sources]
        shared = {name for name in found if found.count(name) > 1}
        found = [
            f"{folder}/{name}" if is_file and name in shared else name
            for folder, is_file, name in zip(folders, here, found, strict=True)
        ]
    for name in found:
        if found.count(name) > 1:
            raise ValueError(f"Two sources of captions are called {name!r}. Use --names to choose different names.")
        if name == REFERENCES:
            raise ValueError(f"{name!r} is reserved for the human captions. Use --names to choose another name.")
    return found


def _own_name(source: str | Path) -> str:
    """Stem of a file, last part of a captioner's folder, or the whole name on the Hub."""
    from hf_captionrl.hub import public_values

    path = Path(source)
    if path.is_file() or path.suffix == ".jsonl":
        return path.stem
    return path.resolve().name if path.is_dir() else str(public_values(str(source)))


def read_files(paths: Sequence[Path], names: Sequence[str] | None) -> list[CaptionFile]:
    """Read files of captions under the given names; by default, the names of the files."""
    from hf_captionrl.evaluation.caption_files import read_caption_file

    return [read_caption_file(path, name=name) for path, name in zip(paths, source_names(paths, names), strict=True)]
