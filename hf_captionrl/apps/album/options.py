"""Options of `captionrl album`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from hf_captionrl.apps.album.settings import AlbumSettings
from hf_captionrl.data.options import CaptionerOptions, cache_dir_option
from hf_captionrl.utils.options import EngineOptions, option, positive


@dataclass
class AlbumOptions(EngineOptions, AlbumSettings, CaptionerOptions):
    """Caption the images of a set so that each caption distinguishes its image from the others.

    Copies of an image get one caption. Candidates come from beams, samples and existing captions; they are chosen for all
    images together. Without --model, existing captions are diagnosed: which are duplicates, generic or ambiguous.

    Outputs are written when all captions are chosen. Candidates and features are kept in the Parquet shards of NAME.shards, and
    the same command skips finished shards, also after a crash. With --processes or --engine, several processes write them.
    Images are never changed, and text files beside them are only replaced with --overwrite.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl album photos --model Salesforce/blip-image-captioning-base --output alt.csv --max_characters 125
          captionrl album photos --model MODEL --sidecars --trigger "ohwx dog" --drop_shared
          captionrl album photos --captions old.jsonl --output report.html
          captionrl album photos --model MODEL --adapt 10m --output alt.jsonl report.html
          captionrl album photos --model MODEL --output alt.csv --processes 8
          captionrl album photos --model MODEL --output /shared/alt.csv --engine ray --address auto
    """

    images: str = option(
        positional=True,
        metavar="IMAGES",
        help="a folder with its subfolders, a list of files (.txt), a table (.jsonl, .csv, .parquet), 'scenes', or a data set "
        "on the Hub",
    )
    model: str | None = option(
        None, metavar="MODEL", help="captioner: a folder, a name on the Hub, or scenes:blip-mle; none only diagnoses"
    )
    scorer: str | None = option(
        None,
        metavar="NAME",
        help="dual encoder that compares captions and images (default: scenes:siglip-held-out for embedded captioners, "
        "scenes:clip-reward with --adapt, else openai/clip-vit-base-patch32)",
    )
    captions: Path | None = option(
        None, metavar="FILE", help="existing captions: .jsonl or .csv (default: those of the data, and .txt files)"
    )
    sidecar_captions: bool = option(True, help="read the .txt file beside an image as an existing caption")
    output: list[Path] = option(
        [Path("album.jsonl")],
        metavar="FILE",
        help=".jsonl, .csv, .html, or metadata.jsonl of an image folder; several allowed",
    )
    sidecars: bool = option(False, help="also write each caption into a .txt file beside its image")
    overwrite: bool = option(False, help="start again, and replace outputs and text files beside images")
    dry_run: bool = option(False, help="print what would be written and how long it would take; write nothing")
    adapt: str | None = option(
        None,
        metavar="TIME",
        help="first finetune the captioner on this album by self-retrieval for this time, such as 90s, 10m or 1h; a held-out scorer "
        "decides whether the result is used",
    )
    held_out_scorer: str | None = option(
        None,
        metavar="NAME",
        help="dual encoder that decides about --adapt (default: scenes:siglip-held-out for embedded captioners, else "
        "google/siglip-base-patch16-224)",
    )
    group_by: Literal["folder", "album"] = option(
        "folder", help="images among which shared phrases are searched: each folder, or the whole album"
    )
    split: str | None = option(None, metavar="SPLIT", help="split of a data set (default: all)")
    image_root: str | None = option(
        None, metavar="DIR", help="folder that image paths of a list or table are relative to"
    )
    max_images: int | None = option(None, parse=positive, metavar="N", help="use only the first N images")
    page_images: int = option(
        2000, parse=positive, metavar="N", help="most images whose pictures the HTML page contains"
    )
    cache_dir: str | None = cache_dir_option()
    rows_per_shard: int | None = option(
        None, parse=positive, metavar="N", group="engine", help="images per Parquet file (default: 4 batches)"
    )

    @property
    def uses_shards(self) -> bool:
        """Always."""
        return True
