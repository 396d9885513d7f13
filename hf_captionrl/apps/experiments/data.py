"""Samples several captions per image and measures their diversity.

Legend: B images, G captions per image.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch

from hf_captionrl.apps.experiments.arguments import DataArguments
from hf_captionrl.captioners import Captioner
from hf_captionrl.captioners.pipeline import LazyImages, generate_captions, vision_tower_features
from hf_captionrl.data import SPLITS, check_captions, exchange_captions, frames_of, load_caption_splits, open_still
from hf_captionrl.data.simplifying import scene_simplifier, simplify_captions, spacy_simplifier
from hf_captionrl.evaluation.evaluator import MORE_REFERENCES
from hf_captionrl.evaluation.options import EMBEDDED
from hf_captionrl.evaluation.pages import PanelItem, write_panel
from hf_captionrl.evaluation.plots import write_diversity_tradeoff
from hf_captionrl.metrics.columns import SAMPLE_COLUMNS
from hf_captionrl.metrics.suites import decoding_suite, diversity_at_cider_d, tradeoff_points
from hf_captionrl.retrieval import default_cache_dir
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.parts import shard_files

# --- The images and scorers of a recipe ------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


def load_data(
    arguments: DataArguments,
    *,
    output_dir: str | os.PathLike[str],
    seed: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    is_training: bool = True,
) -> datasets.DatasetDict:
    """Load, check and divide the data; invalid rows are written to `quarantine.jsonl`.

    Data without named splits are divided by `validation_share` and `test_share`; the sizes are logged.

    Args:
        arguments: Which data.
        output_dir: Folder of the quarantine file.
        seed: Seed of the division; by default `arguments.split_seed`.
        cache_dir: Root of the feature caches, which remember checked images; by default `default_cache_dir()`.
        is_training: Whether anything is trained. If not, `arguments.table_split` may be any split of the data.

    Returns:
        `datasets.DatasetDict`: `train`, `validation`, `test`; all three are the split of the table if it is another one.

    Raises:
        ValueError: If too many rows are invalid, or a column or split is missing.
    """
    if arguments.dataset_name in EMBEDDED and (arguments.data_dir or arguments.image_root):
        raise ValueError(
            f"data_dir or image_root is set, but dataset_name is {arguments.dataset_name!r}. Set --dataset_name imagefolder "
            "too."
        )
    validation, test = arguments.validation_share, arguments.test_share
    splits = load_caption_splits(
        arguments.dataset_name,
        data_dir=arguments.data_dir,
        image_root=arguments.image_root,
        image_column=arguments.image_column,
        caption_column=arguments.caption_column,
        dataset_config=arguments.dataset_config,
        revision=arguments.dataset_revision,
        split_fractions=(1 - validation - test, validation, test),
        seed=arguments.split_seed if seed is None else seed,
        num_frames=arguments.num_frames,
    )
    if not is_training and arguments.table_split not in SPLITS[1:]:
        # Data such as nocaps have nothing to train on, and nothing is trained.
        splits = datasets.DatasetDict(dict.fromkeys(SPLITS, _split_of_table(splits, arguments)))
    missing = [name for name in SPLITS if name not in splits or not len(splits[name])]
    if missing:
        sizes = {name: len(rows) for name, rows in splits.items()}
        raise ValueError(
            f"{arguments.dataset_name!r} has no images for {missing}; it has {sizes}. Give data with a train split, large "
            f"enough for the shares of validation ({validation:g}) and test ({test:g}), or raise --validation_share and "
            "--test_share."
        )
    if is_training and arguments.table_split not in SPLITS[1:]:
        raise ValueError(
            f"table_split is {arguments.table_split!r}. Use 'test' or 'validation'; an evaluation, num_train_epochs 0, can use "
            "any split of the data."
        )
    if arguments.table_split == "validation":
        splits["validation"], splits["test"] = splits["test"], splits["validation"]
    if arguments.train_captions is not None:
        files = _caption_files(arguments.train_captions)
        splits["train"] = exchange_captions(splits["train"], files, column=arguments.train_captions_column)
    logger.info("%s: %s.", arguments.dataset_name, ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items()))
    limits = {
        "train": arguments.max_train_images,
        "validation": arguments.max_eval_images,
        "test": arguments.max_test_images,
    }
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise ValueError(f"The limit of images of {name} is {limit}. Use 1 or more, or leave it out.")
        if limit is not None and name in splits:
            splits[name] = splits[name].select(range(min(limit, len(splits[name]))))
    if arguments.dataset_name in EMBEDDED:
        return _with_test_references(
            _simplified(splits, arguments), arguments
        )  # made a moment ago, checked by the tests
    checked, report = check_captions(
        splits,
        quarantine_path=Path(output_dir) / "quarantine.jsonl",
        max_bad_fraction=arguments.max_bad_fraction,
        cache_dir=cache_dir or default_cache_dir(),
    )
    logger.info("%s", report)
    return _with_test_references(_simplified(checked, arguments), arguments)


def _split_of_table(splits: Mapping[str, datasets.Dataset], arguments: DataArguments) -> datasets.Dataset:
    """The images of `arguments.table_split`."""
    if arguments.table_split not in splits:
        raise ValueError(
            f"table_split is {arguments.table_split!r}, but {arguments.dataset_name!r} has {list(splits)}. Use one of them."
        )
    return splits[arguments.table_split]


def _caption_files(path: str) -> Any:
    """A file of captions, or the shards of a finished folder."""
    return shard_files(path) if Path(path).is_dir() else path


def _with_test_references(splits: datasets.DatasetDict, arguments: DataArguments) -> datasets.DatasetDict:
    """The splits; the test split has the references of `arguments.test_references` in the column `more_references`."""
    if arguments.test_references is None:
        return splits
    test = splits["test"]
    files = _caption_files(arguments.test_references)
    found = exchange_captions(test, files, column=arguments.test_references_column)
    if len(found) < len(test):
        raise ValueError(
            f"test_references has {len(found)} of the {len(test)} test images. Use a file of the whole test split, or "
            "max_test_images."
        )
    splits["test"] = test.add_column(MORE_REFERENCES, list(found["captions"]))
    return splits


def _simplified(splits: datasets.DatasetDict, arguments: DataArguments) -> datasets.DatasetDict:
    """The splits with captions shortened by `arguments.simplify`."""
    level: Any = arguments.simplify
    if level is None:
        return splits
    simplifier = scene_simplifier(level) if arguments.dataset_name in EMBEDDED else spacy_simplifier(level)
    return datasets.DatasetDict({name: simplify_captions(rows, simplifier) for name, rows in splits.items()})


def describe_data(arguments: DataArguments, splits: Mapping[str, datasets.Dataset]) -> str:
    """Description of the data for the model card.

    Args:
        arguments: Which data.
        splits: The splits as used.

    Returns:
        `str`: One or two sentences.
    """
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items())
    shortened = {
        None: "",
        "simplest": " shortened to the subject",
        "simpler": " shortened to subject, verb and object",
    }[arguments.simplify]
    if arguments.dataset_name in EMBEDDED:
        what = "clips" if arguments.num_frames else "scenes"
        return (
            f"The embedded world of hf_captionrl: {what} of Noto Emoji sprites composed by rule, each with five captions "
            f"that leave most facts out{',' * bool(shortened)}{shortened} ({sizes} {'videos' if arguments.num_frames else 'images'})."
        )
    of_frames = f" ({arguments.num_frames} frames of each)" if arguments.num_frames else ""
    return f"{sizes} {'videos' if arguments.num_frames else 'images'} with their captions{shortened}{of_frames}."


# --- Samples several captions per image and measures their diversity -------------------------------------------------


@dataclass
class SampleArguments:
    """Number of captions per image, and how they are sampled and shown."""

    num_samples: int = field(default=5, metadata={"help": "Captions per image; 5 in the paper."})
    sample_images: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of images for these captions, of the test split and of the validation split."
        },
    )
    sample_temperatures: list[float] = field(
        default_factory=lambda: [0.5, 0.75, 1.0, 1.25],
        metadata={"help": "Temperatures of the trade-off plot. The table uses 1, which is always included."},
    )
    panel_images: int = field(default=6, metadata={"help": "Images shown in panel.html; 0 writes none."})

    def __post_init__(self) -> None:
        if self.num_samples < 2:
            raise ValueError(f"num_samples is {self.num_samples}. Use 2 or more: diversity is between captions.")
        if self.sample_images is not None and self.sample_images < 1:
            raise ValueError(f"sample_images is {self.sample_images}. Use 1 or more, or None for all images.")
        if not all(temperature > 0 for temperature in self.sample_temperatures):
            raise ValueError(f"sample_temperatures are {self.sample_temperatures}. Use positive numbers.")


class Sampler:
    """Generates several captions per image of a split, and measures them."""

    def __init__(
        self,
        dataset: datasets.Dataset,
        arguments: SampleArguments,
        *,
        seed: int,
        batch_size: int,
        max_new_tokens: int,
        cache_features: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        number = min(arguments.sample_images or len(dataset), len(dataset))
        self.dataset = dataset.select(range(number))
        self.arguments = arguments
        self.seed = seed
        self.cache_features = cache_features or bool(frames_of(dataset))
        self.cache_dir = cache_dir
        self.settings: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": max_new_tokens}
        self.references = [list(texts) for texts in self.dataset["captions"]]
        self.frequencies = DocumentFrequencies.from_references(
            [[ptb_tokenize(text) for text in texts] for texts in dataset["captions"]]
        )
        self.samples: dict[str, list[list[str]]] = {}  # row name -> captions at temperature 1
        self.points: dict[str, list[dict[str, Any]]] = {}  # row name -> one point per temperature

    def write(self, captioner: Captioner, **generate_kwargs: Any) -> list[list[str]]:
        """Captions of each image, `num_samples` per image."""
        G = self.arguments.num_samples
        images: dict[str, Any]
        if self.cache_features:
            features = vision_tower_features(captioner, self.dataset, cache_dir=self.cache_dir)
            images = {"images": None, "image_features": features}
        else:
            images = {"images": LazyImages(self.dataset, range(len(self.dataset)))}
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            flat = generate_captions(captioner, **images, num_return_sequences=G, **self.settings, **generate_kwargs)
        return [flat[start : start + G] for start in range(0, len(flat), G)]

    def sample(self, name: str, captioner: Captioner) -> None:
        """Sample captions at each temperature; stores those at temperature 1, and the points of the plot."""
        by_temperature = {
            temperature: self.write(captioner, do_sample=True, num_beams=1, top_k=0, temperature=temperature)
            for temperature in sorted({1.0, *self.arguments.sample_temperatures})
        }
        self.samples[name] = by_temperature[1.0]
        self.points[name] = tradeoff_points(by_temperature, **self._measured_with())

    def measure(self, name: str, captioner: Captioner) -> dict[str, Any]:
        """The columns of one row, except those at equal CIDEr-D; stores the samples for plot and panel."""
        self.sample(name, captioner)
        beams = self.write(captioner, do_sample=False, num_beams=self.arguments.num_samples)
        return decoding_suite({"rs": self.samples[name], "bs": beams}, **self._measured_with())

    def _measured_with(self) -> dict[str, Any]:
        return {"references": self.references, "frequencies": self.frequencies, "seed": self.seed}

    def at_equal_cider_d(self, control: str) -> dict[str, dict[str, float] | None]:
        """Diversity of each captioner at the CIDEr-D that the control's samples have at temperature 1, by row name.

        None for captioners that do not have this CIDEr-D at any temperature in the range; empty without the control.
        """
        if control not in self.points:
            return {}
        (cider_d,) = (point["cider_d"] for point in self.points[control] if point["temperature"] == 1.0)
        return {name: diversity_at_cider_d(points, cider_d) for name, points in self.points.items()}

    def add_equal_cider_d(self, rows: Sequence[dict[str, Any]], control: str) -> None:
        """Add the columns at equal CIDEr-D to the rows of captioners."""
        found = self.at_equal_cider_d(control)
        missing = (
            f"none of the sampled temperatures has the CIDEr-D of {control}" if found else f"{control} was not sampled"
        )
        for row in rows:
            for key in ("div_2", "mbleu_4_per_image") if row["name"] in self.points else ():
                numbers = found.get(row["name"])
                row[f"equal_cider_{key}"] = numbers[key] if numbers else None
                if numbers is None:
                    row[f"equal_cider_{key}_reason"] = missing

    def not_measured(self, reason: str) -> dict[str, Any]:
        """The columns of a row without samples."""
        row: dict[str, Any] = {}
        for column in SAMPLE_COLUMNS:
            row |= {column.key: None, f"{column.key}_reason": reason}
        return row


def write_samples(output_dir: str | os.PathLike[str], sampler: Sampler, *, title: str, **more: Any) -> Path:
    """Write tradeoff.png, panel.html and samples.json: every point of the plot, every caption at temperature 1, and `more`."""
    folder = Path(output_dir)
    write_diversity_tradeoff(folder / "tradeoff.png", sampler.points, title=f"{title}: CIDEr-D against diversity")
    shown = min(sampler.arguments.panel_images, len(sampler.dataset))
    if shown:
        items = [_panel_item(sampler.dataset[index], index, sampler.samples) for index in range(shown)]
        note = f"{sampler.arguments.num_samples} random samples per captioner at temperature 1, not selected."
        write_panel(folder / "panel.html", items, title, note=note)
    ids = [str(i) for i in sampler.dataset["image_id"]]
    captions = {name: dict(zip(ids, groups, strict=True)) for name, groups in sampler.samples.items()}
    record = {"points": sampler.points, "captions": captions, "seed": sampler.seed}
    return write_json(folder / "samples.json", record | more)


def _panel_item(row: Mapping[str, Any], index: int, samples: Mapping[str, Sequence[Sequence[str]]]) -> PanelItem:
    captions = {name: groups[index] for name, groups in samples.items()}
    return PanelItem(open_still(row), str(row["image_id"]), captions, list(row["captions"]))
