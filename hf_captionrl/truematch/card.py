"""The card of a benchmark, rendered from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hf_captionrl.truematch.benchmark_files import (
    BAGS_FILE,
    DATA_FOLDER,
    KEPT_FILE,
    MANIFEST_FILE,
    TrueMatch,
    load_truematch,
)

__all__ = ["render_truematch_card", "rewrite_truematch_card", "write_truematch_card"]


def _checked(found: TrueMatch) -> str:
    """One sentence on the state of the review."""
    counts = found.status().values()
    total, undecided = sum(c["bags"] for c in counts), sum(c["undecided"] for c in counts)
    dropped = sum(c["dropped"] for c in counts)
    if undecided == total:
        return "No one has reviewed the bags yet: some may contain one image twice, or images that any caption distinguishes."
    reviewed = "All bags were reviewed" if not undecided else f"{total - undecided} of {total} bags were reviewed"
    return f"{reviewed}; {dropped} were dropped. The reasons are in decisions.jsonl."


def render_truematch_card(found: TrueMatch) -> str:
    """Render the card of a benchmark."""
    from huggingface_hub import DatasetCardData

    from hf_captionrl.hub.publish_checks import check_card, check_text
    from hf_captionrl.hub.templates import render_template

    manifest = found.manifest
    card = manifest["card"]
    for name, value in card.items():
        check_text(name, value)
    data = DatasetCardData(
        language=card["language"],
        license=card["license"],
        task_categories=["image-to-text"],
        pretty_name=card["dataset_id"].rpartition("/")[2],
        tags=["image-captioning", "hf_captionrl", "truematch"],
        configs=[
            {"config_name": "default", "data_files": [{"split": "test", "path": f"{DATA_FOLDER}/*.parquet"}]},
        ],
    )
    text = render_template(
        "truematch.md",
        metadata=data.to_yaml(),
        card=card,
        manifest=manifest,
        status=found.status(),
        checked=_checked(found),
        files={"bags": BAGS_FILE, "kept": KEPT_FILE},
    )
    check_card(text)
    return text


def write_truematch_card(found: TrueMatch) -> Path:
    """Render the card and write it as the folder's `README.md`, atomically."""
    from hf_captionrl.io import atomic_write_text

    return atomic_write_text(found.folder / "README.md", render_truematch_card(found))


def rewrite_truematch_card(folder: Path, changes: Mapping[str, str]) -> Path:
    """Render the card of a benchmark again with changed facts, which its manifest keeps."""
    from hf_captionrl.io import write_json

    found = load_truematch(folder)
    found.manifest["card"].update(changes)
    written = write_truematch_card(found)  # refuses what must not be published before the manifest keeps it
    write_json(folder / MANIFEST_FILE, found.manifest)
    return written
