"""Renders self-contained HTML pages: all values are escaped, and a content security policy allows only our style and script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["TEMPLATES", "content_hash", "html_templates", "render_html", "render_page"]

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of this package's templates, styles and scripts; products keep theirs in their folders."""


def html_templates(folder: Path = TEMPLATES) -> Environment:
    """The templates of HTML pages in a folder."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_html(folder: Path, name: str, *, sort_keys: bool = True, **values: Any) -> str:
    """Render `name.html.j2` with `name.css` and, if there is one, `name.js`; `sort_keys` is for JSON in the page."""
    environment = html_templates(folder)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": sort_keys}
    for kind, suffix in (("style", "css"), ("script", "js")):
        path = folder / f"{name}.{suffix}"
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            # The package's files are the only texts that are not escaped; the content security policy allows only
            # their hashes.
            values |= {kind: Markup(text), f"{kind}_hash": content_hash(text)}
    return environment.get_template(f"{name}.html.j2").render(**values)


def render_page(template: str, *, styles: Sequence[str], scripts: Sequence[str] = (), **values: Any) -> str:
    """A self-contained page; the template gets `style`, `script` and the hashes that its policy allows."""
    # Only the package's style and script are not escaped.
    for kind, names in (("style", styles), ("script", scripts)):
        source = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in names)
        values |= {kind: Markup(source), f"{kind}_hash": content_hash(source)}
    return html_templates().get_template(template).render(**values)


def content_hash(text: str) -> str:
    """The hash of a style or script in a content security policy: `sha256-...`."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"
