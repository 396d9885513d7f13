"""`captionrl truematch review` and `apply`: review the bags, and apply the decisions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.dataset_options import DatasetOptions, load_split
from hf_captionrl.truematch.benchmark_files import (
    TrueMatch,
    apply_decisions,
    bags_fingerprint,
    load_truematch,
)
from hf_captionrl.truematch.build import print_status
from hf_captionrl.truematch.review_server import ReviewPages, ReviewServer

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.truematch.options import ApplyOptions, ReviewOptions

__all__ = ["apply", "review", "review_images"]


def review_images(found: TrueMatch, arguments: DatasetOptions) -> datasets.Dataset:
    """Images and captions of the bags: those of `--dataset`, or those in the benchmark if that is empty."""
    from hf_captionrl.data import load_captions
    from hf_captionrl.data.caption_columns import undecoded

    rows: Any
    if arguments.dataset:
        rows = load_split(arguments, quarantine_path=found.folder / "quarantine.jsonl", require_captions=False).dataset
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
    from hf_captionrl.truematch.card import write_truematch_card

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
    from hf_captionrl.io import atomic_write_text

    found = load_truematch(arguments.folder)
    rows = review_images(found, arguments)
    if arguments.export is not None:
        if arguments.export.is_dir():
            raise ValueError(f"--export {str(arguments.export)!r} is a folder. Name a file, such as review.html.")
        atomic_write_text(arguments.export, ReviewPages(arguments.folder, rows).render(None))
        command = f"captionrl truematch apply {arguments.folder} --decisions decisions.jsonl"
        said = {"page": str(arguments.export), "bags": len(found.bags.bags), "then": command}
        print(
            json.dumps(said)
            if arguments.json
            else f"{arguments.export}: {len(found.bags.bags)} bags. Send it to the reviewer, then apply the file that they download:\n  {command}"
        )
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
