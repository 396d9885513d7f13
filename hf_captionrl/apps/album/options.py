"""Options of an album, of `captionrl album` and of `captionrl demo`; light to import, because `--help` needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from hf_captionrl.data.options import CaptionerOptions, EndpointOptions, WordingOptions
from hf_captionrl.utils.options import (
    CacheOptions,
    CommandOptions,
    DeviceOptions,
    NotNegative,
    Positive,
    Range,
    SeedOptions,
    WritingOptions,
    check_values,
    option,
)


@dataclass
class CandidateOptions(SeedOptions, WritingOptions, WordingOptions):
    """How candidate captions are generated."""

    heading: ClassVar[str] = "candidates"

    num_beams: Positive = option(16, metavar="N", help="candidates per image by beam search")
    num_samples: NotNegative = option(0, metavar="N", help="candidates per image by sampling")
    temperature: Annotated[float, Range(above=0)] = option(0.7, metavar="X", help="temperature of sampling")


@dataclass
class AlbumSettings(CandidateOptions):
    """How the captions of an album are chosen."""

    heading: ClassVar[str] = "choice"

    max_characters: Positive | None = option(None, metavar="N", help="longest caption; 125 for alternative texts")
    prefer_existing: bool = option(False, help="keep the first existing caption of an image, and caption the others")
    drop_shared: bool = option(False, help="remove phrases that all captions of a group share")
    trigger: str | None = option(
        None,
        metavar="TEXT",
        help="text in place of the first phrase that --drop_shared removes, or before the caption",
    )
    shared_share: Annotated[float, Range(above=0, at_most=1)] = option(
        0.9, metavar="X", help="share of a group's captions that contain a shared phrase"
    )


def check_words(settings: AlbumSettings) -> None:
    """Refuse values out of range and a blank trigger."""
    check_values(settings)
    if settings.trigger is not None and not settings.trigger.strip():
        raise ValueError(f"trigger {settings.trigger!r} is blank. Leave it out.")


@dataclass
class AlbumOptions(AlbumSettings, CacheOptions, CaptionerOptions, EndpointOptions):
    """Caption the images of a set so that each caption distinguishes its image from the others.

    Equal images get one caption. Candidates come from beams, samples and existing captions; they are chosen for all images
    together. Without --model, the first existing caption of each image is kept, ranked, and written.

    Outputs are written when all captions are chosen. NAME.candidates.jsonl keeps the candidates, so that the same command
    continues after a crash, and other constraints need no new ones. With --endpoint, the candidates are a greedy
    answer and --num_samples samples of a model behind an OpenAI-compatible address, and NAME.answers.jsonl keeps each answer.

    A caption that a person edited in the CSV file, or in a text file that this command wrote, stays. Images are never changed.
    Text files beside them that this command did not write are kept and named; --overwrite replaces them.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl album photos --model Salesforce/blip-image-captioning-base --output alt.csv alt.html --max_characters 125
          captionrl album photos --model MODEL --sidecars --trigger "ohwx dog" --drop_shared
          captionrl album photos --captions captions.csv --sidecars
          captionrl album photos --endpoint http://127.0.0.1:11434/v1 --model qwen2.5vl --num_samples 7 --output alt.csv
    """

    images: str = option(
        positional=True,
        metavar="IMAGES",
        help="a folder, a table (.jsonl, .csv, .parquet), 'scenes', or a data set on the Hub",
    )
    model: str | None = option(
        None,
        metavar="MODEL",
        help="captioner: a folder, a name on the Hub or at --endpoint (default: existing captions are used)",
    )
    scorer: str | None = option(
        None,
        metavar="NAME",
        help="dual encoder that compares captions and images, or 'none' to collect captions (default: scenes:siglip-held-out for "
        "embedded captioners, none with --sidecars without --model, else openai/clip-vit-base-patch32)",
    )
    captions: Path | None = option(None, metavar="FILE", help="existing captions (default: of data and text files)")
    output: list[Path] = option(
        [Path("album.csv")], metavar="FILE", help=".csv, .jsonl or a page in .html; several allowed"
    )
    sidecars: bool = option(False, help="also write each caption into a text file beside its image")
    overwrite: bool = option(False, help="start again, and replace outputs and text files, also those of a person")
    group_by: Literal["folder", "album"] = option("folder", help="images among which shared phrases are searched")
    by_concept: str | None = option(
        None, metavar="COLUMN", help="one caption for all images with a value of this column, or 'folder', a subfolder"
    )
    split: str | None = option(None, metavar="SPLIT", help="split of a data set (default: all)")
    image_root: str | None = option(None, metavar="DIR", help="folder that paths of a table are relative to")
    max_images: Positive | None = option(None, metavar="N", help="use only the first N images")


@dataclass
class DemoOptions(DeviceOptions, CommandOptions):
    """Serve a page on this machine that captions and searches albums of similar images.

    Pick an album or upload one. The page shows the captions of several captioners, the image that each caption finds, and
    its rank. Gradio's usage statistics are off.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl demo
          captionrl demo --images holidays --model MLE=Salesforce/blip-image-captioning-base SR=outputs/photos/model
          captionrl demo --port 8000 --no_browser

        The default captioners are those of the embedded world; the default albums are its look-alikes.
    """

    model: list[str] | None = option(
        None, metavar="NAME=MODEL", help="a captioner and its name (default: the embedded MLE, SMILE and SR)"
    )
    scorer: str | None = option(
        None, metavar="NAME", help="dual encoder (default: scenes:siglip-held-out, else openai/clip-vit-base-patch32)"
    )
    images: Path | None = option(None, metavar="DIR", help="a folder of images or of albums (default: look-alikes)")
    num_beams: Positive = option(3, metavar="N", help="beams of the captions side by side")
    host: str = option("127.0.0.1", group="server", metavar="ADDRESS", help="address to listen at")
    port: Annotated[int, Range(at_least=1, at_most=65_535)] | None = option(
        None, group="server", metavar="N", help="port (default: the first free one from 7860)"
    )
    no_browser: bool = option(False, group="server", help="do not open a browser")
