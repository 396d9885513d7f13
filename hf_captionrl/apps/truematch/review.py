"""`captionrl truematch review` and `apply`: review the bags, and apply the decisions."""

from __future__ import annotations

import base64
import functools
import json
import random
import secrets
import sys
import threading
from http.server import BaseHTTPRequestHandler
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
from hf_captionrl.data.columns import id_column, undecoded
from hf_captionrl.data.options import DatasetOptions, load_split
from hf_captionrl.evaluation.pages import embedded_image, render_html
from hf_captionrl.utils.io import atomic_write_text
from hf_captionrl.utils.local_server import LocalServer, RequestError, whole_number

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.apps.truematch.options import ApplyOptions, ReviewOptions


# --- The review page: served locally, or as one file without a server ------------------------------------------------
# The page gets captions as JSON and shows them as text, never as markup. Its content security policy allows only the page's
# script and no external requests.

TEMPLATES = Path(__file__).parent / "templates"


def _image(rows: datasets.Dataset, row: int) -> str:
    return str(embedded_image(open_image(rows[row]["image"]))["source"])


def review_page(folder: Path, rows: datasets.Dataset, token: str | None) -> str:
    """The page with the current decisions; without a token it contains its images."""
    found = load_truematch(folder)
    images, row_of = {}, {}
    for row, (image_id, captions) in enumerate(zip(id_column(rows), rows["captions"][:], strict=True)):
        source = _image(rows, row) if token is None else f"image/{row}"
        images[str(row)] = {"image_id": image_id, "source": source, "captions": list(captions)}
        row_of[image_id] = str(row)
    bags: list[dict[str, Any]] = [
        {"id": bag_id(bag), "similarity": similarity, "images": [row_of[image_id] for image_id in bag]}
        for bag, similarity in zip(found.bags.bags, found.bags.similarities, strict=True)
    ]
    # Small bags first, in random order within a size, so that an unfinished review is a fair sample.
    random.Random(int(found.manifest["seed"])).shuffle(bags)
    data = {
        "bags": sorted(bags, key=lambda bag: len(bag["images"])),
        "images": images,
        "reasons": REASONS,
        "decisions": {bag: {"decision": d.decision, "reason": d.reason} for bag, d in found.last.items()},
        "fingerprint": bags_fingerprint(found.bags),
        "token": token,
    }
    title = f"Bags of {found.manifest['card']['dataset_id']}"
    values: dict[str, Any] = {"title": title, "served": token is not None, "reasons": REASONS, "data": data}
    # Unsorted, because the keys 1, 2, ... follow the order of the reasons.
    return render_html(TEMPLATES, "review", sort_keys=False, **values)


class ReviewServer(LocalServer):
    """Serves the review page on this machine only.

    The server answers a request when the decision is on disk. Requests need the token of the page, so that other pages in the
    browser cannot decide.
    """

    def __init__(self, folder: Path, rows: datasets.Dataset, port: int = 0) -> None:
        self._folder, self._rows = folder, rows
        # Thousands of photographs would not fit into memory.
        self._image = functools.lru_cache(maxsize=64)(functools.partial(_image, rows))
        self._known = {bag_id(bag) for bag in load_truematch(folder).bags.bags}
        self._token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._writer = DecisionWriter(folder / DECISIONS_FILE)
        try:
            super().__init__("127.0.0.1", port)  # never reachable from other machines
        except ValueError:
            self._writer.close()
            raise
        self.address += "/"

    def serve(self) -> None:
        """Answer requests until Ctrl-C or `stop`, and unlock the decisions."""
        try:
            super().serve()
        finally:
            self._writer.close()

    def respond(self, request: BaseHTTPRequestHandler) -> tuple[bytes, str]:
        name, _, text = request.path.strip("/").partition("/")
        number = whole_number(text)
        if request.command == "POST" and request.path == "/decisions":
            given = request.headers.get("X-Review-Token", "")
            value = self.json_body(request, 2**16)
            if not secrets.compare_digest(given.encode(), self._token.encode()):
                raise RequestError(403, "The review was restarted. Reload the page.")
            decision = check_decision(value, "The decision")
            if decision.bag not in self._known:
                raise ValueError(f"There is no bag {decision.bag!r:.60} in this benchmark. Reload the page.")
            with self._lock:
                self._writer.append(decision)
            return b"{}", "application/json"
        if request.command == "GET" and request.path == "/":
            with self._lock:  # a data set is not thread-safe
                page = review_page(self._folder, self._rows, self._token)
            return page.encode("utf-8", "xmlcharrefreplace"), "text/html; charset=utf-8"
        if request.command == "GET" and name == "image" and number is not None and number < len(self._rows):
            with self._lock:
                head, _, data = self._image(number).partition(";base64,")
            return base64.b64decode(data), head.removeprefix("data:")
        raise RequestError(404, "Not found.")


# --- `captionrl truematch review` and `apply`: review the bags, and apply the decisions ------------------------------


def review_images(found: TrueMatch, arguments: DatasetOptions) -> datasets.Dataset:
    """Images and captions of the bags: those of `--dataset`, or those in the benchmark if that is empty."""
    if arguments.dataset:
        rows: Any = load_split(
            arguments, quarantine_path=found.folder / "quarantine.jsonl", require_captions=False
        ).dataset
    else:
        rows = load_captions(found.images, split="test", require_captions=False)
    row_of = {image_id: row for row, image_id in enumerate(id_column(rows))}
    wanted = sorted({image_id for bag in found.bags.bags for image_id in bag})
    if missing := [image_id for image_id in wanted if image_id not in row_of]:
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
    _finish(arguments)
