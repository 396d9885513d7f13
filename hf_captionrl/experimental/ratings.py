"""Human ratings of captions of Flickr8k, in the files of their authors and by the protocols of the papers.

| benchmark | files | protocol |
|:--|:--|:--|
| `flickr8k-expert` | `ExpertAnnotations.txt`, captions | tau-c, three ratings per caption; an image's own captions are left out |
| `flickr8k-cf` | `CrowdFlowerAnnotations.txt`, captions | tau-b, share of yes; own captions that are rated are not references |

Captions are `Flickr8k.token.txt`, or the Karpathy split `dataset_flickr8k.json`. Files may be one folder deeper.
Sources: Hodosh et al. 2013; protocols: Hessel et al. 2021, section 4 and appendix A.
"""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_captionrl.evaluation.metric_functions import call_metric, metric_function
from hf_captionrl.experimental.rating_agreement import agreement
from hf_captionrl.text.tokenize import word_characters

_FILES: dict[str, tuple[str, Literal["b", "c"]]] = {
    "flickr8k-expert": ("ExpertAnnotations.txt", "c"),
    "flickr8k-cf": ("CrowdFlowerAnnotations.txt", "b"),
}
_MAX_BAD_SHARE = 0.01


@dataclass(frozen=True)
class RatedCaptions:
    """N captions with human ratings."""

    name: str  # of the benchmark
    candidates: list[str]  # the rated captions
    references: list[list[str]]  # captions of each image
    images: list[str]  # file name of each image
    ratings: np.ndarray  # (N, J)
    variant: Literal["b", "c"]  # Kendall's tau of the paper
    num_bad_lines: int = 0  # lines that could not be read and are left out

    def scores(self, metric: Any, *, name: str = "metric", image_dir: str | Path = "") -> Sequence[float]:
        """Scores of a metric, given as anything that [`metric_function`] accepts, or as N numbers."""
        if not (isinstance(metric, str) or callable(metric)):
            return metric  # type: ignore[no-any-return]
        images = [Path(image_dir) / image for image in self.images]
        return call_metric(metric_function(metric), name, self.candidates, self.references, images)

    def agreement(self, metrics: Any, *, image_dir: str | Path = "", **options: Any) -> dict[str, Any]:
        """[`hf_captionrl.experimental.rating_agreement.agreement`] of a metric of [`scores`], or of several in a `dict` by name."""
        several = metrics if isinstance(metrics, Mapping) else {"": metrics}
        scores = {name: self.scores(of, name=name, image_dir=image_dir) for name, of in several.items()}
        one_or_more = scores if several is metrics else scores[""]
        return agreement(one_or_more, self.ratings, groups=self.images, variant=self.variant, **options)


def published_agreement(name: str) -> dict[str, dict[str, Any]]:
    """Published numbers of a benchmark, times 100: by metric, a `dict` with `mean` and `source`."""
    path = Path(__file__).with_name("published_agreement.json")
    by_source = json.loads(path.read_text(encoding="utf-8"))[name]
    return {key: {"mean": mean, "source": source} for source, row in by_source.items() for key, mean in row.items()}


def _find(folder: Path, *names: str) -> Path:
    """The first of some files, in the folder or one below."""
    for name in names:
        for path in (folder / name, *sorted(folder.glob(f"*/{name}"))):
            if path.is_file():
                return path
    raise FileNotFoundError(f"{folder} has no {' or '.join(names)}. Use --data_root with the published files.")


def _words(text: str) -> str:
    """Letters and digits, by which a rated caption is found among the references."""
    return " ".join(re.findall(rf"[{word_characters()}]+", text.casefold()))


def _lines(path: Path) -> list[str]:
    # Not splitlines(), which also splits at control characters and U+2028 inside a text.
    return path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")


def _captions(folder: Path) -> dict[str, list[str]]:
    """Captions by file name of the image."""
    path = _find(folder, "Flickr8k.token.txt", "dataset_flickr8k.json")
    if path.suffix == ".json":
        images = json.loads(path.read_text(encoding="utf-8"))["images"]
        return {row["filename"]: [sentence["raw"].strip() for sentence in row["sentences"]] for row in images}
    captions: dict[str, list[str]] = collections.defaultdict(list)
    for line in _lines(path):
        key, _, text = line.partition("\t")
        captions[key.partition("#")[0]].append(text.strip())
    return dict(captions)


def load_ratings(name: str, folder: str | Path) -> RatedCaptions:
    """Read one of the benchmarks above from the folder with its published files."""
    if name not in _FILES:
        raise ValueError(f"There is no benchmark {name!r}. Use one of {', '.join(_FILES)}.")
    file, variant = _FILES[name]
    captions, path = _captions(Path(folder)), _find(Path(folder), file)
    rows: list[tuple[str, str, list[float]]] = []
    bad, lines = [], _lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            image, caption, *values = line.split("\t")
            source, _, index = caption.partition("#")
            text, ratings = captions[source][int(index)], [float(value) for value in values]
            is_valid = len(ratings) == 3 and all(map(math.isfinite, ratings)) and image in captions
            if not is_valid or (variant == "c" and not all(1 <= rating <= 4 for rating in ratings)):
                raise ValueError("three ratings from 1 to 4, or the share and the numbers of yes and no")
            rows.append((text, image, ratings if variant == "c" else [ratings[1] / (ratings[1] + ratings[2])]))
        except (ValueError, LookupError, ZeroDivisionError):
            bad.append(number)
    if not rows or len(bad) > _MAX_BAD_SHARE * len(lines):
        raise ValueError(
            f"{path}: {len(bad)} of {len(lines)} lines cannot be read, the first is line {bad[0]}. A line of {name} has an image, "
            "'IMAGE#NUMBER' and three numbers, separated by tabs, with the image names of the captions."
        )
    rated = collections.defaultdict(set)
    if variant == "c":
        rows = [row for row in rows if row[0] not in captions[row[1]]]
    else:  # an image's own captions that are rated are no references (Hessel et al. 2021, appendix A)
        for text, image, _ in rows:
            rated[image].add(_words(text))
    references = [[text for text in captions[image] if _words(text) not in rated[image]] for _, image, _ in rows]
    texts, images, ratings_of = (list(column) for column in zip(*rows, strict=True))
    return RatedCaptions(name, texts, references, images, np.asarray(ratings_of, dtype=float), variant, len(bad))
