"""`captionrl demo`: a page on which captioners describe an album, and search it by what they wrote."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.cli.arguments import add_common, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_captionrl.album.page import AlbumDemo

__all__ = ["add_parser", "albums_of", "load_demo", "named_models", "run"]

_DESCRIPTION = """\
Serve a page on this machine: pick an album of similar images, or upload one; see what several captioners write about each
image, which image each caption finds and at which rank; and have one caption chosen for each image so that all differ. Nothing
leaves the machine: gradio's reports are off, and the page loads nothing from elsewhere.
"""

_EPILOG = """\
examples:
  captionrl demo
  captionrl demo --images holidays --model MLE=Salesforce/blip-image-captioning-base --model SR=outputs/photos/model
  captionrl demo --port 8000 --no_browser

Without --model these are the embedded world's captioners, and without --images its albums of look-alikes.
"""

_EMBEDDED_IMAGES = 45
"""Three albums each of 3, 5 and 7 look-alikes."""


def add_parser(subcommands: Any) -> None:
    """Add the subcommand."""
    parser = subcommands.add_parser(
        "demo",
        help="show captioners and what their captions find, on a page of this machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME=MODEL",
        help="a captioner and what to call it: a folder, a name on the Hub, or scenes:blip-mle; may be given several times "
        "(default: the embedded MLE, SMILE and SR)",
    )
    parser.add_argument(
        "--scorer",
        metavar="NAME",
        help="dual encoder that finds images: a folder, a name on the Hub, open_clip:NAME@TAG (default: scenes:clip-judge for "
        "embedded captioners, else openai/clip-vit-base-patch32)",
    )
    parser.add_argument(
        "--images",
        type=Path,
        metavar="DIR",
        help="albums: a folder of images, or of folders of images (default: the embedded world's look-alikes)",
    )
    parser.add_argument(
        "--max_images", type=positive, default=24, metavar="N", help="largest album (default: %(default)s)"
    )
    parser.add_argument(
        "--num_beams", type=positive, default=3, metavar="N", help="of captions side by side (default: %(default)s)"
    )
    parser.add_argument(
        "--num_samples", type=positive, default=12, metavar="N", help="candidates an image (default: %(default)s)"
    )
    parser.add_argument(
        "--max_new_tokens", type=positive, default=40, metavar="N", help="longest caption (default: %(default)s)"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen (default: %(default)s, for this machine only)",
    )
    group.add_argument(
        "--allow_host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests for this name, too; may be given several times (default: localhost and IP addresses; with "
        "--share, also the public name)",
    )
    group.add_argument("--port", type=positive, metavar="N", help="(default: the first free one from 7860)")
    group.add_argument("--no_browser", action="store_true", help="do not open a browser")
    group.add_argument(
        "--share",
        action="store_true",
        help="let gradio's servers make the page public: everybody who has the link can use it",
    )
    add_common(parser)
    parser.set_defaults(run=run)


def named_models(given: Sequence[str] | None) -> dict[str, str]:
    """Captioners by name."""
    if not given:
        from hf_captionrl.album.space import EMBEDDED_CAPTIONERS

        return dict(EMBEDDED_CAPTIONERS)
    found: dict[str, str] = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not equals:
            name, model = text.rstrip("/").split("/")[-1], text
        if not name.strip() or not model.strip():
            raise ValueError(
                f"--model is {text!r}. Write NAME=MODEL, for instance SR=outputs/self_retrieval_blip/model."
            )
        if name in found:
            raise ValueError(f"Two captioners are called {name!r}. Give them names of their own: --model NAME=MODEL.")
        found[name] = model
    return found


def albums_of(folder: Path | None) -> dict[str, list[Any]]:
    """Albums by name: those of a folder, or of the embedded world."""
    if folder is None:
        from hf_captionrl.scenes import BAG_SIZES, bags, load_scenes

        rows = load_scenes(num_train=0, num_validation=0, num_test=_EMBEDDED_IMAGES)["test"]
        found: dict[str, list[Any]] = {}
        for size in BAG_SIZES:
            for number, bag in enumerate(bags(list(rows["bag_id"]), size), start=1):
                found[f"{size} look-alikes ({number})"] = [rows[row]["image"] for row in bag]
        return found
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r}. Name one with images, or with folders of images."
        )
    from hf_captionrl.data.image_folders import list_images
    from hf_captionrl.data.image_paths import refuse_outside

    listing = list_images(folder)
    listing.report(str(folder))
    refuse_outside((str(folder / path) for path in listing.images), folder, str(folder))
    found = {}
    for path in sorted(listing.images, key=lambda path: path.rpartition("/")[::2]):
        below, top = path.rpartition("/")[0], folder.resolve().name
        name = f"{top}/{below}" if below == top else below or top
        found.setdefault(name, []).append(str(folder / path))
    if not found:
        raise FileNotFoundError(
            f"There are no images in {str(folder)!r} or its folders; there are {listing.describe_others()}."
        )
    return found


def load_demo(arguments: argparse.Namespace) -> AlbumDemo:
    """Load captioners and scorer."""
    names = named_models(arguments.model)
    albums = albums_of(arguments.images)

    import torch

    from hf_captionrl.album.page import AlbumDemo
    from hf_captionrl.album.space import demo_scorer
    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.retrieval import load_scorer
    from hf_captionrl.scenes.models import model_path

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return AlbumDemo(
        {name: load_captioner(model_path(model), device=device) for name, model in names.items()},
        load_scorer(model_path(arguments.scorer or demo_scorer(names)), device=device),
        albums,
        max_images=arguments.max_images,
        num_beams=arguments.num_beams,
        num_samples=arguments.num_samples,
        max_new_tokens=arguments.max_new_tokens,
    )


def run(arguments: argparse.Namespace) -> None:
    """Serve the page until it is interrupted."""
    if importlib.util.find_spec("gradio") is None:
        raise ValueError(
            "The demo needs gradio, which is not installed. Install it with: pip install 'hf-captionrl[demo]'"
        )
    demo = load_demo(arguments)

    from hf_captionrl.album.page import serve

    def announce(url: str) -> None:
        print(
            json.dumps({"url": url}) if arguments.json else f"The demo runs at {url} until you press Ctrl+C.",
            flush=True,
        )

    serve(
        demo,
        host=arguments.host,
        port=arguments.port,
        share=arguments.share,
        browser=not arguments.no_browser,
        announce=announce,
        allow_hosts=arguments.allow_host,
    )
