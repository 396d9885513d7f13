"""How every HTML page is made: templates that escape what they show, and styles and scripts named by their hashes."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

__all__ = ["TEMPLATES", "content_hash", "html_templates"]

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of templates, styles and scripts."""


def html_templates() -> Environment:
    """The templates of HTML pages."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def content_hash(text: str) -> str:
    """A source as a content security policy names it.

    Args:
        text: Style or script.

    Returns:
        `str`: `sha256-...`.
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"
