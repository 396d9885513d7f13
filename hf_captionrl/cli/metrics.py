"""`captionrl metrics`: place the metrics where `evaluate.load("self_retrieval")` finds them, or say where they are."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hf_captionrl.cli.arguments import add_common

__all__ = ["add_parser", "run_install", "run_path"]

_EPILOG = """\
examples:
  captionrl metrics install
  python -c 'import evaluate; print(evaluate.load("self_retrieval").description)'
  captionrl metrics path caption_diversity
"""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = subcommands.add_parser(
        "metrics",
        help="make evaluate.load find the metrics by name",
        description="The metrics as modules of the `evaluate` library.",
        epilog=_EPILOG,
        formatter_class=plain,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    install = actions.add_parser(
        "install",
        help="put a line for each metric into evaluate's modules cache",
        description="Make evaluate.load find every metric by its bare name, from any folder, online and offline.",
        epilog="example:\n  captionrl metrics install\n",
        formatter_class=plain,
    )
    add_common(install)
    install.set_defaults(run=run_install)
    path = actions.add_parser(
        "path",
        help="print the folder of a metric",
        description="Print the folder of a metric, which evaluate.load takes too, and which is a complete Space.",
        epilog="example:\n  captionrl metrics path self_retrieval\n",
        formatter_class=plain,
    )
    path.add_argument("name", metavar="NAME", help="such as self_retrieval or caption_diversity")
    add_common(path)
    path.set_defaults(run=run_path)


def run_install(arguments: argparse.Namespace) -> None:
    """Install the modules."""
    import warnings

    from hf_captionrl.evaluate_modules import MODULES, install

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        files = install()
    if not files:
        raise RuntimeError(str(caught[-1].message) if caught else "nothing was installed")
    if arguments.json:
        print(json.dumps({"modules": sorted(MODULES), "files": [str(file) for file in files]}))
    else:
        print(f"evaluate.load now knows {', '.join(sorted(MODULES))}.")


def run_path(arguments: argparse.Namespace) -> None:
    """Print the folder of a module."""
    from hf_captionrl.evaluate_modules import path

    folder = path(arguments.name)
    print(json.dumps({"name": arguments.name, "path": folder}) if arguments.json else folder)
