"""What several scripts need: sections of pages, and the name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def replace_section(page: str, name: str, text: str) -> str:
    """The page with another text between `<!-- begin NAME -->` and `<!-- end NAME -->`; without them, it is appended."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in page and end in page:
        before, rest = page.split(begin, 1)
        return before + section + rest.split(end, 1)[1]
    return f"{page.rstrip()}\n\n{section}\n"


def processor_name() -> str:
    """Name of the processor, or its architecture if the system does not tell the name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
