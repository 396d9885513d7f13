"""Writes the embedded world as a data set for the Hub: Parquet files, card and digests.

python scripts/export_scenes.py --dataset_id me/scenes --output_dir outputs/scenes
hf upload me/scenes outputs/scenes . --repo-type dataset

python scripts/export_scenes.py --digests reproduction/results/scenes_digests.json     # the digests alone
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL
from huggingface_hub import DatasetCardData
from huggingface_hub.utils import validate_repo_id

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
from hf_captionrl.hub.cards import render_card
from hf_captionrl.scenes import load_scenes
from hf_captionrl.scenes.dataset import CONFIGURATIONS, WORLD_VERSION
from hf_captionrl.utils.io import atomic_write_text, write_json

COLUMNS: dict[str, str] = {
    "image": "72 x 72 pixels, PNG",
    "image_id": "split and number",
    "captions": "five references, from the tersest annotator to the most verbose one",
    "full_caption": "a caption with all facts",
    "facts": "what is true of the image; an empty value has no word",
    "bag_id": "the bag of look-alikes; empty outside of bags",
    "against_preferences": "background, position and partner all differ from what the kind prefers",
}


def digest_split(rows: datasets.Dataset) -> dict[str, str]:
    """Digests of what a split says (`texts`, the same on every machine), and of its `pixels` (for one version of Pillow)."""
    texts, pixels = hashlib.sha256(), hashlib.sha256()
    for row in rows.remove_columns("image"):
        texts.update(json.dumps(row, sort_keys=True).encode())
    for image in rows["image"]:
        pixels.update(np.asarray(image).tobytes())
    return {"texts": texts.hexdigest(), "pixels": pixels.hexdigest()}


def digest_all() -> dict[str, Any]:
    """The digests of all configurations and splits."""
    splits = [
        {"configuration": name, "split": split, "rows": len(rows), **digest_split(rows)}
        for name, arguments in CONFIGURATIONS.items()
        for split, rows in load_scenes(**arguments).items()
    ]
    return {"world_version": WORLD_VERSION, "pillow": PIL.__version__, "splits": splits}


def export(folder: Path, dataset_id: str) -> Path:
    """Write files, digests and card. Returns the path of the card."""
    validate_repo_id(dataset_id)
    digests = digest_all()
    for name, arguments in CONFIGURATIONS.items():
        for split, rows in load_scenes(**arguments).items():
            file = folder / name / f"{split}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(str(file))
    write_json(folder / "digests.json", digests)

    def files(name: str) -> list[dict[str, str]]:
        return [{"split": split, "path": f"{name}/{split}.parquet"} for split in ("train", "validation", "test")]

    metadata = DatasetCardData(
        language="en",
        license="apache-2.0",
        task_categories=["image-to-text"],
        pretty_name=dataset_id.rpartition("/")[2],
        tags=["image-captioning", "hf_captionrl", "synthetic"],
        configs=[{"config_name": name, "data_files": files(name)} for name in CONFIGURATIONS],
    )
    splits, command = digests["splits"], f"python scripts/export_scenes.py --dataset_id {dataset_id}"
    values = {"dataset_id": dataset_id, "command": command, "columns": COLUMNS, "world_version": WORLD_VERSION}
    values |= {"first": next(iter(CONFIGURATIONS)), "revision": "main"}
    rows = sum(entry["rows"] for entry in splits)
    card = render_card("scenes.md", metadata, rows=rows, splits=splits, **values)
    atomic_write_text(folder / "README.md", card)
    return folder / "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_id", help="name on the Hub, owner/name")
    parser.add_argument("--output_dir", type=Path, help="folder to write the data set to")
    parser.add_argument("--digests", type=Path, help="file to write the digests to")
    args = parser.parse_args(argv)
    if (args.dataset_id is None) != (args.output_dir is None):
        parser.error("--dataset_id and --output_dir belong together. Give both.")
    if args.output_dir is None and args.digests is None:
        parser.error("There is nothing to write. Give --dataset_id and --output_dir, or --digests.")
    if args.output_dir is not None:
        print(export(args.output_dir, args.dataset_id))
    if args.digests is not None:
        write_json(args.digests, digest_all())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
