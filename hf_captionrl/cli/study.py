"""`captionrl study`: make a study that people take part in without a server, and score what they send back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_captionrl.cli.arguments import add_common, add_dataset, positive

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Human studies, offline. `build` writes one HTML page for each participant, which opens from a disk and exports its answers
as a file, and beside the pages the key, which stays with you. `score` holds the files against the key.
"""

_EPILOG = """\
designs:
  retrieval    pick the image of a caption among ten that look alike (DiscriTune, section 5.3 and Appendix A)
  rating       rate descriptiveness, accuracy and fluency from 1 to 5 (SMILE, section 3.2)

examples:
  captionrl study build retrieval --captions mle.jsonl smile.jsonl --references --dataset scenes --output study
  captionrl study build rating --captions mle.jsonl smile.jsonl --names MLE SMILE --dataset scenes --output ratings
  captionrl study score study answers
"""

KINDS = ("retrieval", "rating")
"""What can be built."""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand, which has subcommands of its own."""
    parser = subcommands.add_parser(
        "study",
        help="make a study that people take part in, and score it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, traceback=False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser("build", **_texts("build", "write the pages and the key"))
    kinds = build.add_subparsers(dest="kind", metavar="DESIGN", required=True)
    _add_retrieval(kinds)
    _add_rating(kinds)
    _add_score(actions)


def _texts(action: str, text: str) -> dict[str, Any]:
    """What the help of an action says, with those examples of the whole command that are its own."""
    mine = [line for line in _EPILOG.splitlines() if line.startswith(f"  captionrl study {action} ")]
    return {
        "help": text,
        "description": f"{text[0].upper()}{text[1:]}.",
        "epilog": "\n".join(["examples:", *mine]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def _add_captions(parser: argparse.ArgumentParser, output: str) -> None:
    """What both designs ask for."""
    parser.add_argument(
        "--captions",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="one of `captionrl caption` for each system",
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="what to call them (default: the files' names)")
    parser.add_argument("--references", action="store_true", help="also one human caption of each image, as a system")
    parser.add_argument("--output", type=Path, default=Path(output), metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace another study; answers to that one can no longer be scored"
    )
    parser.add_argument(
        "--consent", type=Path, metavar="FILE", help="text that participants must agree to before they start"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: %(default)s)")
    add_dataset(parser)


def _add_retrieval(kinds: Any) -> None:
    text = "pick the image of a caption among images that look alike"
    parser = kinds.add_parser("retrieval", **_texts("build retrieval", text))
    _add_captions(parser, "study-retrieval")
    group = parser.add_argument_group("sets")
    group.add_argument(
        "--num_sets",
        type=positive,
        metavar="N",
        help="sets of images (default: the paper's 500, or as many as there are)",
    )
    group.add_argument("--set_size", type=int, default=10, metavar="K", help="2 to 10 images (default: %(default)s)")
    group.add_argument(
        "--max_similarity",
        type=float,
        default=0.8,
        metavar="X",
        help="largest cosine between target and neighbour (default: %(default)s)",
    )
    group.add_argument(
        "--block_size", type=positive, default=100, metavar="N", help="questions (default: %(default)s)"
    )
    group.add_argument("--controls", type=int, default=5, metavar="N", help="in each block (default: %(default)s)")
    group.add_argument("--scorer", metavar="NAME", help="dual encoder whose features say what looks alike, see `bags`")
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    group.add_argument("--batch_size", type=positive, default=64, metavar="N", help="(default: %(default)s)")
    group.add_argument("--cache_dir", metavar="DIR", help="folder of the feature cache")
    add_common(parser)


def _add_rating(kinds: Any) -> None:
    parser = kinds.add_parser("rating", **_texts("build rating", "rate captions on three scales"))
    _add_captions(parser, "study-rating")
    group = parser.add_argument_group("images and raters")
    group.add_argument("--num_images", type=positive, default=50, metavar="N", help="at random (default: %(default)s)")
    group.add_argument("--num_raters", type=positive, default=5, metavar="N", help="pages (default: %(default)s)")
    add_common(parser)


def _add_score(actions: Any) -> None:
    texts = _texts("score", "tables from what participants sent back")
    texts["description"] = "Hold answers against the key. Writes results.json, results.md and results.html."
    parser = actions.add_parser("score", **texts)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the study, made by `captionrl study build`")
    parser.add_argument("answers", nargs="+", type=Path, metavar="ANSWERS", help="files, or folders of them")
    parser.add_argument(
        "--max_wrong_controls",
        type=int,
        default=1,
        metavar="N",
        help="who gets more wrong is dropped (default: %(default)s)",
    )
    parser.add_argument(
        "--allow_incomplete", action="store_true", help="count participants who stopped before the end"
    )
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="where the tables go (default: DIR)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of bootstrap and tests (default: %(default)s)"
    )
    add_common(parser)


def run(arguments: argparse.Namespace) -> None:
    """Do what was asked for."""
    if arguments.action == "build":
        from hf_captionrl.studies.build import build

        build(arguments)
    else:
        from hf_captionrl.studies.score import score

        score(arguments)
