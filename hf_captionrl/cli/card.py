"""`captionrl card`: write the card of a model or a data set from what was measured, or check one before a push."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_captionrl.cli.arguments import add_common

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Render DIR/README.md from DIR/results.json (or that of the folder above) and the facts in DIR/card.json, which a recipe
writes; of boosted captions from DIR/boosting.json, of a benchmark from DIR/truematch.json. What is given here replaces a
fact. A model that a trainer saved without a recipe has neither; its card says that nothing was measured. A card with a
placeholder, a missing metric, a path of this machine or a token is refused.
"""

_EPILOG = """\
examples:
  captionrl card outputs/smile_blip/model
  captionrl card outputs/smile_blip/model --model_id me/blip-smile --license bsd-3-clause
  captionrl card outputs/smile_blip/model --check
  captionrl card outputs/smile --base_model Salesforce/blip-image-captioning-base --license bsd-3-clause
  captionrl card boosted --dataset_id me/scenes-boosted --license cc-by-4.0
"""

_FACTS = ("model_id", "base_model", "license", "dataset", "dataset_id", "dataset_description", "language")


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "card",
        help="write or check the card of a model or a data set",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the finished model or data set")
    parser.add_argument("--check", action="store_true", help="only check the card that is there")
    for name in _FACTS:
        parser.add_argument(f"--{name}", metavar="TEXT", help=f"replaces {name}, see above")
    add_common(parser)
    parser.set_defaults(run=run)


def _rewritten(folder: Path, given: dict[str, str]) -> bool:
    """Write the card of a data set, if the folder is one."""
    from hf_captionrl.boosting.card import BOOSTED_FILE, rewrite_boosted_card
    from hf_captionrl.truematch.benchmark_files import MANIFEST_FILE, load_truematch

    boosted = (folder / BOOSTED_FILE).is_file()
    if not boosted and not (folder / MANIFEST_FILE).is_file():
        return False
    foreign = sorted(set(given) - {"dataset_id", "license", "language"})
    if foreign:
        raise ValueError(f"--{foreign[0]} is no fact of a data set's card. Use --dataset_id, --license or --language.")
    if boosted:
        rewrite_boosted_card(folder, given)
        return True
    from hf_captionrl.io import write_json
    from hf_captionrl.truematch.card import write_truematch_card

    found = load_truematch(folder)
    found.manifest["card"].update(given)
    write_truematch_card(found)  # refuses what must not be published, before it is remembered
    write_json(folder / MANIFEST_FILE, found.manifest)
    return True


def _write_of_model(folder: Path, given: dict[str, str]) -> str:
    """Write the card of a model; what is to be said of it."""
    from dataclasses import replace

    from hf_captionrl.hub import read_facts, write_model_card, write_unmeasured_card
    from hf_captionrl.hub.model_card import FACTS_FILE

    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}. Use the one with the finished model.")
    if not (folder / FACTS_FILE).is_file():
        write_unmeasured_card(folder, **given)
        licence = "" if "license" in given else " The licence is given as 'other'; use --license to name it."
        return f"written, without results: no recipe has measured this model.{licence}"
    facts = replace(read_facts(folder), **given)  # type: ignore[arg-type]
    found = [path for path in (folder / "results.json", folder.parent / "results.json") if path.is_file()]
    if not found:
        raise FileNotFoundError(f"Neither {folder} nor the folder above has results.json. Evaluate the model first.")
    write_model_card(folder, json.loads(found[0].read_text(encoding="utf-8")), facts)
    return "written."


def run(arguments: argparse.Namespace) -> None:
    """Write or check the card."""
    from hf_captionrl.hub import check_card

    folder = arguments.folder
    card = folder / "README.md"
    if arguments.check:
        if not card.is_file():
            raise FileNotFoundError(f"{folder} has no README.md. Write it: captionrl card {folder}")
        check_card(card.read_text(encoding="utf-8"))
        said = "checked."
    else:
        given = {name: value for name in _FACTS if (value := getattr(arguments, name)) is not None}
        said = "written." if _rewritten(folder, given) else _write_of_model(folder, given)
    done = "checked" if arguments.check else "written"
    print(json.dumps({"card": str(card), "state": done}) if arguments.json else f"{card}: {said}")
