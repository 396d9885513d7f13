"""`captionrl truematch review` and `apply`: review the bags, and apply the decisions."""

from __future__ import annotations

import base64
import functools
import json
import random
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.apps.truematch.build import (
    DECISIONS_FILE,
    REASONS,
    DecisionWriter,
    TrueMatch,
    apply_decisions,
    bag_id,
    bags_fingerprint,
    check_decision,
    load_truematch,
    print_status,
    write_truematch_card,
)
from hf_captionrl.data import load_captions, open_image
from hf_captionrl.data.columns import undecoded
from hf_captionrl.data.options import DatasetOptions, load_split
from hf_captionrl.evaluation.pages import embedded_image, render_html
from hf_captionrl.utils.io import atomic_write_text
from hf_captionrl.utils.local_server import OwnHosts

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.apps.truematch.options import ApplyOptions, ReviewOptions


# --- The review page: served locally, or as one file without a server ------------------------------------------------
# The page gets captions as JSON and shows them as text, never as markup. Its content security policy allows only the page's
# script and no external requests.

TEMPLATES = Path(__file__).parent / "templates"


def render_review(
    title: str,
    bags: Sequence[Mapping[str, Any]],
    images: Mapping[str, Mapping[str, Any]],
    *,
    reasons: Mapping[str, str],
    decisions: Mapping[str, Mapping[str, Any]],
    fingerprint: str,
    token: str | None = None,
) -> str:
    """Render the page.

    A bag has `id` (as in the decisions), `similarity` and `images` (keys); an image has `image_id`, `source` (a path on the
    server or a data URL) and `captions`.
    """
    data: dict[str, Any] = {"bags": bags, "images": images, "reasons": reasons, "decisions": decisions}
    data |= {"fingerprint": fingerprint, "token": token}
    # Unsorted, because the keys 1, 2, ... follow the order of the reasons.
    values: dict[str, Any] = {"title": title, "served": token is not None, "reasons": reasons, "data": data}
    return render_html(TEMPLATES, "review", sort_keys=False, **values)


# --- Server of the review page, on this machine only -----------------------------------------------------------------

_MAX_BODY = 2**16
_ADDRESS = "127.0.0.1"  # never reachable from other machines


def _image(rows: datasets.Dataset, row: int) -> str:
    return str(embedded_image(open_image(rows[row]["image"]))["source"])


def review_page(folder: Path, rows: datasets.Dataset, token: str | None) -> str:
    """The page with the current decisions; without a token it contains its images."""
    found = load_truematch(folder)
    ids = [str(image_id) for image_id in rows["image_id"][:]]
    images = {
        str(row): {
            "image_id": image_id,
            "source": _image(rows, row) if token is None else f"image/{row}",
            "captions": list(captions),
        }
        for row, (image_id, captions) in enumerate(zip(ids, rows["captions"][:], strict=True))
    }
    row_of = {image_id: str(row) for row, image_id in enumerate(ids)}
    bags = [
        {"id": bag_id(bag), "similarity": similarity, "images": [row_of[image_id] for image_id in bag]}
        for bag, similarity in zip(found.bags.bags, found.bags.similarities, strict=True)
    ]
    # Small bags first, in random order within a size, so that an unfinished review is a fair sample.
    random.Random(int(found.manifest["seed"])).shuffle(bags)
    return render_review(
        f"Bags of {found.manifest['card']['dataset_id']}",
        sorted(bags, key=lambda bag: len(bag["images"])),
        images,
        reasons=REASONS,
        decisions={bag: {"decision": d.decision, "reason": d.reason} for bag, d in found.last.items()},
        fingerprint=bags_fingerprint(found.bags),
        token=token,
    )


class ReviewServer:
    """Serves the review page on this machine only; a context manager.

    The server answers a request when the decision is on disk. Requests need the token of the page, so that other pages in the
    browser cannot decide.
    """

    def __init__(self, folder: Path, rows: datasets.Dataset, port: int = 0) -> None:
        self._folder, self._rows = folder, rows
        # Thousands of photographs would not fit into memory.
        self._image = functools.lru_cache(maxsize=64)(functools.partial(_image, rows))
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
        """Answer requests until Ctrl-C, or until another thread shuts the server down."""
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
                self._answer(HTTPStatus.FORBIDDEN, b"This page is served to 127.0.0.1 only.")
                return False

            def _answer(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
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
                if self.path == "/":
                    with server._lock:  # a data set is not thread-safe
                        page = review_page(server._folder, server._rows, server._token)
                    body = page.encode("utf-8", "xmlcharrefreplace")
                    self._answer(HTTPStatus.OK, body, "text/html; charset=utf-8")
                elif name == "image" and _number(number, len(server._rows) - 1) is not None:
                    with server._lock:
                        head, _, data = server._image(int(number)).partition(";base64,")
                    self._answer(HTTPStatus.OK, base64.b64decode(data), head.removeprefix("data:"))
                else:
                    self._answer(HTTPStatus.NOT_FOUND, b"Not found.")

            def do_POST(self) -> None:
                if not self._is_ours():
                    return
                length = _number(self.headers.get("Content-Length", ""), _MAX_BODY)
                given = self.headers.get("X-Review-Token", "")
                if self.path != "/decisions" or length is None:
                    self._answer(HTTPStatus.BAD_REQUEST, b"This is not a decision.")
                elif not secrets.compare_digest(given.encode(), server._token.encode()):
                    self._answer(HTTPStatus.FORBIDDEN, b"The review was restarted. Reload the page.")
                else:
                    try:
                        server.decide(json.loads(self.rfile.read(length)))
                    except (ValueError, RecursionError) as error:
                        self._answer(HTTPStatus.BAD_REQUEST, str(error).encode("utf-8", "replace"))
                    except OSError as error:
                        message = f"the decision could not be written ({error})"
                        self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, message.encode())
                    else:
                        self._answer(HTTPStatus.OK, b"{}", "application/json")

        return Handler


def _number(text: str, largest: int) -> int | None:
    """A whole number of a request, or None if it is invalid or too large; Python refuses numbers of thousands of digits."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 12 or int(text) > largest:
        return None
    return int(text)


# --- `captionrl truematch review` and `apply`: review the bags, and apply the decisions ------------------------------


def review_images(found: TrueMatch, arguments: DatasetOptions) -> datasets.Dataset:
    """Images and captions of the bags: those of `--dataset`, or those in the benchmark if that is empty."""
    if arguments.dataset:
        rows: Any = load_split(
            arguments, quarantine_path=found.folder / "quarantine.jsonl", require_captions=False
        ).dataset
    else:
        rows = load_captions(found.images, split="test", require_captions=False)
    row_of = {str(image_id): row for row, image_id in enumerate(rows["image_id"][:])}
    wanted = sorted({image_id for bag in found.bags.bags for image_id in bag})
    missing = [image_id for image_id in wanted if image_id not in row_of]
    if missing:
        raise ValueError(
            f"{len(missing)} images of the bags are not in the data set, such as {missing[0]!r}. Check --dataset and --split."
        )
    return undecoded(rows.select([row_of[image_id] for image_id in wanted]))


def _finish(arguments: ApplyOptions | ReviewOptions, decisions: Path | None = None) -> None:
    """Apply decisions, and print the state of the review."""
    found, added = apply_decisions(arguments.folder, decisions)
    write_truematch_card(found)
    if arguments.json:
        print(json.dumps({"added": added, "bags": found.status(), "fingerprint": bags_fingerprint(found.kept)}))
        return
    print(f"{arguments.folder}: {added} decisions added" if decisions is not None else str(arguments.folder))
    print_status(found)


def apply(arguments: ApplyOptions) -> None:
    """Add decisions, and write `kept.json` and the card again."""
    _finish(arguments, arguments.decisions)


def review(arguments: ReviewOptions) -> None:
    """Serve the review page until Ctrl-C, or write it to one file."""
    found = load_truematch(arguments.folder)
    rows = review_images(found, arguments)
    if arguments.export is not None:
        if arguments.export.is_dir():
            raise ValueError(f"--export {str(arguments.export)!r} is a folder. Name a file, such as review.html.")
        atomic_write_text(arguments.export, review_page(arguments.folder, rows, None))
        command = f"captionrl truematch apply {arguments.folder} --decisions decisions.jsonl"
        said = {"page": str(arguments.export), "bags": len(found.bags.bags), "then": command}
        text = f"{arguments.export}: {len(found.bags.bags)} bags. Send it to the reviewer, then apply the file that they download:"
        print(json.dumps(said) if arguments.json else f"{text}\n  {command}")
        return
    server = ReviewServer(arguments.folder, rows, arguments.port)
    try:
        # With --json, stdout holds only the result.
        print(
            f"{len(found.bags.bags)} bags at {server.address} (Ctrl-C ends the review; the same command resumes it)",
            file=sys.stderr if arguments.json else sys.stdout,
            flush=True,
        )
        server.serve()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    _finish(arguments)
