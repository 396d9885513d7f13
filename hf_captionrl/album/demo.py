"""`captionrl demo`: options of the demo page, and what it loads."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_captionrl.evaluation.dataset_options import device_option
from hf_captionrl.options import CommandOptions, option, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_captionrl.album.page import AlbumDemo

__all__ = ["DemoOptions", "albums_of", "load_demo", "named_models", "serve_demo"]

_EMBEDDED_IMAGES = 45
"""Three albums each of 3, 5 and 7 look-alikes."""


@dataclass
class DemoOptions(CommandOptions):
    """Serve a page on this machine that captions and searches albums of similar images.

    Pick an album or upload one. The page shows the captions of several captioners, the image that each caption finds, and
    its rank. It can also choose one caption per image so that all differ. No data leave the machine: gradio's usage
    statistics are off, and the page loads only local files.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl demo
          captionrl demo --images holidays --model MLE=Salesforce/blip-image-captioning-base --model SR=outputs/photos/model
          captionrl demo --port 8000 --no_browser

        The default captioners are those of the embedded world; the default albums are its look-alikes.
    """

    model: list[str] | None = option(
        None,
        repeated=True,
        metavar="NAME=MODEL",
        help="a captioner and its name: a folder, a name on the Hub, or scenes:blip-mle; may be given several times "
        "(default: the embedded MLE, SMILE and SR)",
    )
    scorer: str | None = option(
        None,
        metavar="NAME",
        help="dual encoder that finds images: a folder, a name on the Hub, open_clip:NAME@TAG (default: scenes:siglip-held-out "
        "for embedded captioners, else openai/clip-vit-base-patch32)",
    )
    images: Path | None = option(
        None,
        metavar="DIR",
        help="albums: a folder of images, or of folders of images (default: the embedded world's look-alikes)",
    )
    max_images: int | None = option(None, parse=positive, metavar="N", help="largest album (default: no limit)")
    num_beams: int = option(3, parse=positive, metavar="N", help="beams of the captions side by side")
    num_candidates: int = option(
        16, parse=positive, metavar="N", help="beams from which the captions of an album are chosen"
    )
    max_new_tokens: int = option(40, parse=positive, metavar="N", help="longest caption in tokens")
    device: str | None = device_option()
    host: str = option(
        "127.0.0.1",
        group="server",
        metavar="ADDRESS",
        help="address to listen at",
        shown_default="127.0.0.1, for this machine only",
    )
    allow_host: list[str] = option(
        [],
        repeated=True,
        group="server",
        metavar="NAME",
        help="also answer requests for this name; may be given several times (default: localhost and IP addresses; with "
        "--share, also the public name)",
    )
    port: int | None = option(
        None,
        parse=positive,
        group="server",
        metavar="N",
        help="port to listen at (default: the first free one from 7860)",
    )
    no_browser: bool = option(False, group="server", help="do not open a browser")
    share: bool = option(
        False, group="server", help="make the page public through gradio's servers, for everyone who has the link"
    )


def named_models(given: Sequence[str] | None) -> dict[str, str]:
    """Captioners by name."""
    if not given:
        from hf_captionrl.album.hub_space import EMBEDDED_CAPTIONERS

        return dict(EMBEDDED_CAPTIONERS)
    found: dict[str, str] = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not equals:
            name, model = text.rstrip("/").split("/")[-1], text
        if not name.strip() or not model.strip():
            raise ValueError(f"--model is {text!r}. Use NAME=MODEL, for example SR=outputs/self_retrieval_blip/model.")
        if name in found:
            raise ValueError(f"Two captioners are called {name!r}. Use different names: --model NAME=MODEL.")
        found[name] = model
    return found


def albums_of(folder: Path | None) -> dict[str, list[Any]]:
    """Albums by name, from a folder or from the embedded world."""
    if folder is None:
        from hf_captionrl.scenes import BAG_SIZES, bags, load_scenes

        rows = load_scenes(num_train=0, num_validation=0, num_test=_EMBEDDED_IMAGES)["test"]
        found: dict[str, list[Any]] = {}
        for size in BAG_SIZES:
            for number, bag in enumerate(bags(list(rows["bag_id"]), size), start=1):
                found[f"{size} similar images ({number})"] = [rows[row]["image"] for row in bag]
        return found
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r}. Use a folder of images, or of folders of images."
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


def load_demo(options: DemoOptions) -> AlbumDemo:
    """Load captioners and scorer."""
    names = named_models(options.model)
    albums = albums_of(options.images)

    import torch

    from hf_captionrl.album.hub_space import demo_scorer
    from hf_captionrl.album.page import AlbumDemo
    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.retrieval import load_scorer
    from hf_captionrl.scenes.models import model_path

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return AlbumDemo(
        {name: load_captioner(model_path(model), device=device) for name, model in names.items()},
        load_scorer(model_path(options.scorer or demo_scorer(names)), device=device),
        albums,
        max_images=options.max_images,
        num_beams=options.num_beams,
        num_candidates=options.num_candidates,
        max_new_tokens=options.max_new_tokens,
    )


def serve_demo(options: DemoOptions) -> None:
    """Serve the page until it is interrupted."""
    if importlib.util.find_spec("gradio") is None:
        raise ValueError(
            "The demo needs gradio, which is not installed. Install it with: pip install 'hf-captionrl[demo]'"
        )
    demo = load_demo(options)

    from hf_captionrl.album.page import serve

    def announce(url: str) -> None:
        text = json.dumps({"url": url}) if options.json else f"The demo runs at {url} until you press Ctrl+C."
        print(text, flush=True)

    serve(
        demo,
        host=options.host,
        port=options.port,
        share=options.share,
        browser=not options.no_browser,
        announce=announce,
        allow_hosts=options.allow_host,
    )
