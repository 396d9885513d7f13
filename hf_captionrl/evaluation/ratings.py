"""Benchmarks of human ratings of captions, as their authors publish them, and the protocols of the papers that use them.

`flickr8k-expert` and `flickr8k-cf` (Hodosh, Young and Hockenmaier 2013) read `ExpertAnnotations.txt` or
`CrowdFlowerAnnotations.txt`, and the captions from `Flickr8k.token.txt` or a Karpathy split, `dataset_flickr8k.json`.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_captionrl.metrics.rating_agreement import agreement

CaptionMetric = Callable[[list[str], list[list[str]]], Sequence[float]]
"""From N captions and the references of each to N scores."""
_MAX_BAD_SHARE = 0.01

# Hessel et al. 2021, "CLIPScore", Tables 1 and 2; tau times 100, the scorer of the last two CLIP ViT-B/32.
PUBLISHED: dict[str, dict[str, float]] = {
    "flickr8k-expert": {
        "bleu_1": 32.3,
        "bleu_4": 30.8,
        "rouge_l": 32.3,
        "meteor": 41.8,
        "cider_d": 43.9,
        "spice": 44.9,
        "clip_score": 51.2,
        "ref_clip_score": 53.0,
    },
    "flickr8k-cf": {
        "bleu_1": 17.9,
        "bleu_4": 16.9,
        "rouge_l": 19.9,
        "meteor": 22.2,
        "cider_d": 24.6,
        "spice": 24.4,
        "clip_score": 34.4,
        "ref_clip_score": 36.4,
    },
}


@dataclass(frozen=True)
class RatedCaptions:
    """Captions with human ratings.

    Attributes:
        name (`str`): Name of the benchmark.
        candidates (`list` of N `str`): The rated captions.
        references (`list` of N `list`): Captions of each image.
        images (`list` of N `str`): File name of each image.
        ratings (`(N, J)` float array): Ratings, NaN where a rater gave none.
        variant (`"b"` or `"c"`): Kendall's tau of the papers.
        num_bad_lines (`int`): Lines that could not be read and are left out.
    """

    name: str
    candidates: list[str]
    references: list[list[str]]
    images: list[str]
    ratings: np.ndarray
    variant: Literal["b", "c"]
    num_bad_lines: int = 0

    def agreement(self, metrics: Mapping[str, Sequence[float] | CaptionMetric] | CaptionMetric, **options: Any) -> Any:
        """[`hf_captionrl.metrics.agreement`] of scores, or of functions of (captions, references), with the ratings."""
        if callable(metrics):
            return agreement(self._scores(metrics), self.ratings, groups=self.images, variant=self.variant, **options)
        scores = {name: self._scores(of) for name, of in metrics.items()}
        return agreement(scores, self.ratings, groups=self.images, variant=self.variant, **options)

    def _scores(self, metric: Sequence[float] | CaptionMetric) -> Sequence[float]:
        return metric(self.candidates, self.references) if callable(metric) else metric


def load_ratings(name: str, folder: str | Path) -> RatedCaptions:
    """Read a benchmark from the folder with its files.

    Raises:
        ValueError: If the benchmark is not known, or over 1 % of its lines cannot be read.
        FileNotFoundError: If a file is missing.
    """
    if name not in _READERS:
        raise ValueError(f"There is no benchmark {name!r}. Use one of {', '.join(_READERS)}.")
    return _READERS[name](Path(folder))


def _flickr8k_captions(folder: Path) -> dict[str, list[str]]:
    """Captions by file name of the image."""
    tokens, split = folder / "Flickr8k.token.txt", folder / "dataset_flickr8k.json"
    captions: dict[str, list[str]] = collections.defaultdict(list)
    if tokens.is_file():
        for line in tokens.read_text(encoding="utf-8").splitlines():
            key, _, text = line.partition("\t")
            captions[key.partition("#")[0]].append(text.strip())
    elif split.is_file():
        for row in json.loads(split.read_text(encoding="utf-8"))["images"]:
            captions[row["filename"]] = [sentence["raw"].strip() for sentence in row["sentences"]]
    else:
        raise FileNotFoundError(f"{folder} has neither {tokens.name} nor {split.name}, which hold the captions.")
    return dict(captions)


def _read_flickr8k(
    folder: Path,
    name: str,
    file: str,
    variant: Literal["b", "c"],
    read: Callable[[list[str]], list[float]],
    *,
    keeps_own: bool,
) -> RatedCaptions:
    """Rated captions. An image's own captions are left out, or rated against its other captions (`keeps_own`)."""
    captions, path = _flickr8k_captions(folder), folder / file
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {file}. Use the folder of the published annotations.")
    rows, bad = [], []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            image, caption, *values = line.split("\t")
            source, _, index = caption.partition("#")
            text = captions[source][int(index)]
            others = [reference for reference in captions[image] if reference != text]
            is_own = len(others) < len(captions[image])
            row = (text, others, image, read(values))
        except (ValueError, KeyError, IndexError, ZeroDivisionError):
            bad.append(number)
            continue
        if keeps_own or not is_own:
            rows.append(row)
    if len(bad) > _MAX_BAD_SHARE * len(lines):
        raise ValueError(
            f"{path}: {len(bad)} of {len(lines)} lines cannot be read, the first is line {bad[0]}. A line has an image, a caption "
            "'IMAGE#NUMBER' and its ratings, separated by tabs; the captions need the same image names."
        )
    texts, references_of, images, ratings = (list(column) for column in zip(*rows, strict=True))
    return RatedCaptions(name, texts, references_of, images, np.asarray(ratings, dtype=float), variant, len(bad))


def _expert(values: list[str]) -> list[float]:
    ratings = [float(value) for value in values]
    if len(ratings) != 3 or not all(1 <= rating <= 4 for rating in ratings):
        raise ValueError("three ratings from 1 to 4")
    return ratings


def _crowd(values: list[str]) -> list[float]:
    _, yes, no = (float(value) for value in values)
    return [yes / (yes + no)]


_READERS: dict[str, Callable[[Path], RatedCaptions]] = {
    "flickr8k-expert": lambda folder: _read_flickr8k(
        folder, "flickr8k-expert", "ExpertAnnotations.txt", "c", _expert, keeps_own=False
    ),
    "flickr8k-cf": lambda folder: _read_flickr8k(
        folder, "flickr8k-cf", "CrowdFlowerAnnotations.txt", "b", _crowd, keeps_own=True
    ),
}
