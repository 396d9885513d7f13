"""Options of `captionrl evaluate`, which --help reads without importing what evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from hf_captionrl.data.options import DatasetOptions, HeldOutScorerOptions, TrainingImagesOptions
from hf_captionrl.utils.options import EngineOptions, SeedOptions, option


@dataclass
class EvaluateOptions(SeedOptions, EngineOptions, HeldOutScorerOptions, TrainingImagesOptions, DatasetOptions):
    """Compare captioners on one data set.

    Prints the table of a paper, one column per file, with 95 % intervals and marks where a file differs from the first
    (paired randomisation test). Writes comparison.json, comparison.md, lengths.png and trade_off.png. A cell that cannot be
    computed (no Java, no network, no truth) states the reason. Images that a captioner was trained on are left out, if its file
    was written by `captionrl caption`.

    With --processes or --engine, workers compute features of images and captions, ranks and perplexity on Parquet shards in
    OUTPUT_DIR/shards. The numbers are equal, and the same command skips finished shards.
    """

    examples: ClassVar[str] = """
        suites:
          smile        length, lexical diversity, self-retrieval in the pool and among 100, CLIPScore, perplexity, CIDEr-D
          discritune   P@1 among 100, BLEU-4, METEOR, CIDEr-D, SPICE; typical nouns and adjectives (needs spaCy)
          sle          Div-1, Div-2, mBLEU-4 and CIDEr-D of several captions per image
          ndlb         R@1 in bags of 3, 5 and 7 and among 100, BLEU-4, CIDEr-D, ClipSc, vocabulary
          all          all of these
        Where the facts of an image are known, the tables also show hallucination and fact recall. --bleurt, --nli and --entropy_of
        add a table of metrics that need further models.

        examples:
          captionrl evaluate --captions mle.jsonl smile.jsonl --dataset scenes --suite smile
          captionrl evaluate --captions a.jsonl b.jsonl --names MLE SMILE --dataset dataset_coco.json --image_root coco \\
              --scorer openai/clip-vit-base-patch32 --suite all --output_dir outputs/coco
          captionrl evaluate --captions a.jsonl --scorer none --suite discritune --json
          captionrl evaluate --captions captions --dataset OWNER/NAME --split train --suite ndlb --processes 8

        captions: one JSON object per line, {"image_id": ..., "caption": ...} or {"image_id": ..., "captions": [...]}, one
        line per image of the split, in any order. `captionrl caption` writes such files.
    """

    captions: list[Path] = option(metavar="FILE", help="files of captions; the others are compared with the first")
    names: list[str] | None = option(
        None, metavar="NAME", help="names of the files in the tables (default: file names)"
    )
    suite: Literal["smile", "discritune", "sle", "ndlb", "all"] = option("smile", help="tables to compute")
    output_dir: Path = option(Path("outputs/evaluate"), metavar="DIR", help="folder to write")
    clip_prefix: str | None = option(
        None,
        group="evaluation",
        metavar="TEXT",
        help="text before each caption for the CLIPScore of the smile suite (default: 'A photo depicts ', as in the paper; "
        "none for scorers of the embedded world, which were trained without it)",
    )
    language_model: str | None = option(
        None,
        group="evaluation",
        metavar="NAME",
        help="causal language model for perplexity, or 'none' (default: scenes:gpt2-perplexity on the embedded world, else "
        "openai-community/gpt2)",
    )
    pool: Path | None = option(
        None,
        group="evaluation",
        metavar="FILE",
        help="COCO names of the images that captions are ranked among (.json, .txt, .npy), such as CapEnrich's hard pool of "
        "SMILE; their images are taken from all splits (default: the images of the split)",
    )
    bags: Path | None = option(
        None,
        group="evaluation",
        metavar="FILE",
        help="bags of similar images: a file of `captionrl bags`, the folder of TrueMatch's release, or JSON, "
        '{"3": [["id", "id", "id"], ...], "5": ...} (default: the data set\'s column bag_id)',
    )
    bleurt: str | None = option(
        None,
        group="evaluation",
        metavar="NAME",
        help="also compute BLEURT with this model for sequence classification, e.g. Elron/bleurt-large-512",
    )
    nli: str | None = option(
        None,
        group="evaluation",
        metavar="NAME",
        help="also compute the probability that a reference follows from the caption, with this model for natural language "
        "inference, e.g. FacebookAI/roberta-large-mnli",
    )
    entropy_of: str | None = option(
        None,
        group="evaluation",
        metavar="CAPTIONER",
        help="also compute the mean entropy of this captioner's distributions along the captions, in nats",
    )
    no_references: bool = option(False, group="evaluation", help="leave out the column of the human captions")
