"""`captionrl push` and `captionrl card`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_captionrl.utils.options import CommandOptions, option

# --- `captionrl push`: publish a finished folder, or repeat a push that failed ---------------------------------------


@dataclass
class PushOptions(CommandOptions):
    """Upload a finished model or data set with its card, or a metric or the demo as a Space.

    A failed push can be repeated with the same command. Only safetensors are uploaded, never intermediate checkpoints,
    pickles or secrets. A new repository is private unless --public is given.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl push outputs/smile_blip/model --repo_id me/blip-smile
          captionrl push boosted --repo_id me/scenes-boosted
          captionrl push self_retrieval --type space --repo_id me/self_retrieval --public
          captionrl push demo --type space --repo_id me/album --model MLE=me/blip-mle SR=me/blip-sr
    """

    folder: str = option(
        positional=True,
        metavar="DIR",
        help="folder of the finished model or data set; with --type space, a metric's name, or 'demo'",
    )
    repo_id: str | None = option(None, metavar="NAME", help="owner/name, or name for the owner of the token")
    type: Literal["model", "dataset", "space"] | None = option(
        None, help="kind of repository (default: what the folder holds)"
    )
    revision: str | None = option(None, metavar="BRANCH", help="branch, created if missing (default: main)")
    public: bool = option(False, help="make a new repository public")
    overwrite: bool = option(False, help="push to a repository that holds other content")
    dry_run: bool = option(False, help="check the folder and list the files that would be uploaded; send nothing")
    model: list[str] | None = option(
        None,
        group="the demo",
        metavar="NAME=MODEL",
        help="a captioner that it shows, as for `captionrl demo`",
    )
    scorer: str | None = option(
        None, group="the demo", metavar="NAME", help="dual encoder that finds images, as for `captionrl demo`"
    )


def push(options: PushOptions) -> None:
    """Push a folder, a metric or the demo."""
    from hf_captionrl.apps.album.demo import named_models
    from hf_captionrl.hub import folder_contents, push_folder, push_metric
    from hf_captionrl.hub.spaces import DEMO, push_demo

    name, repo_id = options.folder, options.repo_id
    kind = options.type or ("dataset" if _dataset_card(Path(name)) else "model")
    if options.dry_run:
        contents = folder_contents(name, kind)
        lines = [*(f"+ {file}" for file in contents.published), *(f"- {file}" for file in contents.left_out)]
        print(json.dumps(contents._asdict()) if options.json else "\n".join(lines))
        return
    if repo_id is None:
        raise ValueError(f"Where should {name!r} go? Use --repo_id owner/name.")
    settings: dict[str, Any] = {"private": not options.public, "overwrite": options.overwrite}
    if kind == "space" and not Path(name).is_dir() and name == DEMO:
        address = push_demo(repo_id, named_models(options.model), scorer=options.scorer, **settings)
    elif kind == "space" and not Path(name).is_dir():
        owner, _, metric = repo_id.rpartition("/")
        if metric != name or not owner:
            raise ValueError(f"evaluate.load finds a metric only by its name. Use --repo_id OWNER/{name}.")
        address = push_metric(name, owner, **settings)
    else:
        address = push_folder(name, repo_id, repo_type=kind, revision=options.revision, **settings)
    print(json.dumps({"repo_id": repo_id, "commit": address}) if options.json else f"Pushed: {address}")


# --- `captionrl card`: write the card of a model or a data set from its measurements, or check one before a push -----

_FACTS = ("model_id", "base_model", "license", "dataset", "dataset_id", "language")


@dataclass
class CardOptions(CommandOptions):
    """Write DIR/README.md from DIR/results.json (or that of the parent folder) and the facts in DIR/card.json.

    A recipe writes both files. Captions of `boost` have boosting.json, a benchmark has truematch.json instead. An option
    below replaces one fact. A model that a trainer saved without a recipe has run.json; its card says if nothing was
    measured. A card that contains a token, or lacks a licence, is refused.
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
    language: str | None = option(None, metavar="TEXT", help="language of the captions")


def _dataset_card(folder: Path) -> Callable[[Path, dict[str, str]], object] | None:
    """What writes the card of a data set again, by its manifest; None for a model."""
    from hf_captionrl.apps.boosting.boost import BOOSTED_FILE, rewrite_boosted_card
    from hf_captionrl.apps.truematch.build import MANIFEST_FILE, rewrite_truematch_card

    writers = {BOOSTED_FILE: rewrite_boosted_card, MANIFEST_FILE: rewrite_truematch_card}
    return next((writer for name, writer in writers.items() if (folder / name).is_file()), None)


def write_card(options: CardOptions) -> None:
    """Write or check the card."""
    from hf_captionrl.hub import check_card
    from hf_captionrl.hub.cards import rewrite_model_card

    folder, card = options.folder, options.folder / "README.md"
    if options.check:
        check_card(card.read_text(encoding="utf-8"))
        message = "checked."
    else:
        facts = {name: value for name in _FACTS if (value := getattr(options, name)) is not None}
        if write_dataset_card := _dataset_card(folder):
            write_dataset_card(folder, facts)
            message = "written."
        else:
            message = rewrite_model_card(folder, facts)
    state = "checked" if options.check else "written"
    print(json.dumps({"card": str(card), "state": state}) if options.json else f"{card}: {message}")
