"""Renders the templates of `hub_cards/`."""

from __future__ import annotations

import functools
import json
import sysconfig
from pathlib import Path
from typing import Any

from hf_captionrl.reports.table import escape_markdown

__all__ = ["render_template", "template_folder"]


def render_template(name: str, **values: Any) -> str:
    """Fill in a template."""
    return str(_environment(template_folder(name)).get_template(name).render(**values))


@functools.cache
def _environment(folder: Path) -> Any:
    """Jinja's environment, which keeps the templates that it has compiled."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # nosec B701 # escaped by filters, see below
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # The output is Markdown, not HTML: the templates escape every value with `md` (text) or `code` (Python).
        autoescape=False,
    )
    environment.filters["md"] = lambda value: escape_markdown(str(value))
    environment.filters["code"] = _python_literal
    return environment


def template_folder(name: str) -> Path:
    """`hub_cards/` of the checkout, or of an installed wheel."""
    folders = (
        Path(__file__).parents[2] / "hub_cards",
        Path(sysconfig.get_path("data"), "share/hf_captionrl/hub_cards"),
    )
    for folder in folders:
        if (folder / name).is_file():
            return folder
    raise FileNotFoundError(
        f"hub_cards/{name} is neither in {folders[0]} nor in {folders[1]}. Install from a checkout: pip install -e ."
    )


def _python_literal(value: Any) -> str:
    """A value as Python source on one line; quotes, line breaks and backticks are escaped."""
    if isinstance(value, bool | int | float) or value is None:
        return repr(value)
    return json.dumps(str(value), ensure_ascii=True).replace("`", "\\u0060")
