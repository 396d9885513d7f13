"""`captionrl truematch review` and `apply`: the review page, served or exported, and what comes back of it."""

from __future__ import annotations

import argparse
import base64
import functools
import json
import random
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.dataset_options import load_split
from hf_captionrl.local_server import OwnHosts
from hf_captionrl.truematch.build import print_status
from hf_captionrl.truematch.decisions import REASONS, DecisionWriter, bag_id, check_decision
from hf_captionrl.truematch.files import (
    DATA_FOLDER,
    DECISIONS_FILE,
    TrueMatch,
    apply_decisions,
    bags_fingerprint,
    load_truematch,
)

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.truematch.review_page import ReviewBag

__all__ = ["ReviewServer", "apply", "review", "review_images"]

_MAX_BODY = 2**16
_ADDRESS = "127.0.0.1"  # nobody else's business, and never anything else


def review_images(found: TrueMatch, arguments: argparse.Namespace) -> datasets.Dataset:
    """The images and captions of the bags, from the benchmark or from where the arguments say."""
    from hf_captionrl.data import load_captions
    from hf_captionrl.data.caption_columns import undecoded

    rows: Any
    if arguments.dataset is not None:
        rows = load_split(arguments, quarantine_path=found.folder / "quarantine.jsonl", require_captions=False).dataset
    elif found.manifest.get("embed_images"):
        rows = load_captions(str((found.folder / DATA_FOLDER).resolve()), split="test", require_captions=False)
    else:
        raise ValueError(
            f"{found.folder} was built without images. Say where they are: --dataset {found.manifest['source']} and its "
            "options, as for the build."
        )
    row_of = {str(image_id): row for row, image_id in enumerate(rows["image_id"][:])}
    wanted = sorted({image_id for bag in found.bags.bags for image_id in bag})
    missing = [image_id for image_id in wanted if image_id not in row_of]
    if missing:
        raise ValueError(
            f"{len(missing)} images of the bags are not in the data set, such as {missing[0]!r}. Check --dataset and --split."
        )
    return undecoded(rows.select([row_of[image_id] for image_id in wanted]))


class _Pages:
    """What the page shows, made from the benchmark and its images."""

    def __init__(self, folder: Path, rows: datasets.Dataset) -> None:
        self.folder = folder
        self.rows = rows
        self.ids = [str(image_id) for image_id in rows["image_id"][:]]
        self.row_of = {image_id: str(row) for row, image_id in enumerate(self.ids)}
        self.captions = [list(captions) for captions in rows["captions"][:]]
        # A few at a time: a benchmark of thousands of photographs would not fit into memory.
        self.source = functools.lru_cache(maxsize=64)(self._source)

    def _source(self, row: int) -> str:
        from hf_captionrl.data import open_image
        from hf_captionrl.reports.gallery import embedded_image

        return str(embedded_image(open_image(self.rows[row]["image"]))["source"])

    def file(self, row: int) -> tuple[str, bytes]:
        """Type and content of an image."""
        head, _, data = self.source(row).partition(";base64,")
        return head.removeprefix("data:"), base64.b64decode(data)

    def render(self, token: str | None) -> str:
        """The page as things stand now; without a token it holds its images."""
        from hf_captionrl.truematch.review_page import ReviewImage, render_review

        found = load_truematch(self.folder)
        images = {
            str(row): ReviewImage(image_id, self._source(row) if token is None else f"image/{row}", self.captions[row])
            for row, image_id in enumerate(self.ids)
        }
        return render_review(
            f"Bags of {found.manifest['card']['dataset_id']}",
            self._bags(found),
            images,
            reasons=REASONS,
            decisions={bag: {"decision": d.decision, "reason": d.reason} for bag, d in found.last.items()},
            fingerprint=bags_fingerprint(found.bags),
            token=token,
        )

    def _bags(self, found: TrueMatch) -> list[ReviewBag]:
        """Small bags first, in random order within a size: a review that is broken off has seen a fair sample."""
        from hf_captionrl.truematch.review_page import ReviewBag

        made = [
            ReviewBag(bag_id(bag), similarity, [self.row_of[image_id] for image_id in bag])
            for bag, similarity in zip(found.bags.bags, found.bags.similarities, strict=True)
        ]
        random.Random(int(found.manifest["seed"])).shuffle(made)
        return sorted(made, key=lambda bag: len(bag.images))


class ReviewServer:
    """Serves the review page on this machine only; to be used as a context.

    A decision is answered when it is on the disk. Each needs the token that stands in the page, so that no other page of the
    browser can decide anything.

    Args:
        folder: The benchmark.
        rows: From [`review_images`].
        port: 0 for any free one.

    Attributes:
        address: Where the page is.
    """

    def __init__(self, folder: Path, rows: datasets.Dataset, port: int = 0) -> None:
        self._pages = _Pages(folder, rows)
        self._known = {bag_id(bag) for bag in load_truematch(folder).bags.bags}
        self._token = secrets.token_urlsafe(24)
        self._hosts = OwnHosts()
        self._lock = threading.Lock()
        self._writer = DecisionWriter(folder / DECISIONS_FILE)
        try:
            self._server = ThreadingHTTPServer((_ADDRESS, port), self._handler())
        except (OSError, OverflowError) as error:
            self._writer.close()
            raise ValueError(f"Port {port} cannot be had ({error}). Pass --port 0 for any free one.") from None
        self.port = self._server.server_address[1]
        self.address = f"http://{_ADDRESS}:{self.port}/"

    def decide(self, value: Any) -> None:
        """Write a decision."""
        decision = check_decision(value, "The decision")
        if decision.bag not in self._known:
            raise ValueError(f"There is no bag {decision.bag!r:.60} here. Reload the page.")
        with self._lock:
            self._writer.append(decision)

    def serve(self) -> None:
        """Answer until [`close`] is called from another thread, or Ctrl-C."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop answering, and let others write the decisions."""
        self._server.server_close()
        self._writer.close()

    def __enter__(self) -> ReviewServer:
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def _is_ours(self) -> bool:
                if server._hosts.accepts(self.headers.get_all("Host", []), self.headers.get_all("Origin", [])):
                    return True
                self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"This page is served to 127.0.0.1 only.")
                return False

            def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("X-Frame-Options", "DENY")
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                if not self._is_ours():
                    return
                name, _, number = self.path.strip("/").partition("/")
                pages = server._pages
                if self.path == "/":
                    page = pages.render(server._token).encode("utf-8", "xmlcharrefreplace")
                    self._answer(HTTPStatus.OK, "text/html", page)
                elif name == "image" and _number(number, len(pages.ids) - 1) is not None:
                    with server._lock:  # a data set is not made for threads
                        kind, body = pages.file(int(number))
                    self._answer(HTTPStatus.OK, kind, body)
                else:
                    self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.")

            def do_POST(self) -> None:
                if not self._is_ours():
                    return
                length = _number(self.headers.get("Content-Length", ""), _MAX_BODY)
                given = self.headers.get("X-Review-Token", "")
                if self.path != "/decisions" or length is None:
                    self._answer(HTTPStatus.BAD_REQUEST, "text/plain", b"This is no decision.")
                elif not secrets.compare_digest(given.encode(), server._token.encode()):
                    self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"The review was started again. Reload the page.")
                else:
                    try:
                        server.decide(json.loads(self.rfile.read(length)))
                    except (ValueError, RecursionError) as error:
                        self._answer(HTTPStatus.BAD_REQUEST, "text/plain", str(error).encode("utf-8", "replace"))
                    except OSError as error:
                        message = f"it could not be written ({error})"
                        self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", message.encode())
                    else:
                        self._answer(HTTPStatus.OK, "application/json", b"{}")

        return Handler


def _number(text: str, largest: int) -> int | None:
    """A number of a request, or None if it is none or too large; Python refuses to read one of thousands of digits."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 12 or int(text) > largest:
        return None
    return int(text)


def _finish(arguments: argparse.Namespace, decisions: Path | None = None) -> None:
    """Write what follows from the decisions, and say how far the review is."""
    from hf_captionrl.truematch.card import write_truematch_card

    found, added = apply_decisions(arguments.folder, decisions)
    write_truematch_card(found)
    if arguments.json:
        print(json.dumps({"added": added, "bags": found.status(), "fingerprint": bags_fingerprint(found.kept)}))
        return
    print(f"{arguments.folder}: {added} decisions taken over" if decisions is not None else str(arguments.folder))
    print_status(found)


def apply(arguments: argparse.Namespace) -> None:
    """Take over decisions, and write `kept.json` and the card anew."""
    _finish(arguments, arguments.decisions)


def review(arguments: argparse.Namespace) -> None:
    """Serve the review page until Ctrl-C, or write it as one file."""
    from hf_captionrl.io import atomic_write_text

    found = load_truematch(arguments.folder)
    rows = review_images(found, arguments)
    if arguments.export is not None:
        if arguments.export.is_dir():
            raise ValueError(f"--export {str(arguments.export)!r} is a folder. Name a file, such as review.html.")
        atomic_write_text(arguments.export, _Pages(arguments.folder, rows).render(None))
        way_on = f"captionrl truematch apply {arguments.folder} --decisions decisions.jsonl"
        said = {"page": str(arguments.export), "bags": len(found.bags.bags), "then": way_on}
        print(
            json.dumps(said)
            if arguments.json
            else f"{arguments.export}: {len(found.bags.bags)} bags. Send it to whoever decides; what they download:\n  {way_on}"
        )
        return
    server = ReviewServer(arguments.folder, rows, arguments.port)
    try:
        # The result comes at the end, and is all that stands on stdout with --json.
        print(
            f"{len(found.bags.bags)} bags at {server.address} (Ctrl-C ends the review; it goes on where it stopped)",
            file=sys.stderr if arguments.json else sys.stdout,
            flush=True,
        )
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    _finish(arguments)
