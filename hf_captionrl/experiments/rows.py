"""Rows of the papers' tables: a base configuration and what differs from it, selected by `--row ndlb/table5/row8`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

try:
    from yaml import CSafeLoader as SafeLoader  # the C implementation is ten times faster
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

__all__ = ["Row", "load_row", "read_yaml", "row_names"]

ROWS = "rows"
"""Folder of the row files in `recipes/configs`; the other folders there contain the base files of each recipe."""


@dataclass(frozen=True)
class Row:
    """One row of a paper's table."""

    name: str  # `<paper>/<row>`
    title: str  # description of what the row trains or evaluates
    recipe: str  # file name of its recipe, without ending
    settings: dict[str, Any]  # arguments of the recipe; `output_dir` is `outputs/<name>`


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not valid YAML ({' '.join(str(error).split())}). Correct it.") from None
    if not isinstance(content, dict):
        raise ValueError(
            f"{str(path)!r} holds a {type(content).__name__}. Use a mapping: one `argument: value` per line."
        )
    return content


def row_names(configs: Path) -> list[str]:
    """Names of all rows of `recipes/configs`."""
    return [f"{file.stem}/{row}" for file in sorted((configs / ROWS).glob("*.yaml")) for row in read_yaml(file)]


def load_row(configs: Path, name: str) -> Row:
    """A row by name, including the settings of its bases."""
    paper, _, own = name.partition("/")
    file = configs / ROWS / f"{paper}.yaml"
    rows = read_yaml(file) if file.is_file() else {}
    if own not in rows:
        near = difflib.get_close_matches(name, row_names(configs), n=1)
        remedy = f"Use {near[0]!r}" if near else "Use one of recipes/configs/rows"
        raise ValueError(f"There is no row {name!r}. {remedy}, as in --row ndlb/table5/row8.")
    differences: list[Mapping[str, Any]] = []
    base = own
    while base in rows:
        if not isinstance(rows[base], dict) or "base" not in rows[base] or rows[base] in differences:
            raise ValueError(
                f"The row {paper}/{base} has no base, or is its own base. Use a file such as smile_blip/coco, or another row of "
                f"{file.name}."
            )
        differences.append(rows[base])
        base = str(rows[base]["base"])
    base_file = configs / f"{base}.yaml"
    if not base_file.is_file():
        raise ValueError(
            f"The row {name} has the base {base!r}, which is neither a row of {file.name} nor a file of recipes/configs. Use "
            "one of these."
        )
    settings = read_yaml(base_file)
    for changes in reversed(differences):
        settings |= {key: value for key, value in changes.items() if key not in ("title", "base")}
    settings["output_dir"] = f"outputs/{name}"
    return Row(name, str(rows[own].get("title", own)), base_file.parent.name, settings)
