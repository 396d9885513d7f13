"""The images of a recipe, and several captions per image (G) with their diversity."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import datasets
import torch

from hf_captionrl.apps.experiments.arguments import DataArguments
from hf_captionrl.captioners import Captioner
from hf_captionrl.captioners.pipeline import generate_captions, vision_tower_features
from hf_captionrl.data import SPLITS, check_captions, exchange_captions, frames_of, load_caption_splits, open_still
from hf_captionrl.data.simplifying import scene_simplifier, simplify_captions, spacy_simplifier
from hf_captionrl.evaluation.evaluator import MORE_REFERENCES
from hf_captionrl.evaluation.options import EMBEDDED
from hf_captionrl.evaluation.pages import GalleryCaption, GalleryItem, write_gallery
from hf_captionrl.evaluation.plots import write_diversity_tradeoff
from hf_captionrl.metrics.columns import SAMPLE_COLUMNS
from hf_captionrl.metrics.suites import diversity_at_cider_d, suite
from hf_captionrl.text.cider_d import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize
from hf_captionrl.trainers import CaptionConfig
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.options import Positive, Range, check_values, documented
from hf_captionrl.utils.parts import part_files

# --- The images of a recipe ------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)


def load_data(
    arguments: DataArguments,
    *,
    output_dir: str | os.PathLike[str],
    is_training: bool = True,
) -> datasets.DatasetDict:
    """Load, check and divide the data into `train`, `validation` and `test`; invalid rows are written to `quarantine.jsonl`.

    If nothing is trained, `arguments.table_split` may be any split of the data; all three are then that split.
    """
    is_embedded, table_split = arguments.dataset_name in EMBEDDED, arguments.table_split
    source = arguments.source | {"num_frames": arguments.num_frames}
    splits = load_caption_splits(arguments.dataset_name, **source)
    if not is_training and table_split not in SPLITS[1:]:
        if table_split not in splits:
            raise ValueError(f"table_split is {table_split!r}, but {arguments.dataset_name!r} has {list(splits)}.")
        # Data such as nocaps have nothing to train on, and nothing is trained.
        splits = datasets.DatasetDict(dict.fromkeys(SPLITS, splits[table_split]))
    missing = [name for name in SPLITS if name not in splits or not len(splits[name])]
    if missing:
        raise ValueError(
            f"{arguments.dataset_name!r} has no images for {missing}. Raise --validation_share, --test_share."
        )
    if is_training and table_split not in SPLITS[1:]:
        raise ValueError(f"table_split is {table_split!r}. Use 'test' or 'validation' for training.")
    if table_split == "validation":
        splits["validation"], splits["test"] = splits["test"], splits["validation"]
    if arguments.train_captions is not None:
        splits["train"] = _with_captions(splits["train"], arguments.train_captions, arguments.train_captions_column)
    logger.info("%s: %s.", arguments.dataset_name, ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items()))
    limits = (arguments.max_train_images, arguments.max_eval_images, arguments.max_test_images)
    for name, limit in zip(SPLITS, limits, strict=True):
        if limit is not None:
            splits[name] = splits[name].select(range(min(limit, len(splits[name]))))
    if not is_embedded:  # which the tests check
        splits, _ = check_captions(
            splits,
            quarantine_path=Path(output_dir) / "quarantine.jsonl",
            max_bad_fraction=arguments.max_bad_fraction,
        )
    if arguments.simplify is not None:
        simplifier = (scene_simplifier if is_embedded else spacy_simplifier)(arguments.simplify)
        splits = datasets.DatasetDict({name: simplify_captions(rows, simplifier) for name, rows in splits.items()})
    if arguments.test_references is not None:
        rows = splits["test"]
        more = _with_captions(rows, arguments.test_references, arguments.test_references_column)
        if len(more) < len(rows):
            raise ValueError(f"test_references has {len(more)} of the {len(rows)} test images. Use all.")
        splits["test"] = rows.add_column(MORE_REFERENCES, list(more["captions"]))
    return splits


def _with_captions(rows: datasets.Dataset, path: str, column: str) -> datasets.Dataset:
    """Rows with the captions of a file, or of a folder of shards."""
    return exchange_captions(rows, part_files(path) if Path(path).is_dir() else path, column=column)


def describe_data(arguments: DataArguments, splits: Mapping[str, datasets.Dataset]) -> str:
    """Description of the data as used, for the model card."""
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in splits.items())
    level = {"simplest": "to the subject", "simpler": "to subject, verb and object"}.get(arguments.simplify or "")
    shortened, images = f" shortened {level}" if level else "", "videos" if arguments.num_frames else "images"
    if arguments.dataset_name in EMBEDDED:
        what = "clips" if arguments.num_frames else "scenes"
        return (
            f"The embedded world of hf_captionrl: {what} of Noto Emoji sprites composed by rule, each with five captions "
            f"that leave most facts out{',' * bool(shortened)}{shortened} ({sizes} {images})."
        )
    of_frames = f" ({arguments.num_frames} frames of each)" if arguments.num_frames else ""
    return f"{sizes} {images} with their captions{shortened}{of_frames}."


PANEL_IMAGES = 6


# --- Samples several captions per image and measures their diversity -------------------------------------------------


@dataclass
class SampleArguments:
    """Number of captions per image, and how they are sampled and shown."""

    # Diversity is between captions.
    num_samples: Annotated[int, Range(at_least=2)] = documented(5, "Captions per image; 5 in the paper.")
    sample_images: Positive | None = documented(
        None, "Maximum number of images that are sampled, of test and validation."
    )
    sample_temperatures: list[Annotated[float, Range(above=0)]] = field(
        default_factory=lambda: [0.5, 0.75, 1.0, 1.25],
        metadata={"help": "Temperatures of the trade-off plot. The table uses 1, which is always included."},
    )

    def __post_init__(self) -> None:
        check_values(self)


class Sampler:
    """Generates several captions per image of a split, and measures them."""

    def __init__(self, dataset: datasets.Dataset, arguments: SampleArguments, config: CaptionConfig) -> None:
        number = min(arguments.sample_images or len(dataset), len(dataset))
        self.dataset, self.arguments, self.seed = dataset.select(range(number)), arguments, config.seed
        self.cache_features = config.cache_image_features or bool(frames_of(dataset))
        self.cache_dir = config.feature_cache_dir
        batch_size = config.generation_batch_size or config.per_device_eval_batch_size
        self.settings: dict[str, Any] = {"batch_size": batch_size, "max_new_tokens": config.generation_max_new_tokens}
        words = [[ptb_tokenize(text) for text in texts] for texts in dataset["captions"]]
        frequencies = DocumentFrequencies.from_references(words)
        references = [list(texts) for texts in self.dataset["captions"]]
        self._numbers = functools.partial(
            suite, "sle", references=references, frequencies=frequencies, seed=config.seed
        )
        self.samples: dict[str, list[list[str]]] = {}  # row name -> captions at temperature 1
        self.points: dict[str, list[dict[str, Any]]] = {}  # row name -> one point per temperature

    def write(self, captioner: Captioner, **generate_kwargs: Any) -> list[list[str]]:
        """Captions of each image, `num_samples` per image."""
        G = self.arguments.num_samples
        images: dict[str, Any] = {"images": self.dataset["image"]}
        if self.cache_features:
            features = vision_tower_features(captioner, self.dataset, cache_dir=self.cache_dir)
            images = {"images": None, "image_features": features}
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            flat = generate_captions(captioner, **images, num_return_sequences=G, **self.settings, **generate_kwargs)
        return [flat[start : start + G] for start in range(0, len(flat), G)]

    def sample(self, name: str, captioner: Captioner) -> None:
        """Sample captions at each temperature, for panel and plot."""
        by_temperature = {
            temperature: self.write(captioner, do_sample=True, num_beams=1, top_k=0, temperature=temperature)
            for temperature in sorted({1.0, *self.arguments.sample_temperatures})
        }
        self.samples[name] = by_temperature[1.0]
        self.points[name] = [{"temperature": t, **self._numbers(groups)} for t, groups in by_temperature.items()]

    def measure(self, name: str, captioner: Captioner) -> dict[str, Any]:
        """The columns of one row, except those at equal CIDEr-D; stores the samples for plot and panel."""
        self.sample(name, captioner)
        beams = self.write(captioner, do_sample=False, num_beams=self.arguments.num_samples)
        rows = {"rs": self._numbers(self.samples[name]), "bs": self._numbers(beams)}
        return {f"{how}_{key}": value for how, row in rows.items() for key, value in row.items()}

    def at_equal_cider_d(self, control: str) -> dict[str, dict[str, float] | None]:
        """Diversity by row name at the CIDEr-D of the control at temperature 1; None if that is not reached at any temperature."""
        if control not in self.points:
            return {}
        (cider_d,) = (point["cider_d"] for point in self.points[control] if point["temperature"] == 1.0)
        return {name: diversity_at_cider_d(points, cider_d) for name, points in self.points.items()}

    def add_equal_cider_d(self, rows: Sequence[dict[str, Any]], control: str) -> None:
        """Add the columns at equal CIDEr-D to the rows of captioners."""
        compared = self.at_equal_cider_d(control)
        missing = f"none of the sampled temperatures has the CIDEr-D of {control}"
        missing = missing if compared else f"{control} was not sampled"
        for row in rows:
            for key in ("div_2", "mbleu_4_per_image") if row["name"] in self.points else ():
                numbers = compared.get(row["name"])
                row[f"equal_cider_{key}"] = numbers[key] if numbers else None
                if numbers is None:
                    row[f"equal_cider_{key}_reason"] = missing

    def not_measured(self, reason: str) -> dict[str, Any]:
        """The columns of a row without samples."""
        keys = [column.key for column in SAMPLE_COLUMNS]
        return dict.fromkeys(keys) | {f"{key}_reason": reason for key in keys}


def write_samples(output_dir: str | os.PathLike[str], sampler: Sampler, *, title: str, **more: Any) -> Path:
    """Write tradeoff.png, panel.html and samples.json: every point of the plot, every caption at temperature 1, and `more`."""
    folder, samples = Path(output_dir), sampler.samples
    write_diversity_tradeoff(folder / "tradeoff.png", sampler.points, title=f"{title}: CIDEr-D against diversity")
    items = []
    for index in range(min(PANEL_IMAGES, len(sampler.dataset))):
        row = sampler.dataset[index]
        captions = [GalleryCaption(name, samples=groups[index]) for name, groups in samples.items()]
        items.append(GalleryItem(open_still(row), str(row["image_id"]), captions, list(row["captions"])))
    if items:
        note = f"{sampler.arguments.num_samples} random samples per captioner at temperature 1, not selected."
        write_gallery(folder / "panel.html", items, title, note=note)
    ids = [str(i) for i in sampler.dataset["image_id"]]
    by_id = {name: dict(zip(ids, groups, strict=True)) for name, groups in samples.items()}
    record = {"points": sampler.points, "captions": by_id, "seed": sampler.seed}
    return write_json(folder / "samples.json", record | more)
