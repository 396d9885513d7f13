"""Cards of data sets: bags of similar images (TrueMatch), and boosted captions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import DatasetCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_captionrl.hub.publish_checks import check_card, check_text
from hf_captionrl.hub.templates import render_template
from hf_captionrl.io import atomic_write_text

__all__ = ["DatasetCardFacts", "render_dataset_card", "write_dataset_card"]

Kind = Literal["truematch", "boosted captions"]


@dataclass(frozen=True)
class DatasetCardFacts:
    """What the card of a data set states.

    Args:
        dataset_id: Where it will be found: `owner/name`.
        kind: `truematch` for bags of similar images, `boosted captions` for richer references.
        file: The file that holds it, relative to the repository.
        source: Name of the data set whose images these are.
        source_license: Licence of that data set: images are not part of this one, and keep theirs.
        description: A sentence or more: what it holds, and for which images.
        made_with: By name, what it was made with: scorer or language model, settings, seed, versions.
        columns: What each column holds.
        sizes: Rows, by name of the split, or bags by their size.
        license: Licence of what was added here.
        checked: How it was checked, and what is known to be wrong with it.
        language: Language code of its captions.
        has_images: Whether the images are in it, too.
        revision: Branch, tag or commit that the printed example loads.
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
                raise ValueError(f"{name} is empty. A card says what a data set holds and how it was made.")
            for key, value in table.items():
                check_text(f"{name}[{key!r}]", str(value) if isinstance(value, str) else f"{key} {value}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind is {self.kind!r}; there are cards for {get_args(Kind)}.")
        if any(size < 1 for size in self.sizes.values()):
            raise ValueError(f"sizes is {dict(self.sizes)}; an empty part is not published.")
        try:
            validate_repo_id(self.dataset_id)
        except HFValidationError as error:
            raise ValueError(
                f"dataset_id is {self.dataset_id!r}, not a name that the Hub accepts ({error})."
            ) from error


def render_dataset_card(facts: DatasetCardFacts) -> str:
    """Render the card of a data set.

    Args:
        facts: What it states.

    Returns:
        `str`: Markdown with metadata in front.

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
    """Render the card of a data set and write it as the folder's `README.md`, atomically.

    Args:
        folder: Folder of the data set.
        facts: What the card states.

    Returns:
        `pathlib.Path`: The card.

    Raises:
        FileNotFoundError: If the folder lacks the file that the card names.
        ValueError: If the card must not be published; nothing is written.
    """
    folder = Path(folder)
    if not (folder / facts.file).is_file():
        raise FileNotFoundError(f"{folder} has no {facts.file}, which its card names. Write the data first.")
    return atomic_write_text(folder / "README.md", render_dataset_card(facts))
