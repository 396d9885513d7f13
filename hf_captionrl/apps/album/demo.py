"""`captionrl demo`, which is also the program of the demo's Space: captioners side by side."""

from __future__ import annotations

import importlib.util
import json
import os
import posixpath
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hf_captionrl.apps.album.assignment import confusions_of
from hf_captionrl.apps.album.options import DemoOptions
from hf_captionrl.apps.album.sources import read_images
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.language_model_clients import default_device
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.data.images import refuse_outside
from hf_captionrl.data.loading import list_images
from hf_captionrl.hub.spaces import EMBEDDED_CAPTIONERS, demo_scorer
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval import Scorer, load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, load_scenes
from hf_captionrl.utils.model_files import model_path

_INTRO = """# Which image does the caption mean?

Pick an album of similar images, or upload one. Each caption searches the album for its image. Only a caption that says what
makes this image different finds it; it may still be false. Rank 1: the caption fits no other image of the album as well."""

# Gradio makes few pictures as wide as the page, and cuts them at the height of the frame.
_STYLE = """#frame .grid-container { grid-template-columns: repeat(auto-fill, 88px); grid-auto-rows: 88px; }
#compared { padding: 0; overflow-x: auto; }
#compared table { font-size: 13px; }
#compared th, #compared td { padding: 4px; text-align: start; vertical-align: top; }"""


@dataclass
class Demo:
    """What the page computes: captions of `captioners` by beam search, and the images that they find by `scorer`."""

    captioners: dict[str, Captioner]
    scorer: Scorer
    albums: dict[str, list[Any]]
    num_beams: int = 3

    def compare(self, images: Sequence[Any]) -> pd.DataFrame:
        """The caption of each captioner for each image, the rank of the image, and the number of the one that it finds."""
        features = read_images(images, self.scorer).features
        numbers = range(1, len(images) + 1)
        columns = {}
        for name, captioner in self.captioners.items():
            captions = generate_captions(
                captioner, images, do_sample=False, num_beams=self.num_beams, max_new_tokens=40
            )
            texts = self.scorer.text_features(spoken(captions))
            found = confusions_of(texts.__getitem__, np.arange(len(images) + 1), features)
            ranks = [rank for rank, _, _ in found]  # a tie counts against the caption
            finds = [others[0] + 1 if others else own for own, (_, _, others) in zip(numbers, found, strict=True)]
            columns[name] = pd.DataFrame({"caption": captions, "rank": ranks, "finds": finds}, numbers)
        return pd.concat(columns, axis=1)


def build_page(demo: Demo) -> Any:
    import gradio

    def start(images: Sequence[Any]) -> tuple[Any, ...]:
        """The images that can be used, their pictures with numbers, and empty results."""
        usable, pictures = [], []
        for image in images:
            try:
                picture = open_image(image).copy()
            except ImageError as error:  # its text has the folder
                gradio.Warning(f"{Path(image).name} cannot be used. Remedy: {error.remedy}.")
                continue
            picture.thumbnail((512, 512))
            usable.append(image)
            pictures.append((picture, str(len(usable))))
        return usable, pictures, ""

    names = list(demo.albums)
    # One request at a time: the captioners share the device and the random state.
    turn: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "captioners"}
    with gradio.Blocks(title="captionrl demo", analytics_enabled=False) as page:
        gradio.Markdown(_INTRO)
        images = gradio.State([])
        with gradio.Row():
            picker = gradio.Dropdown(names, value=names[0], label="Album", elem_id="picker")
            upload = gradio.UploadButton(
                "Upload an album", file_count="multiple", file_types=["image"], elem_id="upload"
            )
        shown = gradio.Gallery(format="png", height=240, show_label=False, interactive=False, elem_id="frame")
        compare_button = gradio.Button("Caption and search", variant="primary", elem_id="compare-button")
        compared = gradio.HTML(elem_id="compared")
        results = [images, shown, compared]
        for event, source in ((page.load, picker), (picker.input, picker)):
            event(lambda name: start(demo.albums[name]), source, results, **turn)
        upload.upload(start, upload, results, **turn)

        def table(images: Sequence[Any]) -> str:  # a line per image and captioner fits on a telephone
            lines = demo.compare(images).rename_axis(index="image", columns=["captioner", None])
            return str(lines.stack(0, future_stack=True).reset_index().to_html(index=False))

        compare_button.click(table, images, compared, **turn)
    return page


def serve(demo: Demo, options: DemoOptions) -> None:
    """Serve the page until it is interrupted. Uploads are deleted afterwards, and gradio sends no reports."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM must also delete the uploads
    # Read when gradio is imported, which would ask for a newer version.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        with tempfile.TemporaryDirectory(prefix="captionrl-demo-") as uploads:
            os.environ["GRADIO_TEMP_DIR"] = uploads
            import gradio
            from starlette.middleware import Middleware
            from starlette.middleware.trustedhost import TrustedHostMiddleware

            # Another site whose name points to this machine (DNS rebinding) gets no answer.
            hosts = ["127.0.0.1", "localhost"] if options.host in ("127.0.0.1", "localhost") else ["*"]
            page = build_page(demo)
            _, url, _ = page.launch(
                server_name=options.host,
                server_port=options.port,
                inbrowser=not options.no_browser,
                quiet=True,
                ssr_mode=False,
                prevent_thread_lock=True,
                footer_links=[],
                run_history=False,
                css=_STYLE,
                # System fonts; gradio's themes load others from the network.
                theme=gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
                app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]},
            )
            text = f"The demo runs at {url.rstrip('/')} until you press Ctrl+C."
            print(json.dumps({"url": url.rstrip("/")}) if options.json else text, flush=True)
            page.block_thread()
    finally:
        signal.signal(signal.SIGTERM, before)


def named_models(values: Sequence[str] | None) -> dict[str, str]:
    """Captioners by name, from NAME=MODEL; without any, those of the embedded world."""
    if not values:
        return dict(EMBEDDED_CAPTIONERS)
    pairs = [value.partition("=") for value in values]
    models = {name: model for name, _, model in pairs}
    if not all(name.strip() and model.strip() for name, model in models.items()) or len(models) < len(pairs):
        raise ValueError(f"--model is {list(values)}. Use NAME=MODEL, each with another name.")
    return models


def albums_of(folder: Path | None) -> dict[str, list[Any]]:
    """Albums by name: each folder of images below `folder`, or the look-alikes of the embedded world."""
    if folder is None:
        rows = load_scenes(num_train=0, num_validation=0, num_test=45)["test"]
        return {
            f"{size} similar images ({number})": [rows[row]["image"] for row in bag]
            for size in BAG_SIZES
            for number, bag in enumerate(bags(list(rows["bag_id"]), size), start=1)
        }
    albums: dict[str, list[Any]] = {}
    for path in list_images(folder)[0]:
        albums.setdefault(posixpath.dirname(path) or folder.resolve().name, []).append(str(folder / path))
    if not albums:
        raise FileNotFoundError(f"There are no images in {str(folder)!r}. Use a folder of images, or of such folders.")
    refuse_outside((path for paths in albums.values() for path in paths), folder, str(folder))
    return albums


def load_demo(options: DemoOptions) -> Demo:
    models, albums = named_models(options.model), albums_of(options.images)
    device = default_device(options.device)
    captioners = {name: load_captioner(model_path(model), device=device) for name, model in models.items()}
    scorer = load_scorer(model_path(options.scorer or demo_scorer(models)), device=device)
    return Demo(captioners, scorer, albums, options.num_beams)


def serve_demo(options: DemoOptions) -> None:
    if importlib.util.find_spec("gradio") is None:
        raise ValueError("The demo needs gradio. Install it with: pip install 'hf-captionrl[demo]'")
    serve(load_demo(options), options)
