"""The name of the processor, for records of benchmarks."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Name of the processor, or its architecture if the system does not tell the name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
