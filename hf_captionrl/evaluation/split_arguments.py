"""Arguments that name a data set and how it is split, shared by the commands and by training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from hf_captionrl.options import share

__all__ = ["SplitArguments"]


@dataclass
class SplitArguments:
    """Where images and captions come from, and how they are split."""

    heading: ClassVar[str] = "data set"

    dataset_config: str | None = field(
        default=None,
        metadata={
            "help": "Configuration of a data set on the Hub; of scenes: alt_text or shapes.",
            "metavar": "NAME",
        },
    )
    dataset_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of a data set on the Hub.", "metavar": "REV"}
    )
    data_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of a local data set, such as the images of 'imagefolder' with their metadata.jsonl.",
            "metavar": "DIR",
        },
    )
    image_root: str | None = field(
        default=None, metadata={"help": "Folder that image paths are relative to.", "metavar": "DIR"}
    )
    image_column: str = field(default="image", metadata={"help": "Column with the images.", "metavar": "NAME"})
    caption_column: str = field(
        default="captions",
        metadata={"help": "Column with the captions, a string or a list of strings.", "metavar": "NAME"},
    )
    validation_share: Annotated[float, share] = field(
        default=0.1,
        metadata={
            "help": "Share of the images, in [0, 1), that becomes the validation split of data without one, by a hash of the "
            "image ids (commands: only if --split names a missing split).",
            "metavar": "X",
        },
    )
    test_share: Annotated[float, share] = field(
        default=0.1,
        metadata={
            "help": "Share of the images, in [0, 1), that becomes the test split of data without one, by a hash of the image "
            "ids (commands: only if --split names a missing split).",
            "metavar": "X",
        },
    )
    split_seed: int = field(
        default=0,
        metadata={
            "help": "Seed of the hash that splits the data; independent of --seed, so that all runs and commands split alike.",
            "metavar": "N",
        },
    )
    max_bad_fraction: float = field(
        default=0.05,
        metadata={
            "help": "Largest share of invalid rows, in [0, 1]. Invalid rows are left out and listed; a larger share is an error.",
            "metavar": "X",
        },
    )
