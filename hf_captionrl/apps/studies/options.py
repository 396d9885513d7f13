"""Options of `captionrl study` and its actions; light to import, because `--help` needs them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from hf_captionrl.data.options import DatasetOptions, SimilarityOptions
from hf_captionrl.utils.options import CommandOptions, NotNegative, Positive, Range, SeedOptions, option


@dataclass
class StudyOptions(SeedOptions, DatasetOptions):
    """Options shared by both designs."""

    heading: ClassVar[str] = "study"

    captions: list[Path] = option(metavar="FILE", help="one file of `captionrl caption` per system")
    names: list[str] | None = option(None, metavar="NAME", help="names of the systems (default: the files' names)")
    references: bool = option(False, help="add one human caption per image as a system")
    output: Path = option(metavar="DIR", help="folder to write into")
    overwrite: bool = option(False, help="replace another study, whose answers can then no longer be scored")
    consent: Path | None = option(None, metavar="FILE", help="text that participants must agree to before they start")


@dataclass
class RetrievalOptions(StudyOptions, SimilarityOptions):
    """Build a retrieval study: participants pick the image of a caption among similar images.

    Design of DiscriTune (section 5.3 and Appendix A). The pages open without a server. Give each participant one, and keep
    key.json to yourself.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl study build retrieval --captions mle.jsonl smile.jsonl --references --dataset scenes --output study
    """

    output: Path = option(Path("study-retrieval"), metavar="DIR", help="folder to write into")
    num_sets: Positive | None = option(
        None,
        metavar="N",
        group="sets",
        help="number of sets of images (default: the paper's 500, or as many as the images allow)",
    )
    set_size: Annotated[int, Range(at_least=2, at_most=10)] = option(
        10, metavar="K", group="sets", help="images per set, 2 to 10"
    )
    max_similarity: Annotated[float, Range(above=-1, at_most=1)] = option(
        0.8, metavar="X", group="sets", help="largest cosine similarity of a target and its neighbours"
    )
    block_size: Positive = option(100, metavar="N", group="sets", help="number of questions per page")
    controls: NotNegative = option(5, metavar="N", group="sets", help="number of control questions per page")
    features: Literal["multimodal", "image"] = dataclasses.field(default="image", init=False)


@dataclass
class RatingOptions(StudyOptions):
    """Build a rating study: participants rate captions on three scales.

    Design of SMILE (section 3.2): descriptiveness, accuracy and fluency, each from 1 to 5. The pages open without a server.
    Give each participant one, and keep key.json to yourself.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl study build rating --captions mle.jsonl smile.jsonl --names MLE SMILE --dataset scenes --output ratings
    """

    output: Path = option(Path("study-rating"), metavar="DIR", help="folder to write into")
    num_images: Positive = option(50, metavar="N", group="images and raters", help="number of images, drawn at random")
    num_raters: Positive = option(5, metavar="N", group="images and raters", help="number of pages, one per rater")


@dataclass
class ScoreOptions(SeedOptions, CommandOptions):
    """Score answers with the key of the study. Writes results.json, results.md and results.html."""

    examples: ClassVar[str] = """
        examples:
          captionrl study score study answers
    """

    folder: Path = option(positional=True, metavar="DIR", help="the study, made by `captionrl study build`")
    answers: list[Path] = option(positional=True, metavar="ANSWERS", help="files, or folders of them")
    max_wrong_controls: NotNegative = option(
        1, metavar="N", help="drop a participant's page with more wrong answers to controls than this"
    )
    allow_incomplete: bool = option(False, help="count participants who stopped before the end")
    output_dir: Path | None = option(None, metavar="DIR", help="folder of the tables (default: DIR)")
