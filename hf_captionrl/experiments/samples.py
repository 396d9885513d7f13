"""Samples several captions per image and measures their diversity.

Legend: B images, G captions per image.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch

from hf_captionrl.captioners import Captioner
from hf_captionrl.data import frames_of, open_still
from hf_captionrl.evaluate_modules.results_columns import SAMPLE_COLUMNS
from hf_captionrl.io import write_json
from hf_captionrl.metrics.suites import decoding_suite, diversity_at_cider_d, tradeoff_points
from hf_captionrl.reports.sample_panel import PanelItem, write_panel
from hf_captionrl.reports.tradeoff import write_diversity_tradeoff
from hf_captionrl.text.frequencies import DocumentFrequencies
from hf_captionrl.text.tokenize import ptb_tokenize
from hf_captionrl.trainers.caption_generation import LazyImages, generate_captions, vision_tower_features

__all__ = ["SampleArguments", "Sampler", "write_samples"]


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
