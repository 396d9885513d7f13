"""`captionrl demo`: options of the demo page, and what it loads."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from PIL import Image

from hf_captionrl.apps.album.album import describe_album
from hf_captionrl.apps.album.distinct import Finding, found_images
from hf_captionrl.apps.album.result import Album
from hf_captionrl.apps.album.sources import read_images
from hf_captionrl.captioners import Captioner
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.data.options import device_option
from hf_captionrl.evaluation.pages import TEMPLATES, embedded_image, html_templates
from hf_captionrl.metrics.suites import spoken
from hf_captionrl.retrieval import Scorer
from hf_captionrl.utils.local_server import OwnHosts
from hf_captionrl.utils.options import CommandOptions, option, positive

# --- Captions of several captioners side by side, and the image that each caption finds ------------------------------


def compare_captioners(
    captioners: Mapping[str, Captioner],
    scorer: Scorer,
    images: Sequence[Any],
    *,
    num_beams: int = 3,
    max_new_tokens: int = 40,
    batch_size: int = 16,
) -> dict[str, list[Finding]]:
    """Captions of several captioners for the images of an album, and the image that each caption finds."""
    if len(images) == 0:
        raise ValueError("The album has no images. Use at least one.")
    image_features = read_images(images, scorer, batch_size=batch_size).features
    result = {}
    for name, captioner in captioners.items():
        captions = generate_captions(
            captioner,
            images,
            batch_size=batch_size,
            do_sample=False,
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
        )
        rank, found = found_images(scorer.text_features(spoken(captions)), image_features)
        result[name] = [Finding(*row) for row in zip(captions, rank.tolist(), found.tolist(), strict=True)]
    return result


# --- Captions of an album as HTML for a page: captioners side by side, or one caption per image ----------------------
# Captions come from models and names from the user, so both are escaped everywhere.

_SIDE = 256
_SMALL_SIDE = 72
"""Longest side of an image, and of the thumbnail of a wrong image that was found, in pixels."""


def album_style() -> str:
    """The style of both views."""
    return (TEMPLATES / "album.css").read_text(encoding="utf-8")


def album_thumbnail(image: Image.Image) -> Image.Image:
    """An image at the size of the pages."""
    copy = image.copy()
    copy.thumbnail((_SIDE, _SIDE))
    return copy


def render_comparison(images: Sequence[Image.Image], findings: Mapping[str, Sequence[Finding]]) -> str:
    """Captions of several captioners side by side, each with its rank and the image that it finds."""
    for name, mine in findings.items():
        if len(mine) != len(images):
            raise ValueError(f"{name!r} has {len(mine)} findings for {len(images)} images. Use one per image.")
    columns = [
        {"name": name, "found": sum(finding.rank == 1 for finding in mine), "findings": mine}
        for name, mine in findings.items()
    ]
    small = [_shown(image, _SMALL_SIDE) for image in images]
    return _render("comparison", images, columns=columns, small=small)


def render_album(images: Sequence[Image.Image], album: Album) -> str:
    """One caption per image, its copies, and the images that it also fits."""
    if len(album.images) != len(images):
        raise ValueError(f"There are {len(album.images)} captions for {len(images)} images. Use one per image.")
    copies = [spoken_list([row + 1 for row in rows]) for rows in album.copies]
    fits = [
        spoken_list([other + 1 for other in image.confused_with]) if image.confused_with else ""
        for image in album.images
    ]
    return _render("album", images, album=album, summary=album.summary(), copies=copies, fits=fits)


def spoken_list(items: Sequence[object]) -> str:
    """Items as in a sentence: "a, b and c"."""
    *before, last = map(str, items)
    return f"{', '.join(before)} and {last}" if before else last


def _shown(image: Image.Image, side: int) -> dict[str, Any]:
    copy = image.copy()
    copy.thumbnail((side, side))
    return embedded_image(copy)


def _render(view: str, images: Sequence[Image.Image], **values: Any) -> str:
    environment = html_templates()
    shown = [_shown(image, _SIDE) for image in images]
    return environment.get_template("album.html.j2").render(view=view, images=shown, **values)


# --- The page of `captionrl demo`: albums, captioners side by side, and one caption per image. The only user of gradio ---

_POLICY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; object-src 'none'; base-uri 'self'"
"""A browser may load only what this server sends. gradio's scripts are inline and compile templates, which needs the two
unsafe entries."""

_REFUSAL = (
    b"The demo does not answer to this name. Start it with --allow_host NAME to use another name than localhost."
)

_INTRO = """# Which image does the caption mean?

Pick an album of similar images, or put your images into the frame (arrow: upload, cross: empty it). Each caption searches the album for its image. Only a
caption that says what makes this image different finds it."""


class AlbumDemo:
    """The functions behind the page.

    `max_images=None` is no limit.
    """

    def __init__(
        self,
        captioners: Mapping[str, Captioner],
        scorer: Scorer,
        albums: Mapping[str, Sequence[Any]],
        *,
        max_images: int | None = None,
        num_beams: int = 3,
        num_candidates: int = 16,
        max_new_tokens: int = 40,
    ) -> None:
        if not captioners:
            raise ValueError("There is no captioner to show. Use at least one.")
        for name, images in albums.items():
            if not images or (max_images is not None and len(images) > max_images):
                raise ValueError(
                    f"The album {name!r} has {len(images)} images; the page takes 1 to {max_images or 'any number'}. Remove "
                    "some, or raise --max_images."
                )
        self.captioners = dict(captioners)
        self.scorer = scorer
        self.albums = dict(albums)
        self.max_images = max_images
        self.num_beams = num_beams
        self.num_candidates = num_candidates
        self.max_new_tokens = max_new_tokens
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._shown: dict[str, str] = {}

    def album(self, name: str) -> list[Any]:
        """The images of an album, as a page can show them."""
        if name not in self.albums:
            raise ValueError(f"There is no album {name!r}. Use one of the list.")
        images = self.albums[name]
        self._check_number(images)
        return [
            image if isinstance(image, Image.Image) else self._shown_file(image, number)
            for number, image in enumerate(images, start=1)
        ]

    def compare(self, images: Sequence[Any]) -> str:
        """All captioners side by side."""
        small = self._thumbnails(images)
        settings = {"num_beams": self.num_beams, "max_new_tokens": self.max_new_tokens}
        return render_comparison(small, compare_captioners(self.captioners, self.scorer, images, **settings))

    def distinct(self, images: Sequence[Any], name: str) -> str:
        """One caption for each image, as different as the candidates allow."""
        return self.distinct_table(images, name)[0]

    def distinct_table(self, images: Sequence[Any], name: str) -> tuple[str, str]:
        """One caption for each image, as different as the candidates allow: the page, and the path of a table."""
        if name not in self.captioners:
            raise ValueError(f"There is no captioner {name!r}. Use one of {list(self.captioners)}.")
        small = self._thumbnails(images)
        settings: dict[str, Any] = {"num_beams": self.num_candidates, "num_samples": 0}
        names = [
            Path(image).name if isinstance(image, str | os.PathLike) else str(n) for n, image in enumerate(images, 1)
        ]
        ids = [name if names.count(name) == 1 else f"{n}: {name}" for n, name in enumerate(names, 1)]
        album = describe_album(
            images, self.captioners[name], self.scorer, image_ids=ids, max_new_tokens=self.max_new_tokens, **settings
        )
        # A new name, because another request may still be reading the last table.
        table = album.to_csv(Path(self._own_folder()) / f"captions-{secrets.token_hex(4)}.csv")
        return render_album(small, album), str(table)

    def _own_folder(self) -> str:
        """Folder of the files that the page shows and offers; deleted with the page."""
        if self._folder is None:
            folder = os.environ.get("GRADIO_TEMP_DIR") or None  # gradio's folder
            self._folder = tempfile.TemporaryDirectory(prefix="captionrl-album-", dir=folder)
        return self._folder.name

    def _check_number(self, images: Sequence[Any]) -> None:
        if not images or (self.max_images is not None and len(images) > self.max_images):
            most = self.max_images or "any number"
            raise ValueError(f"There are {len(images)} images in the frame; the page takes 1 to {most}.")

    def _thumbnails(self, images: Sequence[Any]) -> list[Image.Image]:
        """Opens one image at a time, to keep memory low."""
        self._check_number(images)
        return [album_thumbnail(_open(image, number)) for number, image in enumerate(images, start=1)]

    def _shown_file(self, image: Any, number: int) -> str:
        """An image as a lossless file that browsers show; the captioners read its pixels."""
        path = self._shown.get(str(image))
        if path is None or not os.path.isfile(path):
            path = os.path.join(self._own_folder(), f"{len(self._shown)}.png")
            _open(image, number).save(path, compress_level=1)
            self._shown[str(image)] = path
        return path


def _open(image: Any, number: int) -> Image.Image:
    try:
        return open_image(image)
    except ImageError as error:  # its text contains a local path
        raise ValueError(f"Image {number} cannot be used. Remedy: {error.remedy}.") from None


def build_page(demo: AlbumDemo) -> Any:
    """The page."""
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

    def compare(frame: Any) -> Any:
        return shown(demo.compare, files(frame))

    def distinct(frame: Any, name: str) -> Any:
        page, table = shown(demo.distinct_table, files(frame), name)
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
        button.click(compare, frame, compared, api_name="compare", **turn)
        album_button.click(distinct, [frame, who], [album, table], api_name="distinct", **turn)
    return page


class _OnlyFromHere:
    """Answers only to the names of this server, and sends the content security policy."""

    def __init__(self, app: Any, hosts: OwnHosts) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_ours(scope["headers"]):
            await self._refuse(scope["type"], send)
            return

        async def with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", _POLICY.encode())
                message = {**message, "headers": [*message.get("headers", ()), policy]}
            await send(message)

        await self.app(scope, receive, with_policy if scope["type"] == "http" else send)

    def _is_ours(self, headers: Any) -> bool:
        def values(name: bytes) -> list[str]:
            return [value.decode("latin-1") for key, value in headers if key == name]

        return self.hosts.accepts(values(b"host"), values(b"origin"))

    async def _refuse(self, kind: str, send: Any) -> None:
        if kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(_REFUSAL)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": _REFUSAL})


def serve(
    demo: AlbumDemo,
    *,
    host: str,
    port: int | None,
    share: bool = False,
    browser: bool = False,
    announce: Any = print,
    allow_hosts: Sequence[str] = (),
) -> None:
    """Serve the page until it is interrupted. Uploads are deleted afterwards, and gradio sends no reports."""
    # SIGTERM must also delete the uploads.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _serve(demo, host, port, share, browser, announce, own_hosts(host, allow_hosts))
    finally:
        signal.signal(signal.SIGTERM, before)


def own_hosts(host: str, allow_hosts: Sequence[str] = ()) -> OwnHosts:
    """Names that the demo answers to."""
    is_local = host in ("127.0.0.1", "localhost", "::1")
    return OwnHosts([host, *allow_hosts], any_address=not is_local)


def _serve(
    demo: AlbumDemo, host: str, port: int | None, share: bool, browser: bool, announce: Any, hosts: OwnHosts
) -> None:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = (
        "False"  # read when gradio is imported, which would ask for a newer version
    )
    with tempfile.TemporaryDirectory(prefix="captionrl-demo-") as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads
        import gradio
        from starlette.middleware import Middleware

        page = build_page(demo)
        try:
            _, local, public = page.launch(
                server_name=host,
                server_port=port,
                share=share,
                inbrowser=browser,
                quiet=True,
                ssr_mode=False,
                prevent_thread_lock=True,
                max_file_size="20mb",
                footer_links=[],
                run_history=False,
                # System fonts; gradio's themes load others from the network.
                theme=gradio.themes.Default(
                    font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="blue"
                ),
                css=album_style() + "#frame .grid-wrap { overflow-y: auto !important; }",
                app_kwargs={"middleware": [Middleware(_OnlyFromHere, hosts=hosts)]},
            )
        except OSError as error:
            raise ValueError(
                f"The page cannot listen at {host}, port {port or 'from 7860'}: {error} Use another --host or --port."
            ) from error
        if public:
            hosts.add(urlsplit(public).hostname or "")
        announce((public or local).rstrip("/"))
        page.block_thread()


# --- `captionrl demo`: options of the demo page, and what it loads ---------------------------------------------------

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
        from hf_captionrl.hub.spaces import EMBEDDED_CAPTIONERS

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
    from hf_captionrl.data.images import refuse_outside
    from hf_captionrl.data.loading import list_images

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

    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.hub.spaces import demo_scorer
    from hf_captionrl.retrieval import load_scorer
    from hf_captionrl.utils.model_files import model_path

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
