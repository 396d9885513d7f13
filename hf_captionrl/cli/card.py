"""`captionrl card`: write a model's card from its results, or check one before it is published."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_captionrl.cli.arguments import add_common

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Render DIR/README.md from DIR/results.json (or that of the folder above) and the facts in DIR/card.json, which a recipe
writes. What is given here replaces a fact. A card with a placeholder, a missing metric, a path of this machine or a token
is refused.
"""

_EPILOG = """\
examples:
  captionrl card outputs/smile_blip/model
  captionrl card outputs/smile_blip/model --model_id me/blip-smile --license bsd-3-clause
  captionrl card outputs/smile_blip/model --check
"""

_FACTS = ("model_id", "license", "dataset", "dataset_id", "dataset_description", "language")


def add_parser(subcommands: Any) -> None:
    """Add the subcommand.

    Args:
        subcommands: Of the main parser.
    """
    parser = subcommands.add_parser(
        "card",
        help="write or check a model card",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the finished model")
    parser.add_argument("--check", action="store_true", help="only check the card that is there")
    for name in _FACTS:
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"replaces {name} of card.json")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Write or check the card.

    Args:
        arguments: As parsed.

    Raises:
        FileNotFoundError: If card, facts or results are not there.
        ValueError: If the card must not be published.
    """
    from dataclasses import replace

    from hf_captionrl.hub import check_card, read_facts, write_model_card

    folder = arguments.folder
    card = folder / "README.md"
    if arguments.check:
        if not card.is_file():
            raise FileNotFoundError(f"{folder} has no README.md. Write it: captionrl card {folder}")
        check_card(card.read_text(encoding="utf-8"))
    else:
        given = {name: value for name in _FACTS if (value := getattr(arguments, name)) is not None}
        facts = replace(read_facts(folder), **given)
        found = [path for path in (folder / "results.json", folder.parent / "results.json") if path.is_file()]
        if not found:
            raise FileNotFoundError(
                f"Neither {folder} nor the folder above has results.json. Evaluate the model first."
            )
        write_model_card(folder, json.loads(found[0].read_text(encoding="utf-8")), facts)
    done = "checked" if arguments.check else "written"
    print(json.dumps({"card": str(card), "state": done}) if arguments.json else f"{card}: {done}.")
