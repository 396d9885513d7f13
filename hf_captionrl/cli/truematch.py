"""`captionrl truematch`: make a benchmark of look-alikes, review its bags, evaluate captioners on it, compare them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_captionrl.cli.arguments import add_common, add_dataset, positive

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
TrueMatch (No Detail Left Behind, section 3): bags of 3, 5 and 7 images that look alike. A caption passes if it finds its
own image within the bag.
"""

_EPILOG = """\
examples:
  captionrl truematch build --dataset scenes --output truematch
  captionrl truematch build --dataset dataset_coco.json --image_root coco --split validation+test --no_images
  captionrl truematch review truematch
  captionrl truematch evaluate truematch --models scenes:blip-mle --references
  captionrl truematch leaderboard truematch results/*.json
  captionrl truematch review truematch --export review.html      # for somebody else; then, with what they send back,
  captionrl truematch apply truematch --decisions decisions.jsonl
  captionrl push truematch --type dataset --repo_id me/truematch-scenes
"""

_SIZES = (3, 5, 7)


def add_parser(subcommands: Any) -> None:
    """Add the subcommand, which has subcommands of its own."""
    parser = subcommands.add_parser(
        "truematch",
        help="make, review and use a benchmark of images that look alike",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, traceback=False, resumes=True)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for add in (_add_build, _add_review, _add_apply, _add_evaluate, _add_leaderboard):
        add(actions)


def _new(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    # The examples of the whole command that are this action's.
    mine = [
        line.partition("  #")[0] for line in _EPILOG.splitlines() if line.startswith(f"  captionrl truematch {name} ")
    ]
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="\n".join(["examples:", *mine]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the benchmark, made by `captionrl truematch build`")


def _images(parser: argparse.ArgumentParser) -> None:
    """Where images come from that are not in the folder."""
    add_dataset(parser)
    parser.set_defaults(dataset=None)


def _add_build(actions: Any) -> None:
    parser = _new(actions, "build", "find bags of look-alikes, and write a folder that is the benchmark")
    parser.add_argument("--output", type=Path, default=Path("truematch"), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="make the folder anew if it was made otherwise")
    add_dataset(parser)
    group = parser.add_argument_group("bags")
    group.add_argument("--bag_sizes", nargs="+", type=positive, default=_SIZES, metavar="K", help="(default: 3 5 7)")
    group.add_argument("--scorer", metavar="NAME", help="dual encoder whose features say what looks alike, see `bags`")
    group.add_argument(
        "--features",
        choices=("multimodal", "image"),
        default="multimodal",
        help="images and their captions, as in the paper, or images alone (default: %(default)s)",
    )
    group.add_argument(
        "--published_bags", type=Path, metavar="DIR", help="take the bags from the paper's release, by COCO id"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the order in which bags are reviewed")
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    group.add_argument("--batch_size", type=positive, default=64, metavar="N", help="(default: %(default)s)")
    group.add_argument("--cache_dir", metavar="DIR", help="folder of the feature cache")
    group = parser.add_argument_group("publication")
    group.add_argument(
        "--no_images", action="store_true", help="leave the images out, where their licence asks for it"
    )
    group.add_argument("--repo_id", metavar="NAME", help="what the card calls it (default: the folder's name)")
    group.add_argument(
        "--license", default="other", metavar="NAME", help="of what is added here (default: %(default)s)"
    )
    group.add_argument("--source_license", metavar="TEXT", help="of the images and captions (default: see the source)")
    group.add_argument("--language", default="en", metavar="CODE", help="of the captions (default: %(default)s)")
    add_common(parser)


def _add_review(actions: Any) -> None:
    parser = _new(actions, "review", "look at each bag in a browser, and keep or drop it")
    _folder(parser)
    parser.add_argument("--port", type=int, default=8765, metavar="N", help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write a page that needs no server, whose decisions are downloaded"
    )
    _images(parser)
    add_common(parser)


def _add_apply(actions: Any) -> None:
    parser = _new(actions, "apply", "take over decisions, and write kept.json and the card anew")
    _folder(parser)
    parser.add_argument("--decisions", type=Path, metavar="FILE", help="from the download of an exported review page")
    add_common(parser)


def _add_evaluate(actions: Any) -> None:
    parser = _new(actions, "evaluate", "measure captioners on the benchmark")
    _folder(parser)
    group = parser.add_argument_group("captioners")
    group.add_argument("--captions", nargs="+", type=Path, default=[], metavar="FILE", help="of `captionrl caption`")
    group.add_argument(
        "--names", nargs="+", metavar="NAME", help="what to call files and models (default: their own names)"
    )
    group.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="models that caption the images first")
    group.add_argument(
        "--references", action="store_true", help="also one reference of each image, held against others"
    )
    group.add_argument("--output_dir", type=Path, metavar="DIR", help="(default: outputs/NAME OF THE FOLDER)")
    group = parser.add_argument_group("judges")
    group.add_argument(
        "--scorer",
        metavar="NAME",
        help="dual encoder that judges (default: scenes:clip-judge on the embedded world, else "
        "openai/clip-vit-base-patch32, which is the paper's)",
    )
    group.add_argument("--all_bags", action="store_true", help="also bags that were dropped in the review")
    group.add_argument("--bag_images_only", action="store_true", help="leave out images that are in no bag")
    group.add_argument("--cache_dir", metavar="DIR", help="folder of the feature cache")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of bootstrap, tests and the references")
    _images(parser)
    add_common(parser)


def _add_leaderboard(actions: Any) -> None:
    parser = _new(actions, "leaderboard", "put results into one table, the best first")
    _folder(parser)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="results.json of `truematch evaluate`")
    parser.add_argument("--sort_by", default="3", metavar="K", help="a bag size, or rd100 (default: %(default)s)")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="where the table goes (default: DIR)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the bootstrap (default: %(default)s)")
    add_common(parser)


def run(arguments: argparse.Namespace) -> None:
    """Do what was asked for."""
    from importlib import import_module

    homes = {"apply": "review_server", "review": "review_server", "leaderboard": "evaluate"}
    module = import_module(f"hf_captionrl.truematch.{homes.get(arguments.action, arguments.action)}")
    getattr(module, arguments.action)(arguments)
