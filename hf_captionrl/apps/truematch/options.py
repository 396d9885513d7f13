"""Options of `captionrl truematch` and its actions; light to import, because `--help` needs them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from hf_captionrl.data.options import DatasetOptions, PublicationOptions, SimilarityOptions
from hf_captionrl.utils.options import CacheOptions, CommandOptions, NotNegative, Range, SeedOptions, option


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
    bag_sizes: list[Annotated[int, Range(at_least=2)]] = option(
        [3, 5, 7], metavar="K", group="bags", help="images per bag"
    )
    published_bags: Path | None = option(
        None, metavar="DIR", group="bags", help="take the bags from the paper's release, by COCO id"
    )


@dataclass
class _BenchmarkOptions(CommandOptions):
    """A finished benchmark."""

    folder: Path = option(positional=True, metavar="DIR", help="the benchmark, made by `captionrl truematch build`")


@dataclass
class _SourceOptions(_BenchmarkOptions, DatasetOptions):
    """Where the images come from if the benchmark was built without them."""

    heading: ClassVar[str] = "data set"

    dataset: str = option(
        "",
        metavar="NAME",
        help="data set with the images, named as for `build` (default: the images in the benchmark)",
    )


@dataclass
class ReviewOptions(_SourceOptions):
    """Show each bag in a browser, to keep or drop it.

    Each decision is on disk before the page shows the next bag. An interrupted review continues where it stopped.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl truematch review truematch

        let someone else review, then apply the decisions that they send back:
          captionrl truematch review truematch --export review.html
          captionrl truematch apply truematch --decisions decisions.jsonl
    """

    port: NotNegative = option(8765, metavar="N", help="port of the page; 0: any free port")
    export: Path | None = option(
        None, metavar="FILE", help="write a page that needs no server and offers its decisions as a download"
    )


@dataclass
class ApplyOptions(_BenchmarkOptions):
    """Apply decisions: add them to the benchmark, and write kept.json and the card again."""

    examples: ClassVar[str] = """
        examples:
          captionrl truematch apply truematch --decisions decisions.jsonl
    """

    decisions: Path | None = option(None, metavar="FILE", help="download of an exported review page")


@dataclass
class EvaluateOptions(SeedOptions, CacheOptions, _SourceOptions):
    """Evaluate captioners on the benchmark. Writes results.json and results.md."""

    examples: ClassVar[str] = """
        examples:
          captionrl truematch evaluate truematch --models scenes:blip-mle --references
    """

    captions: list[Path] = option([], metavar="FILE", group="captioners", help="files of `captionrl caption`")
    names: list[str] | None = option(
        None,
        metavar="NAME",
        group="captioners",
        help="names of the files and models (default: those of the files and models)",
    )
    models: list[str] = option([], metavar="MODEL", group="captioners", help="models that first caption the images")
    references: bool = option(
        False, group="captioners", help="also evaluate one reference per image, against the other references"
    )
    output_dir: Path | None = option(
        None, metavar="DIR", group="captioners", help="folder to write (default: outputs/NAME OF THE FOLDER)"
    )
    scorer: str | None = option(
        None,
        metavar="NAME",
        group="evaluation",
        help="held-out dual encoder (default: scenes:siglip-held-out on the embedded world, else "
        "openai/clip-vit-base-patch32, as in the paper)",
    )
    all_bags: bool = option(False, group="evaluation", help="include bags that the review dropped")
    bag_images_only: bool = option(False, group="evaluation", help="leave out images that are in no bag")


@dataclass
class LeaderboardOptions(SeedOptions, CommandOptions):
    """Combine results into one table, best first. Writes leaderboard.md and leaderboard.html."""

    examples: ClassVar[str] = """
        examples:
          captionrl truematch leaderboard truematch results/*.json
    """

    folder: Path = option(positional=True, metavar="DIR", help="the benchmark, made by `captionrl truematch build`")
    results: list[Path] = option(positional=True, metavar="FILE", help="results.json of `truematch evaluate`")
    sort_by: str = option("3", metavar="K", help="score that orders the table: R@1 in bags of this size, or rd100")
    output_dir: Path | None = option(None, metavar="DIR", help="folder of the table (default: DIR)")


@dataclass
class LmmsEvalOptions(_SourceOptions):
    """Write a task folder for lmms-eval: TrueMatch, and self-retrieval among all images of the benchmark.

    The folder holds the images and the kept bags. lmms-eval's environment needs this package. The tasks name the folder by its
    absolute path: write it again where it is used.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl truematch lmms-eval truematch --output lmms_tasks
          python -m lmms_eval --include_path lmms_tasks --tasks captionrl_truematch,captionrl_self_retrieval --model ...
    """

    output: Path = option(Path("lmms_tasks"), metavar="DIR", help="folder to write into")
    scorer: str | None = option(
        None,
        metavar="NAME",
        help="held-out dual encoder (default: scenes:siglip-held-out on the embedded world, else openai/clip-vit-base-patch32)",
    )
    prompt: str = option("Describe the image in one sentence.", metavar="TEXT", help="the question beside the image")
