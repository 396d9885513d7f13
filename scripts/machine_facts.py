"""Facts about the machine and its libraries, for results."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Name of the processor, or its architecture if the system does not tell the name."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def has_cpu_flag(flag: str) -> bool:
    """Whether the processor has a flag such as "avx2"; True if there is no flag to check or no way to check it."""
    return not flag or not _CPUINFO.is_file() or flag in _CPUINFO.read_text(encoding="utf-8").split()


def library_versions(*names: str) -> dict[str, str]:
    """Installed versions by name."""
    return {name: version(name) for name in names}
