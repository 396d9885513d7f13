"""`captionrl push`: publish a finished folder, or repeat a push that failed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_captionrl.cli.arguments import add_common

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Upload a finished model or data set with its card, or a metric or the demo as a Space. A push that failed is repeated by the same command with
the folder alone: where it went stands in the folder's push_state.json. Weights go up as safetensors only; checkpoints in
between, pickles and secrets never do. A new repository is private unless --public is given.
"""

_EPILOG = """\
examples:
  captionrl push outputs/smile_blip/model --repo_id me/blip-smile
  captionrl push outputs/smile_blip/model
  captionrl push outputs/lora/model --repo_id me/blip-sr --merged --public
  captionrl push boosted --repo_id me/scenes-boosted
  captionrl push self_retrieval --type space --repo_id me/self_retrieval --public
  captionrl push demo --type space --repo_id me/album --model MLE=Salesforce/blip-image-captioning-base --model SR=me/blip-sr
"""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "push",
        help="publish a model or data set, or repeat a push that failed",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", metavar="DIR", help="folder of the finished model; with --type space, a metric's name, or 'demo'"
    )
    parser.add_argument("--repo_id", metavar="NAME", help="owner/name, or name (default: that of the last push)")
    parser.add_argument(
        "--type",
        choices=("model", "dataset", "space"),
        help="kind of repository (default: that of the last push, or what the folder holds)",
    )
    parser.add_argument("--revision", metavar="BRANCH", help="branch, made if missing (default: main)")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument(
        "--merged", action="store_true", help="merge an adapter into its base model, and add it in adapter/"
    )
    parser.add_argument(
        "--gallery",
        action="store_true",
        help="upload gallery.html, too, where it shows images of this machine (default: only images that are public already)",
    )
    parser.add_argument("--overwrite", action="store_true", help="push also where other content is")
    parser.add_argument(
        "--dry_run", action="store_true", help="check the folder and list what would go up; send nothing"
    )
    group = parser.add_argument_group("the demo")
    group.add_argument(
        "--model", action="append", metavar="NAME=MODEL", help="a captioner that it shows, as for `captionrl demo`"
    )
    group.add_argument("--scorer", metavar="NAME", help="dual encoder that finds images, as for `captionrl demo`")
    add_common(parser)
    parser.set_defaults(run=run)


def _kind(folder: Path) -> str:
    """A data set tells by its manifest that it is one."""
    from hf_captionrl.boosting.card import BOOSTED_FILE
    from hf_captionrl.truematch.benchmark_files import MANIFEST_FILE

    return "dataset" if any((folder / name).is_file() for name in (BOOSTED_FILE, MANIFEST_FILE)) else "model"


def run(arguments: argparse.Namespace) -> None:
    """Push."""
    from hf_captionrl.album.space import DEMO, push_demo
    from hf_captionrl.cli.demo import named_models
    from hf_captionrl.hub import folder_contents, push_folder, push_metric, read_push_state

    before = read_push_state(arguments.folder)
    kind = arguments.type or before.get("repo_type") or _kind(Path(arguments.folder))
    repo_id = arguments.repo_id or before.get("repo_id")
    if repo_id not in (before.get("repo_id"), str(before.get("repo_id")).rpartition("/")[2]):
        before = {}  # how another repository was pushed to, in public perhaps, says nothing about this one
    if arguments.dry_run:
        contents = folder_contents(
            arguments.folder, kind, gallery=True if arguments.gallery else before.get("gallery")
        )
        found: dict[str, Any] = {"published": list(contents.published), "left_out": list(contents.left_out)}
        text = "\n".join([*(f"+ {name}" for name in found["published"]), *(f"- {name}" for name in found["left_out"])])
        print(json.dumps(found) if arguments.json else text)
        return
    if repo_id is None:
        raise ValueError(
            f"{arguments.folder!r} was never pushed, so it is not known where to. Pass --repo_id owner/name."
        )
    is_demo = kind == "space" and arguments.folder == DEMO and not Path(DEMO).is_dir()
    if not is_demo and (arguments.model or arguments.scorer):
        raise ValueError("--model and --scorer are the demo's: captionrl push demo --type space --repo_id owner/name")
    if is_demo:
        address = push_demo(
            repo_id,
            named_models(arguments.model),
            scorer=arguments.scorer,
            private=not arguments.public,
            overwrite=arguments.overwrite,
        )
    elif kind == "space" and not Path(arguments.folder).is_dir():
        owner, _, name = repo_id.rpartition("/")
        if name != arguments.folder or not owner:
            raise ValueError(
                f"--repo_id is {repo_id!r}; evaluate.load finds {arguments.folder!r} only in OWNER/NAME of it."
            )
        address = push_metric(name, owner, private=not arguments.public, overwrite=arguments.overwrite)
    else:
        address = push_folder(
            arguments.folder,
            repo_id,
            repo_type=kind,
            private=not arguments.public and before.get("private", True),
            revision=arguments.revision or before.get("revision"),
            merged=True if arguments.merged else before.get("merged"),
            overwrite=arguments.overwrite,
            marker=before.get("marker"),
            gallery=True if arguments.gallery else before.get("gallery"),
            **({"commit_message": before["commit_message"]} if "commit_message" in before else {}),
        )
    print(json.dumps({"repo_id": repo_id, "commit": address}) if arguments.json else f"Pushed: {address}")
