"""Published data sets by name, in their published layouts: nocaps, Concadia and the described images of ImageCoDe.

nocaps     nocaps_val_4500_captions.json and images/; its domains are the splits in_domain, near_domain and out_domain
concadia   wiki_split.json and images/; caption_column is "caption" (the default) or "description"
imagecode  valid_data.json and image-sets/, one folder per set; only described images, as the split validation
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from hf_captionrl.data.nocaps_concadia import NOCAPS_DOMAINS, load_concadia, load_nocaps
from hf_captionrl.data.raw_splits import Source, SourceArguments
from hf_captionrl.data.retrieval_benchmarks import load_imagecode

__all__ = ["PUBLISHED", "read_published"]

PUBLISHED = ("nocaps", "concadia", "imagecode")


def read_published(name: str, arguments: SourceArguments) -> Source:
    """Read one of `PUBLISHED` from `data_dir`."""
    if arguments.data_dir is None:
        raise ValueError(f"dataset_name {name!r} needs the folder of its files. Set data_dir.")
    folder = Path(arguments.data_dir).expanduser()
    root = Path(arguments.image_root or folder / ("image-sets" if name == "imagecode" else "images"))
    splits: dict[str, Any] = {}
    if name == "nocaps":
        domain: Any
        for domain in NOCAPS_DOMAINS:
            rows = load_nocaps(folder / "nocaps_val_4500_captions.json", root, domain=domain)
            splits[domain.replace("-", "_")] = rows
    elif name == "concadia":
        text: Any = "caption" if arguments.caption_column == "captions" else arguments.caption_column
        for split in ("train", "validation", "test"):
            rows = load_concadia(folder / "wiki_split.json", root, split=split, text=text)
            named = arguments.caption_column != "captions"
            splits[split] = rows.rename_column("captions", arguments.caption_column) if named else rows
    else:
        splits["validation"] = _described(folder / "valid_data.json", root)
    return Source(name, splits, root, "image")


def _described(path: Path, root: Path) -> datasets.Dataset:
    """The described images of ImageCoDe, with their descriptions."""
    sets = load_imagecode(path, root)
    texts: dict[int, list[str]] = {}
    for row, text in zip(sets.targets, sets.descriptions, strict=True):
        texts.setdefault(row, []).append(text)
    columns = {
        "image": [str(sets.paths[row]) for row in texts],
        "image_id": [sets.image_ids[row] for row in texts],
        "captions": list(texts.values()),
    }
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
