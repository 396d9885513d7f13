"""Sections of a page between `<!-- begin NAME -->` and `<!-- end NAME -->`, which scripts rewrite."""

from __future__ import annotations

from pathlib import Path

from hf_captionrl.utils.io import atomic_write_text


def replace_section(page: str, name: str, text: str) -> str:
    """The page with another text between the markers; without markers, the section is appended."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in page and end in page:
        before, rest = page.split(begin, 1)
        return before + section + rest.split(end, 1)[1]
    return f"{page.rstrip()}\n\n{section}\n"


def write_section(path: Path, name: str, text: str, *, title: str = "") -> None:
    """Rewrite a section of a page file, which starts with the title if it does not exist."""
    page = path.read_text(encoding="utf-8") if path.exists() else f"# {title}\n"
    atomic_write_text(path, replace_section(page, name, text))
