"""Cards of data sets: bags of similar images (TrueMatch) and boosted captions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import DatasetCardData

from hf_captionrl.hub.publish_checks import check_card, check_name, check_text
from hf_captionrl.hub.templates import render_template
from hf_captionrl.io import atomic_write_text

__all__ = ["DatasetCardFacts", "render_dataset_card", "write_dataset_card"]

Kind = Literal["truematch", "boosted captions"]


@dataclass(frozen=True)
class DatasetCardFacts:
    """Contents of the card of a data set.

    Args:
        dataset_id: Name on the Hub, `owner/name`.
        kind: `truematch` for bags of similar images, `boosted captions` for detailed references.
        file: Data file, relative to the repository.
        source: Name of the data set of the images.
        source_license: Licence of the data set of the images, which are not part of this data set.
        description: What the data set contains, and for which images, in one or more sentences.
        made_with: How it was created: scorer or language model, settings, seed, versions, by name.
        columns: From column names to descriptions.
        sizes: Number of rows per split, or number of bags per size.
        license: Licence of the data set.
        checked: How it was checked, and its known errors.
        language: Language code of the captions.
        has_images: Whether the data set contains the images too.
        revision: Branch, tag or commit in the code example.
    """

    dataset_id: str
    kind: Kind
    file: str
    source: str
    source_license: str
    description: str
    made_with: Mapping[str, Any]
    columns: Mapping[str, str]
    sizes: Mapping[str, int]
    license: str
    checked: str
    language: str = "en"
    has_images: bool = False
    revision: str = "main"

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, str):
                check_text(entry.name, value)
        for name, table in (("made_with", self.made_with), ("columns", self.columns), ("sizes", self.sizes)):
            if not table:
                raise ValueError(f"{name} is empty. Describe what the data set contains and how it was created.")
            for key, value in table.items():
                check_text(f"{name}[{key!r}]", str(value) if isinstance(value, str) else f"{key} {value}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind is {self.kind!r}. Use one of {get_args(Kind)}.")
        if any(size < 1 for size in self.sizes.values()):
            raise ValueError(f"sizes is {dict(self.sizes)}, but must be at least 1. Remove empty parts.")
        check_name(self.dataset_id, "dataset_id")


def render_dataset_card(facts: DatasetCardFacts) -> str:
    """Render the card of a data set.

    Args:
        facts: Contents of the card.

    Returns:
        `str`: Markdown that begins with metadata.

    Raises:
        ValueError: If the card must not be published.
        FileNotFoundError: If the template cannot be found.
    """
    data = DatasetCardData(
        language=facts.language,
        license=facts.license,
        task_categories=["image-to-text"],
        pretty_name=facts.dataset_id.rpartition("/")[2],
        tags=["image-captioning", "hf_captionrl", facts.kind.replace(" ", "-")],
        configs=[{"config_name": "default", "data_files": facts.file}],
    )
    card = render_template("dataset.md", metadata=data.to_yaml(), facts=facts)
    check_card(card)
    return card


def write_dataset_card(folder: str | os.PathLike[str], facts: DatasetCardFacts) -> Path:
    """Render the card of a data set and write it to `README.md` in its folder, atomically.

    Args:
        folder: Folder of the data set.
        facts: Contents of the card.

    Returns:
        `pathlib.Path`: The card.

    Raises:
        FileNotFoundError: If the folder lacks the data file of the card.
        ValueError: If the card must not be published; nothing is written.
    """
    folder = Path(folder)
    if not (folder / facts.file).is_file():
        raise FileNotFoundError(f"{folder} has no {facts.file}, the data file in its card. Write the data first.")
    return atomic_write_text(folder / "README.md", render_dataset_card(facts))
