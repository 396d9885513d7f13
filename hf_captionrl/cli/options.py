"""Options of `captionrl evaluate`, which --help reads without importing what evaluates."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_captionrl.data.options import DatasetOptions, TrainingImagesOptions
from hf_captionrl.utils.options import CacheOptions, Positive, SeedOptions, option
from hf_captionrl.utils.prompts import KeptAnswers


@dataclass
class JudgeOptions:
    """A language or vision-language model that rates captions."""

    heading: ClassVar[str] = "judge"

    judge: str | None = option(
        None, metavar="KIND:NAME", help="model that rates captions: transformers:NAME, or openai:NAME with --judge_url"
    )
    judge_url: str | None = option(None, metavar="URL", help="address, such as http://127.0.0.1:8000/v1")
    judge_key_env: str | None = option(None, metavar="NAME", help="environment variable with the endpoint's key")
    judge_answers: Path | None = option(None, metavar="FILE", help="JSON Lines of answers, which are not asked again")
    max_requests: Positive | None = option(None, metavar="N", help="questions after which the command stops")

    @contextlib.contextmanager
    def loaded_judge(self, *, with_images: bool) -> Iterator[Any]:
        """Load it, None if none is named, and close its file of answers afterwards."""
        kind, _, name = (self.judge or "").partition(":")
        if self.judge is not None and (kind not in ("transformers", "openai") or not name):
            raise ValueError(f"--judge is {self.judge!r}. Use transformers:NAME, or openai:NAME with --judge_url.")
        if (kind == "openai") != (self.judge_url is not None):
            raise ValueError(f"--judge {self.judge!r} and --judge_url {self.judge_url!r}: openai:NAME needs both.")
        if self.max_requests is not None and self.judge_answers is None:
            raise ValueError(f"--max_requests is {self.max_requests}. Use it with --judge_answers FILE.")
        if self.judge is None:
            yield None
            return
        from hf_captionrl.captioners import language_model_clients as models

        judge: Any
        if kind == "openai":
            judge = models.HTTPBackend(
                str(self.judge_url), name, api_key_env=self.judge_key_env, is_multimodal=with_images
            )
        else:
            load = models.TransformersVisionBackend if with_images else models.TransformersTextBackend
            judge = load(name, device=getattr(self, "device", None))
        # Also without a file to keep, equal questions are asked once, and a judge that always fails ends the command.
        with tempfile.TemporaryDirectory() as folder:
            path = self.judge_answers or Path(folder) / "answers.jsonl"
            with KeptAnswers(judge, path, self.max_requests) as kept:
                yield kept


@dataclass
class EvaluateOptions(SeedOptions, CacheOptions, TrainingImagesOptions, DatasetOptions):
    """Compare captioners on the same images: by text alone, with --references, or with the images of a --dataset.

    Prints a table, one column per file, with 95 % intervals and marks where a file differs from the first (paired randomisation
    test). Writes comparison.json, .md, .csv and .tex, and lengths.png. Why a number is not run (no images, no Java,
    no truth) stands below the table. Images that a captioner was trained on are left out, if its file was written by
    `captionrl caption`.

    Without --dataset, the images are those that the captions name: every file must caption the same ones, all of them need
    references, and references of other images are left out, which a line on stderr says.
    """

    examples: ClassVar[str] = """
        suites:
          text         length, lexical diversity, vocabulary, perplexity, BLEU-1, BLEU-4, METEOR, ROUGE-L, CIDEr-D, SPICE
          smile        length, lexical diversity, self-retrieval in the pool and among 100, CLIPScore, perplexity, CIDEr-D
          discritune   P@1 among 100, BLEU-4, METEOR, CIDEr-D, SPICE; typical nouns and adjectives (needs spaCy)
          sle          Div-1, Div-2, mBLEU-4 and CIDEr-D of several captions per image
          ndlb         R@1 in bags of 3, 5 and 7 and among 100, BLEU-4, CIDEr-D, ClipSc, vocabulary
          all          all of these; a number that several tables have is shown once
        Where facts are known: also hallucination, fact recall and (ndlb) R@1 by them.

        examples:
          captionrl evaluate --captions a.json b.json --references refs.json
          captionrl evaluate --captions mle.jsonl smile.jsonl --dataset scenes --suite smile
          captionrl evaluate --captions a.jsonl b.jsonl --names MLE SMILE --dataset dataset_coco.json --image_root coco \\
              --scorer openai/clip-vit-base-patch32 --suite all --output_dir outputs/coco
          captionrl evaluate --captions a.jsonl --dataset scenes --scorer none --suite discritune --json

        captions and references, in any order:
          .jsonl           {"image_id": ..., "caption": ...} or {"image_id": ..., "captions": [...]} per line
          .json            results or annotations of COCO, {id: caption}, {id: [captions]}, a Karpathy split, a list of objects
          .csv .tsv        a column image_id (or file_name) and one caption, or several; also those of `captionrl album`
          .parquet         the same columns; or a folder of `captionrl caption --processes`
    """

    captions: list[Path] = option(metavar="FILE", help="files of captions; the others are compared with the first")
    references: Path | None = option(None, metavar="FILE", help="references (default: those of the data set)")
    names: list[str] | None = option(None, metavar="NAME", help="names of the files (default: file names)")
    suite: Literal["text", "smile", "discritune", "sle", "ndlb", "all"] | None = option(
        None, help="tables to compute (default: text without images, else smile)"
    )
    output_dir: Path = option(Path("outputs/evaluate"), metavar="DIR", help="folder to write")
    dataset: str = option(
        "",
        group=DatasetOptions.heading,
        metavar="NAME",
        help=f"images that are needed for retrieval: {DatasetOptions.__dataclass_fields__['dataset'].metadata['help']}; or 'none' "
        "(default: none with --references, else scenes)",
    )
    scorer: str | None = option(
        None,
        group="evaluation",
        metavar="NAME",
        help="dual encoder that evaluates: a folder, a name on the Hub, open_clip:NAME@TAG, scenes:siglip-held-out, or 'none' "
        "(default: scenes:siglip-held-out on the embedded world, else openai/clip-vit-base-patch32)",
    )
    clip_prefix: str | None = option(
        None,
        group="evaluation",
        metavar="TEXT",
        help="text before captions for CLIPScore (default: 'A photo depicts ')",
    )
    language_model: str | None = option(
        None,
        aliases=["--perplexity_model"],  # its name in the recipes
        group="evaluation",
        metavar="NAME",
        help="causal language model for perplexity (default: none, but scenes:gpt2-perplexity on the embedded world)",
    )
    pool: Path | None = option(
        None,
        group="evaluation",
        metavar="FILE",
        help="COCO names of the images that captions are ranked among (.json, .txt, .npy), such as CapEnrich's hard pool",
    )
    bags: Path | None = option(
        None,
        group="evaluation",
        metavar="FILE",
        help="a file of `captionrl bags`, TrueMatch's release, or JSON (default: the data set's column bag_id)",
    )
    tokenize: Literal["ptb", "char"] = option(
        "ptb", group="evaluation", help="'char': each character of a script without spaces is a word (Chinese, Thai)"
    )
    no_references: bool = option(False, group="evaluation", help="leave out the column of the human captions")
