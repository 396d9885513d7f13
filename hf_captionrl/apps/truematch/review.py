"""`captionrl truematch review` and `apply`: review the bags, and apply the decisions."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.apps.truematch.build import (
    REASONS,
    TrueMatch,
    apply_decisions,
    bag_id,
    bags_fingerprint,
    load_truematch,
    print_status,
    write_truematch_card,
)
from hf_captionrl.data import load_captions, open_image
from hf_captionrl.data.columns import id_column, undecoded
from hf_captionrl.data.options import DatasetOptions, load_split
from hf_captionrl.evaluation.pages import embedded_image, render_html
from hf_captionrl.utils.io import atomic_write_text, counted

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.apps.truematch.options import ApplyOptions, ReviewOptions


# --- The review page: one file without a server ----------------------------------------------------------------------
# The page gets captions as JSON and shows them as text, never as markup. Its content security policy allows only the page's
# script and no requests.

TEMPLATES = Path(__file__).parent / "templates"


def review_images(benchmark: TrueMatch, arguments: DatasetOptions) -> datasets.Dataset:
    """Images and captions of the bags: those of `--dataset`, or those in the benchmark if that is empty."""
    if arguments.dataset:
        rows: Any = load_split(
            arguments, quarantine_path=benchmark.folder / "quarantine.jsonl", require_captions=False
        ).dataset
    else:
        rows = load_captions(benchmark.images, split="test", require_captions=False)
    row_of = {image_id: row for row, image_id in enumerate(id_column(rows))}
    image_ids = sorted({image_id for bag in benchmark.bags.bags for image_id in bag})
    if missing := [image_id for image_id in image_ids if image_id not in row_of]:
        raise ValueError(f"The data have no image {missing[0]!r} of the bags. Check --dataset and --split.")
    return undecoded(rows.select([row_of[image_id] for image_id in image_ids]))


def apply(arguments: ApplyOptions) -> None:
    """Add decisions, write `kept.json` and the card again, and print the state of the review."""
    benchmark, added = apply_decisions(arguments.folder, arguments.decisions)
    write_truematch_card(benchmark)
    if arguments.json:
        print(
            json.dumps({"added": added, "bags": benchmark.status(), "fingerprint": bags_fingerprint(benchmark.kept)})
        )
        return
    text = "" if arguments.decisions is None else f": {counted(added, 'decision')} added"
    print(f"{arguments.folder}{text}")
    print_status(benchmark)


def review(arguments: ReviewOptions) -> None:
    """Write the review page, with the current decisions and the images."""
    if arguments.output.is_dir():
        raise ValueError(f"--output {str(arguments.output)!r} is a folder. Name a file, such as review.html.")
    benchmark = load_truematch(arguments.folder)
    rows, images, row_of = review_images(benchmark, arguments), {}, {}
    for row, (image_id, captions) in enumerate(zip(id_column(rows), rows["captions"][:], strict=True)):
        source = str(embedded_image(open_image(rows[row]["image"]))["source"])
        images[str(row)] = {"image_id": image_id, "source": source, "captions": list(captions)}
        row_of[image_id] = str(row)
    bags: list[dict[str, Any]] = [
        {"id": bag_id(bag), "similarity": similarity, "images": [row_of[image_id] for image_id in bag]}
        for bag, similarity in zip(benchmark.bags.bags, benchmark.bags.similarities, strict=True)
    ]
    # Small bags first, in random order within a size, so that an unfinished review is a fair sample.
    random.Random(int(benchmark.manifest["seed"])).shuffle(bags)
    data = {
        "bags": sorted(bags, key=lambda bag: len(bag["images"])),
        "images": images,
        "reasons": REASONS,
        "decisions": {bag: line for bag, line in benchmark.decisions.items() if line["decision"] is not None},
        "fingerprint": bags_fingerprint(benchmark.bags),
    }
    title = f"Bags of {benchmark.manifest['card']['dataset_id']}"
    # Unsorted, because the keys 1, 2, ... follow the order of the reasons.
    page = render_html(TEMPLATES, "review", sort_keys=False, title=title, reasons=REASONS, data=data)
    atomic_write_text(arguments.output, page)
    command = f"captionrl truematch apply {arguments.folder} --decisions decisions.jsonl"
    facts = {"page": str(arguments.output), "bags": len(bags), "then": command}
    text = f"{arguments.output}: {counted(len(bags), 'bag')}. Open it in a browser, then apply the file that it downloads:"
    print(json.dumps(facts) if arguments.json else f"{text}\n  {command}")
