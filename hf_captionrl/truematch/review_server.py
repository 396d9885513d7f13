"""Server of the review page, on this machine only."""

from __future__ import annotations

import base64
import functools
import json
import random
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.local_server import OwnHosts
from hf_captionrl.truematch.benchmark_files import DECISIONS_FILE, TrueMatch, bags_fingerprint, load_truematch
from hf_captionrl.truematch.decisions import REASONS, DecisionWriter, bag_id, check_decision

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.truematch.review_page import ReviewBag

__all__ = ["ReviewPages", "ReviewServer"]

_MAX_BODY = 2**16
_ADDRESS = "127.0.0.1"  # never reachable from other machines


class ReviewPages:
    """Renders the review page from the benchmark and its images."""

    def __init__(self, folder: Path, rows: datasets.Dataset) -> None:
        self.folder = folder
        self.rows = rows
        self.ids = [str(image_id) for image_id in rows["image_id"][:]]
        self.row_of = {image_id: str(row) for row, image_id in enumerate(self.ids)}
        self.captions = [list(captions) for captions in rows["captions"][:]]
        # Thousands of photographs would not fit into memory.
        self.source = functools.lru_cache(maxsize=64)(self._source)

    def _source(self, row: int) -> str:
        from hf_captionrl.data import open_image
        from hf_captionrl.reports.gallery import embedded_image

        return str(embedded_image(open_image(self.rows[row]["image"]))["source"])

    def file(self, row: int) -> tuple[str, bytes]:
        """Media type and bytes of an image."""
        head, _, data = self.source(row).partition(";base64,")
        return head.removeprefix("data:"), base64.b64decode(data)

    def render(self, token: str | None) -> str:
        """The page with the current decisions; without a token it contains its images."""
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
        """Small bags first, in random order within a size, so that an unfinished review is a fair sample."""
        from hf_captionrl.truematch.review_page import ReviewBag

        made = [
            ReviewBag(bag_id(bag), similarity, [self.row_of[image_id] for image_id in bag])
            for bag, similarity in zip(found.bags.bags, found.bags.similarities, strict=True)
        ]
        random.Random(int(found.manifest["seed"])).shuffle(made)
        return sorted(made, key=lambda bag: len(bag.images))


class ReviewServer:
    """Serves the review page on this machine only; a context manager.

    The server answers a request when the decision is on disk. Requests need the token of the page, so that other pages in the
    browser cannot decide.
    """

    def __init__(self, folder: Path, rows: datasets.Dataset, port: int = 0) -> None:
        self._pages = ReviewPages(folder, rows)
        self._known = {bag_id(bag) for bag in load_truematch(folder).bags.bags}
        self._token = secrets.token_urlsafe(24)
        self._hosts = OwnHosts()
        self._lock = threading.Lock()
        self._writer = DecisionWriter(folder / DECISIONS_FILE)
        try:
            self._server = ThreadingHTTPServer((_ADDRESS, port), self._handler())
        except (OSError, OverflowError) as error:
            self._writer.close()
            raise ValueError(f"Port {port} is not available ({error}). Use --port 0 for any free port.") from None
        self.port = self._server.server_address[1]
        self.address = f"http://{_ADDRESS}:{self.port}/"

    def decide(self, value: Any) -> None:
        """Check a decision and write it."""
        decision = check_decision(value, "The decision")
        if decision.bag not in self._known:
            raise ValueError(f"There is no bag {decision.bag!r:.60} in this benchmark. Reload the page.")
        with self._lock:
            self._writer.append(decision)

    def serve(self) -> None:
        """Answer requests until Ctrl-C, or until another thread calls [`close`]."""
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """Stop the server, and unlock the decisions."""
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
                    with server._lock:  # a data set is not thread-safe
                        kind, body = pages.file(int(number))
                    self._answer(HTTPStatus.OK, kind, body)
                else:
                    self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"Not found.")

            def do_POST(self) -> None:
                if not self._is_ours():
                    return
                length = _number(self.headers.get("Content-Length", ""), _MAX_BODY)
                given = self.headers.get("X-Review-Token", "")
                if self.path != "/decisions" or length is None:
                    self._answer(HTTPStatus.BAD_REQUEST, "text/plain", b"This is not a decision.")
                elif not secrets.compare_digest(given.encode(), server._token.encode()):
                    self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"The review was restarted. Reload the page.")
                else:
                    try:
                        server.decide(json.loads(self.rfile.read(length)))
                    except (ValueError, RecursionError) as error:
                        self._answer(HTTPStatus.BAD_REQUEST, "text/plain", str(error).encode("utf-8", "replace"))
                    except OSError as error:
                        message = f"the decision could not be written ({error})"
                        self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", message.encode())
                    else:
                        self._answer(HTTPStatus.OK, "application/json", b"{}")

        return Handler


def _number(text: str, largest: int) -> int | None:
    """A whole number of a request, or None if it is invalid or too large; Python refuses numbers of thousands of digits."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 12 or int(text) > largest:
        return None
    return int(text)
