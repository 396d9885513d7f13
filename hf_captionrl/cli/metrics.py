"""`captionrl metrics`: make the metrics available to `evaluate.load("self_retrieval")`, or print where they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from hf_captionrl.utils.options import CommandOptions, option


@dataclass
class InstallOptions(CommandOptions):
    """Make evaluate.load find every metric by its bare name, from any folder, online and offline."""

    examples: ClassVar[str] = """
        example:
          captionrl metrics install
    """


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


def install_metrics(options: InstallOptions) -> None:
    """Install the modules."""
    import warnings

    from hf_captionrl.metrics.evaluate_modules import MODULES, install

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        files = install()
    if not files:
        raise RuntimeError(str(caught[-1].message) if caught else "nothing was installed")
    if options.json:
        print(json.dumps({"modules": sorted(MODULES), "files": [str(file) for file in files]}))
    else:
        print(f"evaluate.load now knows {', '.join(sorted(MODULES))}.")


def print_path(options: PathOptions) -> None:
    """Print the file of a module."""
    from hf_captionrl.metrics.evaluate_modules import path

    file = path(options.name)
    print(json.dumps({"name": options.name, "path": file}) if options.json else file)
