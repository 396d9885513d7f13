"""Options of `captionrl truematch` and its actions; light to import, because `--help` needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from hf_captionrl.data.options import DatasetOptions, PublicationOptions, SimilarityOptions
from hf_captionrl.utils.options import CacheOptions, CommandOptions, Range, SeedOptions, option


@dataclass
class BuildOptions(SeedOptions, SimilarityOptions, DatasetOptions, PublicationOptions):
    """Find bags of similar images and write the benchmark, which is a folder.

    The folder holds the bags, the images with their captions, and the card with which `captionrl push` publishes it. After an
    interruption, give the same command again.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl truematch build --dataset scenes --output truematch
          captionrl truematch build --dataset dataset_coco.json --image_root coco --split validation+test --no_images

        publish the result:
          captionrl push truematch --type dataset --repo_id me/truematch-scenes
    """

    output: Path = option(Path("truematch"), metavar="DIR", help="folder to write into")
    overwrite: bool = option(False, help="replace a benchmark that was made with other settings; decisions stay")
    bag_sizes: list[Annotated[int, Range(at_least=2)]] = option([3, 5, 7], metavar="K", group="bags", help="bag sizes")
    published_bags: Path | None = option(None, metavar="DIR", group="bags", help="the paper's release, by COCO id")


@dataclass
class _BenchmarkOptions(CommandOptions):
    """A finished benchmark."""

    folder: Path = option(positional=True, metavar="DIR", help="the benchmark, made by `captionrl truematch build`")


@dataclass
class _SourceOptions(_BenchmarkOptions, DatasetOptions):
    """Where the images come from if the benchmark was built without them."""

    heading: ClassVar[str] = "data set"

    dataset: str = option("", metavar="NAME", help="data set with the images (default: those in the benchmark)")


@dataclass
class ReviewOptions(_SourceOptions):
    """Write a page that shows each bag, to keep or drop it.

    The page needs no server. It stores decisions in the browser and offers them as a download.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl truematch review truematch --output review.html
          captionrl truematch apply truematch --decisions decisions.jsonl
    """

    output: Path = option(Path("review.html"), metavar="FILE", help="page to write")


@dataclass
class ApplyOptions(_BenchmarkOptions):
    """Apply decisions: add them to the benchmark, and write kept.json and the card again."""

    examples: ClassVar[str] = """
        examples:
          captionrl truematch apply truematch --decisions decisions.jsonl
    """

    decisions: Path | None = option(None, metavar="FILE", help="download of the review page")


@dataclass
class EvaluateOptions(SeedOptions, CacheOptions, _SourceOptions):
    """Evaluate captioners on the benchmark. Writes results.json and results.md.

    In a folder with ImageCoDe as published (valid_data.json, image-sets), each caption ranks its image among ten similar ones;
    writes results.json.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl caption scenes:blip-mle --dataset scenes --output mle.jsonl
          captionrl truematch evaluate truematch --captions mle.jsonl --references
          captionrl caption outputs/model --dataset imagecode --data_dir imagecode --output imagecode.jsonl
          captionrl truematch evaluate imagecode --captions imagecode.jsonl
    """

    captions: list[Path] = option([], metavar="FILE", group="captioners", help="files of `captionrl caption`")
    names: list[str] | None = option(None, metavar="NAME", group="captioners", help="names (default: file names)")
    references: bool = option(False, group="captioners", help="also evaluate one reference per image")
    output_dir: Path | None = option(None, metavar="DIR", group="captioners", help="folder (default: outputs/NAME)")
    scorer: str | None = option(
        None,
        metavar="NAME",
        group="evaluation",
        help="held-out dual encoder (default: scenes:siglip-held-out on the embedded world, else "
        "openai/clip-vit-base-patch32, as in the paper)",
    )
