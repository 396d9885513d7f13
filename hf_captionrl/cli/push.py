"""`captionrl push`: publish a finished folder, or repeat a push that failed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_captionrl.options import CommandOptions, option

__all__ = ["PushOptions", "push"]


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
          captionrl push outputs/lora/model --repo_id me/blip-sr --merged --public
          captionrl push boosted --repo_id me/scenes-boosted
          captionrl push self_retrieval --type space --repo_id me/self_retrieval --public
          captionrl push demo --type space --repo_id me/album --model MLE=me/blip-mle --model SR=me/blip-sr
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
    merged: bool = option(False, help="merge an adapter into its base model, and add it in adapter/")
    gallery: bool = option(
        False,
        help="upload gallery.html even if it shows local images (default: only if all its images are already public)",
    )
    overwrite: bool = option(False, help="push to a repository that holds other content")
    dry_run: bool = option(False, help="check the folder and list the files that would be uploaded; send nothing")
    model: list[str] | None = option(
        None,
        repeated=True,
        group="the demo",
        metavar="NAME=MODEL",
        help="a captioner that it shows, as for `captionrl demo`",
    )
    scorer: str | None = option(
        None, group="the demo", metavar="NAME", help="dual encoder that finds images, as for `captionrl demo`"
    )


def _kind(folder: Path) -> str:
    """A folder with the manifest of a data set is a data set."""
    from hf_captionrl.boosting.card import BOOSTED_FILE
    from hf_captionrl.truematch.benchmark_files import MANIFEST_FILE

    return "dataset" if any((folder / name).is_file() for name in (BOOSTED_FILE, MANIFEST_FILE)) else "model"


def push(options: PushOptions) -> None:
    """Push a folder, a metric or the demo."""
    from hf_captionrl.album.demo import named_models
    from hf_captionrl.album.hub_space import DEMO, push_demo
    from hf_captionrl.hub import folder_contents, push_folder, push_metric, read_push_state

    before = read_push_state(options.folder)
    kind = options.type or before.get("repo_type") or _kind(Path(options.folder))
    repo_id = options.repo_id or before.get("repo_id")
    if repo_id not in (before.get("repo_id"), str(before.get("repo_id")).rpartition("/")[2]):
        before = {}  # settings of a push to another repository, perhaps a public one, do not apply to this one
    if options.dry_run:
        contents = folder_contents(options.folder, kind, gallery=True if options.gallery else before.get("gallery"))
        found: dict[str, Any] = {"published": list(contents.published), "left_out": list(contents.left_out)}
        text = "\n".join([*(f"+ {name}" for name in found["published"]), *(f"- {name}" for name in found["left_out"])])
        print(json.dumps(found) if options.json else text)
        return
    if repo_id is None:
        raise ValueError(
            f"{options.folder!r} was never pushed, so its repository is unknown. Use --repo_id owner/name."
        )
    is_demo = kind == "space" and options.folder == DEMO and not Path(DEMO).is_dir()
    if not is_demo and (options.model or options.scorer):
        raise ValueError(
            "--model and --scorer belong to the demo. Use captionrl push demo --type space --repo_id owner/name."
        )
    if is_demo:
        address = push_demo(
            repo_id,
            named_models(options.model),
            scorer=options.scorer,
            private=not options.public,
            overwrite=options.overwrite,
        )
    elif kind == "space" and not Path(options.folder).is_dir():
        owner, _, name = repo_id.rpartition("/")
        if name != options.folder or not owner:
            raise ValueError(
                f"--repo_id is {repo_id!r}, but evaluate.load finds the metric only by its name. Use --repo_id OWNER/{options.folder}."
            )
        address = push_metric(name, owner, private=not options.public, overwrite=options.overwrite)
    else:
        address = push_folder(
            options.folder,
            repo_id,
            repo_type=kind,
            private=not options.public and before.get("private", True),
            revision=options.revision or before.get("revision"),
            merged=True if options.merged else before.get("merged"),
            overwrite=options.overwrite,
            marker=before.get("marker"),
            gallery=True if options.gallery else before.get("gallery"),
            **({"commit_message": before["commit_message"]} if "commit_message" in before else {}),
        )
    print(json.dumps({"repo_id": repo_id, "commit": address}) if options.json else f"Pushed: {address}")
