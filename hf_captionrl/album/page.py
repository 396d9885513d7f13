"""The page of `captionrl demo`: albums, captioners side by side, and one caption per image. The only user of gradio."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

from hf_captionrl.album.album import describe_album
from hf_captionrl.album.captions import compare_captioners
from hf_captionrl.album.html import album_style, album_thumbnail, render_album, render_comparison
from hf_captionrl.captioners import Captioner
from hf_captionrl.data import ImageError, open_image
from hf_captionrl.local_server import OwnHosts
from hf_captionrl.retrieval import Scorer

__all__ = ["AlbumDemo", "build_page", "own_hosts", "serve"]

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
