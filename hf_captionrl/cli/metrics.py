"""`captionrl metrics path`: where the file of a metric is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from hf_captionrl.utils.options import CommandOptions, option


@dataclass
class PathOptions(CommandOptions):
    """Print the file of a metric. evaluate.load takes it too."""

    examples: ClassVar[str] = """
        example:
          captionrl metrics path self_retrieval
    """

    name: str = option(
        positional=True, metavar="NAME", help="name of the metric, such as self_retrieval or caption_diversity"
    )


def print_path(options: PathOptions) -> None:
    """Print the file of a module."""
    from hf_captionrl.metrics.evaluate_modules import path

    file = path(options.name)
    print(json.dumps({"name": options.name, "path": file}) if options.json else file)
