"""Pages of albums: the report of `captionrl album`, one file without a server, and the page of `captionrl demo`.

Captions come from models and names from the user, so both are escaped everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from hf_captionrl.apps.album.album import PROBLEMS, Album, describe_album
from hf_captionrl.apps.album.assignment import Finding, confusions_of
from hf_captionrl.apps.album.options import DemoOptions
from hf_captionrl.apps.album.sources import read_images
from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.language_models import default_device
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.data.images import refuse_outside
from hf_captionrl.data.loading import list_images
from hf_captionrl.evaluation.pages import embedded_image, html_templates, render_html
from hf_captionrl.hub.spaces import EMBEDDED_CAPTIONERS, demo_scorer
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.retrieval import Scorer, image_hash, load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, load_scenes
from hf_captionrl.scenes.truth_checker import mark_caption
from hf_captionrl.utils.io import atomic_write_text
from hf_captionrl.utils.local_server import OwnHosts
from hf_captionrl.utils.model_files import model_path

TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the pages."""

# Longest sides of images: in the report, in the demo, of a wrong find there.
_REPORT_SIDE, _SIDE, _SMALL_SIDE = 512, 256, 72


def _small(image: Image.Image, side: int) -> Image.Image:
    copy = image.copy()
    copy.thumbnail((side, side))
    return copy


# --- The report: images with their captions, ranks and problems ------------------------------------------------------


def write_report(
    path: str | os.PathLike[str],
    album: Album,
    images: Sequence[Any],
    *,
    title: str = "Album",
    max_images: int = 2000,
    progress: Callable[[str, int], Any] = lambda stage, number: None,
) -> Path:
    """Write the page, which has every caption, and pictures of at most `max_images` images, those with problems first."""
    order = sorted(range(len(album.images)), key=lambda row: (not album.images[row].problems, row))
    pictures: dict[int, dict[str, Any]] = {}
    for row in sorted(order[:max_images]):
        with suppress(ImageError):
            if album.images[row].unreadable is None:
                pictures[row] = embedded_image(_small(open_image(images[row]), _REPORT_SIDE))
        progress("writing the page", 1)
    page = render_html(
        TEMPLATES,
        "album",
        title=title,
        summary=album.summary(),
        compares_images=album.compares_images,
        groups=[fact for fact in album.shared if fact.shared],
        problems=PROBLEMS,
        left_out=max(0, len(album.images) - max_images),
        rows=album.rows(),
        pictures=pictures,
    )
    return atomic_write_text(path, page)


# --- The views of the demo: captioners side by side, or one caption per image ----------------------------------------


def compare_captioners(
    captioners: Mapping[str, Captioner],
    scorer: Scorer,
    images: Sequence[Any],
    *,
    batch_size: int = 16,
    **settings: Any,
) -> dict[str, list[Finding]]:
    """Captions of several captioners for the images of an album by beam search, and the image that each caption finds."""
    image_features = read_images(images, scorer, batch_size=batch_size).features
    result = {}
    for name, captioner in captioners.items():
        captions = generate_captions(captioner, images, batch_size=batch_size, do_sample=False, **settings)
        text_features = scorer.text_features(spoken(captions))
        confusions = confusions_of(text_features.__getitem__, np.arange(len(captions) + 1), image_features)
        result[name] = [
            Finding(text, 1 + len(others), others[0] if others else row)
            for row, (text, (others, _)) in enumerate(zip(captions, confusions, strict=True))
        ]
    return result


def album_style() -> str:
    return (TEMPLATES / "demo.css").read_text(encoding="utf-8")


SceneFacts = Mapping[str, Any]
"""The facts of a scene of the embedded world."""


def false_claims(captions: Sequence[str], facts: Sequence[SceneFacts | None] | None) -> list[list[str] | None]:
    """The false claims of captions, each of another image; None for an image whose facts are not known."""
    return [
        None if known is None else [mark.claim.text for mark in mark_caption(text, known) if mark.verdict != "right"]
        for text, known in zip(captions, facts or [None] * len(captions), strict=True)
    ]


def render_comparison(
    images: Sequence[Image.Image],
    findings: Mapping[str, Sequence[Finding]],
    *,
    facts: Sequence[SceneFacts | None] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Captions of several captioners side by side, each with its rank, the image that it finds, and false claims if known."""
    columns = [
        {
            "name": name,
            "found": sum(finding.rank == 1 for finding in mine),
            "findings": mine,
            "wrong": false_claims([finding.caption for finding in mine], facts),
        }
        for name, mine in findings.items()
    ]
    small = [embedded_image(_small(image, _SMALL_SIDE)) for image in images]
    return _render("comparison", images, notes, columns=columns, small=small)


def render_album(
    images: Sequence[Image.Image],
    album: Album,
    *,
    facts: Sequence[SceneFacts | None] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """One caption per image, its copies, the images that it also fits, and false claims if facts are known."""
    copies = [spoken_list(rows) for rows in album.copies]
    fits = [spoken_list(image.confused_with) for image in album.images]
    wrong = false_claims(album.captions, facts)
    return _render("album", images, notes, album=album, summary=album.summary(), copies=copies, fits=fits, wrong=wrong)


def spoken_list(rows: Sequence[int]) -> str:
    """Numbers of images as in a sentence: "1, 2 and 4"."""
    *first, last = [str(row + 1) for row in rows] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _render(view: str, images: Sequence[Image.Image], notes: Sequence[str], **values: Any) -> str:
    template = html_templates(TEMPLATES).get_template("demo.html.j2")
    shown = [embedded_image(_small(image, _SIDE)) for image in images]
    return template.render(view=view, images=shown, notes=notes, **values)


# --- The page of `captionrl demo`: albums, captioners side by side, and one caption per image. The only user of gradio ---

_POLICY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; base-uri 'self'"
"""A browser may load only what this server sends. gradio's scripts are inline and compile templates, which needs the two
unsafe entries."""

_OF_GRADIO = """#frame .grid-wrap { overflow-y: auto !important; }
body:not(.dark) [role=tab][aria-selected=true] { color: var(--primary-700) !important; }
"""
"""Changes of gradio's style: a frame that scrolls, and tabs with enough contrast."""

_INTRO = """# Which image does the caption mean?

Pick an album of similar images, or put your images into the frame (arrow: upload, cross: empty it): they start a new album.
Each caption searches the album for its image. Only a caption that says what makes this image different finds it."""


class AlbumDemo:
    """The functions behind the page."""

    def __init__(
        self,
        captioners: Mapping[str, Captioner],
        scorer: Scorer,
        albums: Mapping[str, Sequence[Any]],
        options: DemoOptions | None = None,
        facts: Mapping[str, SceneFacts] | None = None,
    ) -> None:
        self.facts = facts or {}  # by the hash of the pixels
        # Names of the files of albums begin so; those of uploads do not.
        self._prefix = f"album-{secrets.token_hex(4)}-"
        self.captioners, self.scorer, self.albums = dict(captioners), scorer, dict(albums)
        self.options = options or DemoOptions()
        for name, images in albums.items():
            self._check_number(images, f"the album {name!r}")
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: dict[str, str] = {}

    def album(self, name: str) -> list[Any]:
        """The images of an album, as a page can show them: files become lossless ones that browsers show."""
        if name not in self.albums:
            raise ValueError(f"There is no album {name!r}. Use one of the list.")
        shown = []
        for number, image in enumerate(self.albums[name], start=1):
            key, stem = (str(id(image)), "image") if isinstance(image, Image.Image) else (str(image), Path(image).stem)
            file = self._files.setdefault(key, f"{self._prefix}{len(self._files)}-{stem}.png")
            path = os.path.join(self._own_folder(), file)
            if not os.path.isfile(path):
                try:
                    open_image(image).save(path, compress_level=1)
                except ImageError as error:
                    raise ValueError(
                        f"{self.name_of(image, number)} cannot be used. Remedy: {error.remedy}."
                    ) from None
            shown.append(path)
        return shown

    def uploads(self, images: Sequence[str]) -> list[str]:
        """The images of a frame that are in no album of the list."""
        return [image for image in images if not Path(image).name.startswith(self._prefix)]

    def name_of(self, image: Any, number: int) -> str:
        """The name of a file as people know it, else the number of an image; never a folder."""
        name = Path(image).name if isinstance(image, str | os.PathLike) else f"Image {number}"
        return name.removeprefix(self._prefix).partition("-")[2] if name.startswith(self._prefix) else name

    def compare(self, images: Sequence[Any]) -> str:
        images, small, facts, notes = self._usable(images)
        beams, longest = self.options.num_beams, self.options.max_new_tokens
        found = compare_captioners(self.captioners, self.scorer, images, num_beams=beams, max_new_tokens=longest)
        return render_comparison(small, found, facts=facts, notes=notes)

    def distinct(self, images: Sequence[Any], name: str) -> tuple[str, str]:
        """One caption for each image, as different as the candidates allow: the page, and the path of a table."""
        if name not in self.captioners:
            raise ValueError(f"There is no captioner {name!r}. Use one of {list(self.captioners)}.")
        images, small, facts, notes = self._usable(images)
        names = [self.name_of(image, n) for n, image in enumerate(images, 1)]
        album = describe_album(
            images,
            self.captioners[name],
            self.scorer,
            image_ids=[name if names.count(name) == 1 else f"{n}: {name}" for n, name in enumerate(names, 1)],
            num_beams=self.options.num_candidates,
            max_new_tokens=self.options.max_new_tokens,
        )
        # A new name, because another request may still be reading the last table.
        table = album.to_csv(Path(self._own_folder()) / f"captions-{secrets.token_hex(4)}.csv")
        return render_album(small, album, facts=facts, notes=notes), str(table)

    def _own_folder(self) -> str:
        """Folder of the files that the page shows and offers; deleted with the page."""
        if self._folder is None or not os.path.isdir(self._folder.name):
            folder = os.environ.get("GRADIO_TEMP_DIR") or None  # gradio's folder
            self._folder = tempfile.TemporaryDirectory(prefix="captionrl-album-", dir=folder)
        return self._folder.name

    def _check_number(self, images: Sequence[Any], what: str = "the frame") -> None:
        most = self.options.max_images
        if not images or (most is not None and len(images) > most):
            raise ValueError(
                f"There are {len(images)} images in {what}; the page takes 1 to {most or 'any number'}. Remove some, or raise "
                "--max_images."
            )

    def _usable(
        self, images: Sequence[Any]
    ) -> tuple[list[Any], list[Image.Image], list[SceneFacts | None], list[str]]:
        """The images that can be read, thumbnails and known facts of them, and what is wrong with the others."""
        self._check_number(images)
        usable: list[Any] = []
        small: list[Image.Image] = []
        facts: list[SceneFacts | None] = []
        notes: list[str] = []
        for number, image in enumerate(images, start=1):
            try:
                opened = open_image(image)
            except ImageError as error:  # its text contains a local path
                notes.append(f"{self.name_of(image, number)} cannot be used. Remedy: {error.remedy}.")
                continue
            usable.append(image)
            small.append(_small(opened, _SIDE))
            facts.append(self.facts.get(image_hash(opened)) if self.facts else None)
            del opened
        if not usable:
            raise ValueError(" ".join(notes))
        return usable, small, facts, notes


def build_page(demo: AlbumDemo) -> Any:
    import gradio

    def shown(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ValueError as error:
            raise gradio.Error(str(error), print_exception=False) from None

    def files(frame: list[tuple[str, str | None]] | None) -> list[str]:
        return [path for path, _ in frame or []]

    def pick(name: str) -> Any:
        # Empty the results of the previous album.
        return shown(demo.album, name), "", "", gradio.update(visible=False)

    def upload(frame: Any) -> Any:
        # Uploads start a new album; later ones are added to it.
        return demo.uploads(files(frame)), None, "", "", gradio.update(visible=False)

    def compare(frame: Any) -> Any:
        return shown(demo.compare, files(frame))

    def distinct(frame: Any, name: str) -> Any:
        page, table = shown(demo.distinct, files(frame), name)
        return page, gradio.update(value=table, visible=True)

    names, captioners = list(demo.albums), list(demo.captioners)
    first = demo.album(names[0]) if names else None
    # One request at a time: the captioners share the device and the random state.
    turn: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "captioners"}
    with gradio.Blocks(title="captionrl demo", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gradio.Markdown(_INTRO)
        picker = gradio.Dropdown(
            names, value=names[0] if names else None, label="Album", visible=bool(names), elem_id="picker"
        )
        frame = gradio.Gallery(
            first,
            # The default format would compress the images before the captioners see them.
            format="png",
            type="filepath",
            file_types=["image"],
            sources=["upload"],
            interactive=True,
            buttons=[],
            columns=8,
            fit_columns=False,
            height=178,
            object_fit="contain",
            show_label=False,  # it would cover the first images
            elem_id="frame",
        )
        with gradio.Tab("Side by side", id="compare"):
            button = gradio.Button("Caption and search", variant="primary", elem_id="compare-button")
            compared = gradio.HTML(apply_default_css=False, elem_id="compared")
        with gradio.Tab("One caption per image", id="album"):
            who = gradio.Radio(captioners, value=captioners[-1], label="Captioner", elem_id="captioner")
            album_button = gradio.Button("Choose different captions", variant="primary", elem_id="album-button")
            table = gradio.DownloadButton("Export as CSV", visible=False, elem_id="export-button")
            album = gradio.HTML(apply_default_css=False, elem_id="album")
        picker.input(pick, picker, [frame, compared, album, table], api_name="pick", **turn)
        frame.upload(upload, frame, [frame, picker, compared, album, table], api_name="upload", **turn)
        button.click(compare, frame, compared, api_name="compare", **turn)
        album_button.click(distinct, [frame, who], [album, table], api_name="distinct", **turn)
    return page


class _OnlyFromHere:
    """Answers only to the names of this server, to which --share adds one later, and sends the content security policy."""

    def __init__(self, app: Any, hosts: OwnHosts) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import Headers, MutableHeaders
        from starlette.responses import PlainTextResponse

        kind = scope["type"]
        headers = Headers(scope=scope) if kind in ("http", "websocket") else None
        if headers is not None and not self.hosts.accepts(headers.getlist("host"), headers.getlist("origin")):
            if kind == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            text = "The demo does not answer to this name. Start it with --allow_host NAME to use another name than localhost."
            await PlainTextResponse(text, 403)(scope, receive, send)
            return

        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["content-security-policy"] = _POLICY
            await send(message)

        await self.app(scope, receive, with_policy if kind == "http" else send)


def serve(demo: AlbumDemo, options: DemoOptions, announce: Callable[[str], object] = print) -> None:
    """Serve the page until it is interrupted. Uploads are deleted afterwards, and gradio sends no reports."""
    hosts = OwnHosts.of(options.host, options.allow_host)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM must also delete the uploads
    # Read when gradio is imported, which would ask for a newer version.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        with tempfile.TemporaryDirectory(prefix="captionrl-demo-") as uploads:
            os.environ["GRADIO_TEMP_DIR"] = uploads
            import gradio
            from starlette.middleware import Middleware

            page = build_page(demo)
            try:
                _, local, public = page.launch(
                    server_name=options.host,
                    server_port=options.port,
                    share=options.share,
                    inbrowser=not options.no_browser,
                    quiet=True,
                    ssr_mode=False,
                    prevent_thread_lock=True,
                    max_file_size="20mb",
                    footer_links=[],
                    run_history=False,
                    # System fonts; gradio's themes load others from the network.
                    theme=gradio.themes.Default(
                        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="blue"
                    ).set(button_primary_background_fill_hover="*primary_700"),
                    css=album_style() + _OF_GRADIO,
                    app_kwargs={"middleware": [Middleware(_OnlyFromHere, hosts=hosts)]},
                )
            except OSError as error:
                raise ValueError(
                    f"The page cannot listen at {options.host}, port {options.port or 'from 7860'}: {error} Use another "
                    "--host or --port."
                ) from error
            if public:
                hosts.add(urlsplit(public).hostname or "")
            announce((public or local).rstrip("/"))
            page.block_thread()
    finally:
        signal.signal(signal.SIGTERM, before)


# --- What `captionrl demo` loads -------------------------------------------------------------------------------------


def embedded_rows() -> Any:
    """Scenes of the embedded world, with their facts: three albums each of 3, 5 and 7 look-alikes."""
    return load_scenes(num_train=0, num_validation=0, num_test=45)["test"]


def named_models(given: Sequence[str] | None) -> dict[str, str]:
    if not given:
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
    found: dict[str, list[Any]] = {}
    if folder is None:
        rows = embedded_rows()
        for size in BAG_SIZES:
            for number, bag in enumerate(bags(list(rows["bag_id"]), size), start=1):
                found[f"{size} similar images ({number})"] = [rows[row]["image"] for row in bag]
        return found
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r}. Use a folder of images, or of folders of images."
        )
    listing = list_images(folder)
    listing.report(str(folder))
    listing.report_others(str(folder))
    refuse_outside((str(folder / path) for path in listing.images), folder, str(folder))
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
    names, albums = named_models(options.model), albums_of(options.images)
    device = default_device(options.device)
    captioners = {name: load_captioner(model_path(model), device=device) for name, model in names.items()}
    scorer = load_scorer(model_path(options.scorer or demo_scorer(names)), device=device)
    rows = embedded_rows() if options.images is None else ()
    return AlbumDemo(captioners, scorer, albums, options, {image_hash(row["image"]): row["facts"] for row in rows})


def serve_demo(options: DemoOptions) -> None:
    if importlib.util.find_spec("gradio") is None:
        raise ValueError(
            "The demo needs gradio, which is not installed. Install it with: pip install 'hf-captionrl[demo]'"
        )

    def announce(url: str) -> None:
        text = json.dumps({"url": url}) if options.json else f"The demo runs at {url} until you press Ctrl+C."
        print(text, flush=True)

    serve(load_demo(options), options=options, announce=announce)
