"""`captionrl card`: write the card of a model or a data set from its measurements, or check one before a push."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hf_captionrl.options import CommandOptions, option

__all__ = ["CardOptions", "write_card"]

_FACTS = ("model_id", "base_model", "license", "dataset", "dataset_id", "dataset_description", "language")


@dataclass
class CardOptions(CommandOptions):
    """Write DIR/README.md from DIR/results.json (or that of the parent folder) and the facts in DIR/card.json.

    A recipe writes both files. Captions of `boost` have boosting.json, a benchmark has truematch.json instead. An option
    below replaces one fact. A model that a trainer saved without a recipe has no such files; its card says that nothing was
    measured. A card that contains a placeholder, a local path or a token, or lacks a metric, is refused.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl card outputs/smile_blip/model
          captionrl card outputs/smile_blip/model --model_id me/blip-smile --license bsd-3-clause
          captionrl card outputs/smile_blip/model --check
          captionrl card outputs/smile --base_model Salesforce/blip-image-captioning-base --license bsd-3-clause
          captionrl card boosted --dataset_id me/scenes-boosted --license cc-by-4.0
    """

    folder: Path = option(positional=True, metavar="DIR", help="folder of the finished model or data set")
    check: bool = option(False, help="only check the existing card")
    model_id: str | None = option(None, metavar="TEXT", help="name of the model on the Hub")
    base_model: str | None = option(None, metavar="TEXT", help="model that was finetuned")
    license: str | None = option(None, metavar="TEXT", help="licence of the model or data set, as the Hub spells it")
    dataset: str | None = option(None, metavar="TEXT", help="name of the training data")
    dataset_id: str | None = option(None, metavar="TEXT", help="name of the data set on the Hub")
    dataset_description: str | None = option(None, metavar="TEXT", help="description of the training data")
    language: str | None = option(None, metavar="TEXT", help="language of the captions")


def _rewritten(folder: Path, given: dict[str, str]) -> bool:
    """Write the card of a data set. False if the folder is not a data set."""
    from hf_captionrl.boosting.card import BOOSTED_FILE, rewrite_boosted_card
    from hf_captionrl.truematch.benchmark_files import MANIFEST_FILE

    boosted = (folder / BOOSTED_FILE).is_file()
    if not boosted and not (folder / MANIFEST_FILE).is_file():
        return False
    foreign = sorted(set(given) - {"dataset_id", "license", "language"})
    if foreign:
        raise ValueError(
            f"--{foreign[0]} is not a fact of a data set's card. Use --dataset_id, --license or --language."
        )
    if boosted:
        rewrite_boosted_card(folder, given)
        return True
    from hf_captionrl.truematch.card import rewrite_truematch_card

    rewrite_truematch_card(folder, given)
    return True


def write_card(options: CardOptions) -> None:
    """Write or check the card."""
    from hf_captionrl.hub import check_card
    from hf_captionrl.hub.unmeasured_cards import rewrite_model_card

    folder, card = options.folder, options.folder / "README.md"
    if options.check:
        if not card.is_file():
            raise FileNotFoundError(f"{folder} has no README.md. Write it with: captionrl card {folder}")
        check_card(card.read_text(encoding="utf-8"))
        said = "checked."
    else:
        given = {name: value for name in _FACTS if (value := getattr(options, name)) is not None}
        said = "written." if _rewritten(folder, given) else rewrite_model_card(folder, given)
    state = "checked" if options.check else "written"
    print(json.dumps({"card": str(card), "state": state}) if options.json else f"{card}: {said}")
