"""A signature as in sacrebleu: one line that states how a number was computed."""

from importlib import metadata
from typing import Any

__all__ = ["signature"]


def signature(**parts: Any) -> str:
    """Everything that a result depends on, such as `"pool:5000|ties:against|dtype:float32|hf_captionrl:0.1.0"`."""
    written = []
    for name, value in parts.items():
        if value is None or value == "":
            continue
        text = (str(value).lower() if isinstance(value, bool) else str(value)).replace("|", ",")
        if "\n" in text:
            raise ValueError(f"{name}={text!r} contains a line break, but a signature is one line. Rename it.")
        written.append(f"{name}:{text}")
    try:
        version = metadata.version("hf-captionrl")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        version = "unknown"
    return "|".join([*written, f"hf_captionrl:{version}"])
