"""What the recipes share: their arguments, data, evaluation and report."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch

from hf_captionrl.captioners import Captioner, load_captioner
from hf_captionrl.data import SPLITS, cached_features, check_captions, load_caption_splits, open_image
from hf_captionrl.metrics import caption_perplexity
from hf_captionrl.metrics.suites import EMPTY_CAPTION, smile_suite
from hf_captionrl.reports.curves import write_curves
from hf_captionrl.reports.gallery import GalleryCaption, GalleryItem, write_gallery
from hf_captionrl.reports.table import print_table, write_results
from hf_captionrl.retrieval import FeatureCache, Scorer, load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, check
from hf_captionrl.scenes.models import PREFIX, model_path

__all__ = [
    "DataArguments",
    "EvaluationArguments",
    "Evaluator",
    "ModelArguments",
    "load_data",
    "parse_arguments",
    "write_report",
]

logger = logging.getLogger(__name__)

_CLIP = "openai/clip-vit-base-patch32"  # the papers' judge
_GPT2 = "openai-community/gpt2"  # and their language model


@dataclass
class ModelArguments:
    """Which captioner is finetuned, and which of its parts."""

    model_name_or_path: str = field(
        default="scenes:blip-mle",
        metadata={
            "help": "Captioner to start from: a folder, a name on the Hub (e.g. Salesforce/blip-image-captioning-base), or "
            "a shipped model (scenes:blip-mle)."
        },
    )
    model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit on the Hub."})
    tune: str | None = field(
        default=None, metadata={"help": "Train a LoRA on 'language', 'vision' or 'both'. None: train all weights."}
    )
    lora_r: int = field(default=32, metadata={"help": "Rank of the LoRA."})
    lora_alpha: int = field(default=16, metadata={"help": "Scale of the LoRA."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the LoRA."})
    model_license: str | None = field(
        default=None,
        metadata={
            "help": "Licence for the model card: that of the base model. None: apache-2.0 for shipped models, else 'other'."
        },
    )

    def load(self, prompt: str | None = None) -> Captioner:
        """Load the captioner anew, in fp32.

        Args:
            prompt: Text that every caption continues; None for the family's own.

        Returns:
            [`Captioner`]: The captioner.
        """
        return load_captioner(
            model_path(self.model_name_or_path), revision=self.model_revision, prompt=prompt, dtype=torch.float32
        )

    @property
    def public_name(self) -> str:
        """Name of the captioner for the model card: never a path of this machine."""
        name = self.model_name_or_path
        if name.startswith(PREFIX):
            return f"hf-captionrl-scenes-{name.removeprefix(PREFIX)}"
        return Path(name).name if Path(name).exists() else name

    @property
    def license(self) -> str:
        """Licence of the finetuned model, as the Hub writes it."""
        shipped = self.model_name_or_path.startswith(PREFIX)
        return self.model_license or ("apache-2.0" if shipped else "other")

    @property
    def peft_config(self) -> dict[str, Any] | None:
        """Arguments of `Captioner.add_lora`, or None if all weights are trained."""
        if self.tune is None:
            return None
        return {"tune": self.tune, "r": self.lora_r, "alpha": self.lora_alpha, "dropout": self.lora_dropout}


@dataclass
class DataArguments:
    """Which captioned images are trained and tested on."""

    dataset_name: str = field(
        default="scenes",
        metadata={
            "help": "'scenes' (the embedded world), 'imagefolder' with --data_dir, a Karpathy-split JSON with --image_root, "
            "or any data set on the Hub or on disk."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the Hub."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of it."})
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder of 'imagefolder': images and a metadata.jsonl."}
    )
    image_root: str | None = field(default=None, metadata={"help": "Folder that image paths are relative to."})
    image_column: str = field(default="image", metadata={"help": "Column with the images."})
    caption_column: str = field(
        default="captions", metadata={"help": "Column with the captions, a text or a list of texts."}
    )
    max_bad_fraction: float = field(
        default=0.05, metadata={"help": "Share of unusable rows above which training does not start."}
    )
    max_train_images: int | None = field(default=None, metadata={"help": "Use only so many training images."})
    max_eval_images: int | None = field(default=None, metadata={"help": "Use only so many validation images."})
    max_test_images: int | None = field(default=None, metadata={"help": "Use only so many test images."})


@dataclass
class EvaluationArguments:
    """Who judges the captions."""

    scorer_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Dual encoder that selects checkpoints by retrieval; open_clip:NAME for open_clip, 'none'."},
    )
    judge_name_or_path: str | None = field(
        default=None, metadata={"help": "Dual encoder that judges the table; better not the one that selects."}
    )
    perplexity_name_or_path: str | None = field(
        default=None, metadata={"help": "Causal language model for perplexity, or 'none'."}
    )
    gallery_size: int = field(default=48, metadata={"help": "Images shown in gallery.html."})

    def resolve(self, dataset_name: str) -> None:
        """Fill in who was not named: the shipped models on the embedded world, the papers' models elsewhere.

        Args:
            dataset_name: Data set of the run.
        """
        embedded = dataset_name == "scenes"
        self.scorer_name_or_path = self.scorer_name_or_path or ("scenes:clip-reward" if embedded else _CLIP)
        self.judge_name_or_path = self.judge_name_or_path or ("scenes:clip-judge" if embedded else _CLIP)
        if self.scorer_name_or_path == self.judge_name_or_path != "none":
            logger.warning(
                "%s both selects checkpoints and judges them, which flatters what it selects. Set --judge_name_or_path to "
                "another model.",
                self.judge_name_or_path,
            )
        self.perplexity_name_or_path = self.perplexity_name_or_path or (
            "scenes:gpt2-perplexity" if embedded else _GPT2
        )


def parse_arguments(
    dataclass_types: Sequence[type],
    argv: Sequence[str] | None,
    *,
    default_config: str | os.PathLike[str] | None = None,
) -> tuple[Any, ...]:
    """Parse a recipe's arguments: defaults, then `--config file.yaml`, then the command line.

    Args:
        dataclass_types: The dataclasses to fill.
        argv: Arguments without the program's name; None for `sys.argv`.
        default_config: YAML file used where the command line names no config, model or data set of its own.

    Returns:
        One filled dataclass for each type.

    Raises:
        ValueError: If the YAML file holds an argument that no dataclass has.
    """
    import sys

    from trl import TrlParser

    arguments = list(sys.argv[1:] if argv is None else argv)
    arguments = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--config=") else [a])]
    # Whoever brings a model or data of his own gets the paper's settings, not those of a tiny model.
    own = ("--config", "--model_name_or_path", "--dataset_name", "--data_dir", "--image_root")
    given = {a.split("=")[0].replace("-", "_").replace("__", "--", 1) for a in arguments if a.startswith("--")}
    if default_config is not None and not given & set(own):
        arguments = ["--config", os.fspath(default_config), *arguments]
    return TrlParser(tuple(dataclass_types)).parse_args_and_config(arguments)


def load_data(arguments: DataArguments, *, output_dir: str | os.PathLike[str], seed: int) -> datasets.DatasetDict:
    """Load, check and cut the data; bad rows go to `quarantine.jsonl`.

    Args:
        arguments: Which data.
        output_dir: Where the quarantine file goes.
        seed: Of the split, where the data bring none.

    Returns:
        `datasets.DatasetDict`: `train`, `validation`, `test`.

    Raises:
        ValueError: If too many rows are bad, or a column is missing.
    """
    if arguments.dataset_name == "scenes" and (arguments.data_dir or arguments.image_root):
        raise ValueError(
            "data_dir or image_root is set, but dataset_name is 'scenes'. Set --dataset_name imagefolder too."
        )
    splits = load_caption_splits(
        arguments.dataset_name,
        data_dir=arguments.data_dir,
        image_root=arguments.image_root,
        image_column=arguments.image_column,
        caption_column=arguments.caption_column,
        dataset_config=arguments.dataset_config,
        revision=arguments.dataset_revision,
        seed=seed,
    )
    missing = [name for name in SPLITS if name not in splits or not len(splits[name])]
    if missing:
        sizes = {name: len(rows) for name, rows in splits.items()}
        raise ValueError(
            f"{arguments.dataset_name!r} has no images for {missing}; it has {sizes}. Give data with a train split, large "
            "enough that a tenth of it can be validation and a tenth test."
        )
    limits = {
        "train": arguments.max_train_images,
        "validation": arguments.max_eval_images,
        "test": arguments.max_test_images,
    }
    for name, limit in limits.items():
        if limit is not None and name in splits:
            splits[name] = splits[name].select(range(min(limit, len(splits[name]))))
    if arguments.dataset_name == "scenes":
        return splits  # made a moment ago, checked by the tests
    checked, report = check_captions(
        splits,
        quarantine_path=Path(output_dir) / "quarantine.jsonl",
        max_bad_fraction=arguments.max_bad_fraction,
    )
    logger.info("%s", report)
    return checked


class Evaluator:
    """Judges captions of the test split, for the table and the gallery.

    Args:
        dataset: The test split.
        judge: Scorer that judges retrieval, or None.
        language_model: `(model, tokenizer)` that judges fluency, or None.
        seed: Of bootstrap and random choice.
        cache_dir: Folder of the feature cache; None for the default one.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        judge: Scorer | None,
        language_model: tuple[Any, Any] | None,
        *,
        seed: int,
        cache_dir: str | None = None,
    ) -> None:
        self.dataset = dataset
        self.judge = judge
        self.seed = seed
        self.ranks: dict[str, Any] = {}  # row name -> rank of each test image in the whole pool
        self.references: list[list[str]] = [list(c) for c in dataset["captions"]]
        columns = dataset.column_names
        self.facts = list(dataset["facts"]) if "facts" in columns else None
        self.bags: dict[int, list[list[int]]] = {}
        if "bag_id" in columns:
            ids = list(dataset["bag_id"])
            whole = {bag_id for bag_id, n in Counter(ids).items() if bag_id.startswith(f"{n}-")}
            sizes = [size for size in BAG_SIZES if any(bag_id.startswith(f"{size}-") for bag_id in whole)]
            self.bags = {size: bags(ids, size) for size in sizes}
        self.perplexity: Callable[[Sequence[str]], float] | None = None
        if language_model is not None:
            model, tokenizer = language_model
            self.perplexity = lambda captions: float(
                caption_perplexity(list(captions), model, tokenizer)["perplexity"]
            )
        self.image_features = None
        if judge is not None:
            self.image_features = cached_features(
                FeatureCache.for_scorer(judge, cache_dir), dataset, judge.image_features
            ).tensor()

    @classmethod
    def from_arguments(
        cls, dataset: datasets.Dataset, arguments: EvaluationArguments, *, seed: int, cache_dir: str | None = None
    ) -> Evaluator:
        """Load the judges and look at the test images once.

        Args:
            dataset: The test split.
            arguments: Who judges.
            seed: Of bootstrap and random choice.
            cache_dir: Folder of the feature cache; None for the default one.

        Returns:
            [`Evaluator`]: Ready.
        """
        language_model = None
        name = arguments.perplexity_name_or_path
        if name and name != "none":
            from transformers import AutoModelForCausalLM, AutoTokenizer

            path = model_path(name)
            language_model = (
                AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
                AutoTokenizer.from_pretrained(path),
            )
        return cls(
            dataset, optional_scorer(arguments.judge_name_or_path), language_model, seed=seed, cache_dir=cache_dir
        )

    def row(self, name: str, captions: Sequence[str], references: list[list[str]] | None = None) -> dict[str, Any]:
        """One row of the table.

        Args:
            name: Row name.
            captions: One caption a test image.
            references: Instead of all references of the test split.

        Returns:
            `dict`: Name and numbers, see `smile_suite`.
        """
        # The papers' prefix "A photo depicts" is left out: a judge of the embedded world has never read it.
        text = None
        if self.judge is not None:
            text = self.judge.text_features([caption.strip() or EMPTY_CAPTION for caption in captions])
        numbers = smile_suite(
            captions,
            references=references or self.references,
            text_features=text,
            image_features=self.image_features,
            perplexity=self.perplexity,
            facts=self.facts,
            check=check if self.facts is not None else None,
            bags=self.bags,
            seed=self.seed,
        )
        if "ranks" in numbers:
            self.ranks[name] = numbers.pop("ranks")
        return {"name": name, **numbers}

    def reference_row(self) -> tuple[dict[str, Any], list[str]]:
        """The human row: one random reference an image, scored against the others.

        Returns:
            The row, and the chosen references.
        """
        rng = random.Random(self.seed)
        chosen = [rng.randrange(len(r)) for r in self.references]
        captions = [r[i] for r, i in zip(self.references, chosen, strict=True)]
        others = [
            [c for j, c in enumerate(r) if j != i] or list(r) for r, i in zip(self.references, chosen, strict=True)
        ]
        return self.row("references", captions, others), captions


def optional_scorer(name: str | None) -> Scorer | None:
    """Load a scorer by name.

    Args:
        name: A name for `load_scorer`, a shipped model, or `"none"`.

    Returns:
        [`Scorer`] or None.
    """
    return None if name in (None, "none") else load_scorer(model_path(str(name)))


def write_report(
    output_dir: str | os.PathLike[str],
    evaluator: Evaluator,
    rows: list[dict[str, Any]],
    captions: dict[str, list[str]],
    histories: dict[str, list[dict[str, float]]],
    *,
    title: str,
    seed: int,
    config: dict[str, Any],
    gallery_size: int,
) -> Path:
    """Write results.json, results.md, gallery.html and curves.png, and print the table.

    Args:
        output_dir: Where to.
        evaluator: Knows the test split.
        rows: Rows of the table.
        captions: For each captioner its captions of the test split.
        histories: For each finetuned captioner its evaluations during training.
        title: Title of the table.
        seed: Seed of the run.
        config: What the run was told, by name.
        gallery_size: Images in the gallery.

    Returns:
        `pathlib.Path`: The JSON file.
    """
    folder = Path(output_dir)
    path = write_results(folder, rows, seed=seed, config=config, title=title)
    chosen = random.Random(seed).sample(range(len(evaluator.dataset)), min(gallery_size, len(evaluator.dataset)))
    items = [gallery_item(evaluator, index, captions) for index in sorted(chosen)]
    write_gallery(folder / "gallery.html", items, title=title)
    if any(histories.values()):
        write_curves(folder / "curves.png", histories)
    print_table(rows, title=title)
    return path


def describe_data(arguments: DataArguments, splits: Mapping[str, datasets.Dataset]) -> str:
    """What the model card says of the data.

    Args:
        arguments: Which data.
        splits: The splits as used.

    Returns:
        `str`: One or two sentences.
    """
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items())
    if arguments.dataset_name == "scenes":
        return (
            "The embedded world of hf_captionrl: scenes of Noto Emoji sprites composed by rule, each with five captions "
            f"that leave most facts out ({sizes} images)."
        )
    return f"{sizes} images with their captions."


def gallery_item(evaluator: Evaluator, index: int, captions: dict[str, list[str]]) -> GalleryItem:
    """One image of the gallery with its captions, claims judged where the truth is known.

    Args:
        evaluator: Knows the test split.
        index: Row of the image.
        captions: For each captioner its captions.

    Returns:
        [`GalleryItem`]: For `write_gallery`.
    """
    row = evaluator.dataset[index]
    shown = []
    for name, mine in captions.items():
        right: list[str] = []
        wrong: list[str] = []
        if evaluator.facts is not None:
            result = check(mine[index], evaluator.facts[index])
            right, wrong = [c.text for c in result.right], [c.text for c in result.wrong]
        ranks = evaluator.ranks.get(name)
        rank = None if ranks is None else int(ranks[index])
        shown.append(GalleryCaption(name, mine[index], right, wrong, rank, len(mine)))
    return GalleryItem(open_image(row["image"]), row["image_id"], shown, list(row["captions"]))


def describe(arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments by the names of their dataclasses, for results.json.

    Args:
        arguments: Dataclass instances.

    Returns:
        `dict`: Class name to fields.
    """
    return {type(a).__name__: {f.name: getattr(a, f.name) for f in dataclasses.fields(a)} for a in arguments}
