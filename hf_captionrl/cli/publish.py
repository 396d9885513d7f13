"""`captionrl push` and `captionrl card`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_captionrl.utils.options import CommandOptions, option

# --- `captionrl push`: publish a finished folder, or repeat a push that failed ---------------------------------------


@dataclass
class PushOptions(CommandOptions):
    """Upload a finished model or data set with its card, or a metric or the demo as a Space.

    To repeat a failed push, give the folder alone: its push_state.json names the repository. Only safetensors are uploaded,
    never intermediate checkpoints, pickles or secrets. A new repository is private unless --public is given.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl push outputs/smile_blip/model --repo_id me/blip-smile
          captionrl push outputs/smile_blip/model
          captionrl push boosted --repo_id me/scenes-boosted
          captionrl push self_retrieval --type space --repo_id me/self_retrieval --public
          captionrl push demo --type space --repo_id me/album --model MLE=me/blip-mle SR=me/blip-sr
    """

    folder: str = option(
        positional=True,
        metavar="DIR",
        help="folder of the finished model or data set; with --type space, a metric's name, or 'demo'",
    )
    repo_id: str | None = option(None, metavar="NAME", help="owner/name, or name (default: that of the last push)")
    type: Literal["model", "dataset", "space"] | None = option(
        None, help="kind of repository (default: that of the last push, or what the folder holds)"
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


def _kind(folder: Path) -> str:
    """A folder with the manifest of a data set is a data set."""
    from hf_captionrl.apps.boosting.boost import BOOSTED_FILE
    from hf_captionrl.apps.truematch.build import MANIFEST_FILE

    return "dataset" if any((folder / name).is_file() for name in (BOOSTED_FILE, MANIFEST_FILE)) else "model"


def push(options: PushOptions) -> None:
    """Push a folder, a metric or the demo."""
    from hf_captionrl.apps.album.demo import named_models
    from hf_captionrl.hub import folder_contents, push_folder, push_metric, read_push_state
    from hf_captionrl.hub.spaces import DEMO, push_demo

    before = read_push_state(options.folder)
    kind = options.type or before.get("repo_type") or _kind(Path(options.folder))
    repo_id = options.repo_id or before.get("repo_id")
    if repo_id not in (before.get("repo_id"), str(before.get("repo_id")).rpartition("/")[2]):
        before = {}  # settings of a push to another repository, perhaps a public one, do not apply to this one
    if options.dry_run:
        contents = folder_contents(options.folder, kind, gallery=before.get("gallery"))
        found: dict[str, Any] = {"published": list(contents.published), "left_out": list(contents.left_out)}
        text = "\n".join([*(f"+ {name}" for name in found["published"]), *(f"- {name}" for name in found["left_out"])])
        print(json.dumps(found) if options.json else text)
        return
    if repo_id is None:
        raise ValueError(f"{options.folder!r} was never pushed. Use --repo_id owner/name.")
    settings: dict[str, Any] = {"private": not options.public, "overwrite": options.overwrite}
    is_folder = Path(options.folder).is_dir()
    is_demo = kind == "space" and not is_folder and options.folder == DEMO
    if not is_demo and (options.model or options.scorer):
        raise ValueError(
            "--model and --scorer belong to the demo. Use captionrl push demo --type space --repo_id NAME."
        )
    if is_demo:
        address = push_demo(repo_id, named_models(options.model), scorer=options.scorer, **settings)
    elif kind == "space" and not is_folder:
        owner, _, name = repo_id.rpartition("/")
        if name != options.folder or not owner:
            raise ValueError(f"evaluate.load finds a metric only by its name. Use --repo_id OWNER/{options.folder}.")
        address = push_metric(name, owner, **settings)
    else:
        # Settings of the last push to this repository, unless an option replaces them.
        settings |= {name: before[name] for name in ("revision", "gallery", "commit_message") if name in before}
        settings["private"] = not options.public and before.get("private", True)
        settings |= {"revision": options.revision} if options.revision is not None else {}
        address = push_folder(options.folder, repo_id, repo_type=kind, **settings)
    print(json.dumps({"repo_id": repo_id, "commit": address}) if options.json else f"Pushed: {address}")


# --- `captionrl card`: write the card of a model or a data set from its measurements, or check one before a push -----

_FACTS = ("model_id", "base_model", "license", "dataset", "dataset_id", "language")


@dataclass
class CardOptions(CommandOptions):
    """Write DIR/README.md from DIR/results.json (or that of the parent folder) and the facts in DIR/card.json.

    A recipe writes both files. Captions of `boost` have boosting.json, a benchmark has truematch.json instead. An option
    below replaces one fact. A model that a trainer saved without a recipe has run.json; its card says if nothing was
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
    language: str | None = option(None, metavar="TEXT", help="language of the captions")


def _write(folder: Path, given: dict[str, str]) -> str:
    """Write the card; returns the message for the user."""
    from hf_captionrl.apps.boosting.boost import BOOSTED_FILE, rewrite_boosted_card
    from hf_captionrl.apps.truematch.build import MANIFEST_FILE, rewrite_truematch_card
    from hf_captionrl.hub.cards import rewrite_model_card

    boosted = (folder / BOOSTED_FILE).is_file()
    if not boosted and not (folder / MANIFEST_FILE).is_file():
        return rewrite_model_card(folder, given)
    foreign = sorted(set(given) - {"dataset_id", "license", "language"})
    if foreign:
        raise ValueError(
            f"--{foreign[0]} is not a fact of a data set's card. Use --dataset_id, --license or --language."
        )
    (rewrite_boosted_card if boosted else rewrite_truematch_card)(folder, given)
    return "written."


def write_card(options: CardOptions) -> None:
    """Write or check the card."""
    from hf_captionrl.hub import check_card

    folder, card = options.folder, options.folder / "README.md"
    if options.check:
        if not card.is_file():
            raise FileNotFoundError(f"{folder} has no README.md. Write it with: captionrl card {folder}")
        check_card(card.read_text(encoding="utf-8"))
        said = "checked."
    else:
        given = {name: value for name in _FACTS if (value := getattr(options, name)) is not None}
        said = _write(folder, given)
    state = "checked" if options.check else "written"
    print(json.dumps({"card": str(card), "state": state}) if options.json else f"{card}: {said}")
