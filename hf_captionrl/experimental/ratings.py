"""Benchmarks of human ratings of captions, in the files of their authors and by the protocols of the papers.

| benchmark | files | protocol |
|:--|:--|:--|
| `flickr8k-expert` | `ExpertAnnotations.txt`, captions | tau-c, three ratings per caption; an image's own captions are left out |
| `flickr8k-cf` | `CrowdFlowerAnnotations.txt`, captions | tau-b, share of yes; own captions that are rated are not references |
| `composite` | `8k_`, `30k_` and `coco_correctness.csv`, captions of all three sets | tau-c, the first three captions of a row; rated own captions are no references |
| `pascal50s` | `pair_pascal.mat`, `consensus_pascal.mat` | accuracy, majority of 48 votes; 5 of 48 references, drawn 5 times |
| `foil` | `foilv1.0_test_2017.json`, captions of COCO | accuracy, one pair per image; 4 references, without the true caption |
| `polaris` | `polaris_test.csv`, or the Parquet files of its test split | tau-c, one row per rating |
| `nebula` | `nebula_test.csv`, or the Parquet files of its test split | tau-c, one row per caption |

Captions are `Flickr8k.token.txt`, `results_20130124.token` (Flickr30k) and `captions_val2014.json` (COCO), or the Karpathy splits
`dataset_flickr8k.json`, `dataset_flickr30k.json` and `dataset_coco.json`. Files may be one folder deeper.

Sources: Hodosh et al. 2013, Aditya et al. 2015, Vedantam et al. 2015, Shekhar et al. 2017, Wada et al. 2024 (Polaris), Matsuda et al.
2024 (Nebula); protocols of the first five: Hessel et al. 2021, section 4 and appendix A. Differs from it by: a tie of scores or
votes counts one half instead of a random choice.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import csv
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_captionrl.evaluation.metric_functions import call_metric, metric_function
from hf_captionrl.experimental.rating_agreement import agreement, pairwise_accuracy
from hf_captionrl.text.tokenize import word_characters

Row = tuple[str, list[str], str, list[float]]
"""A caption, its references, the file name of its image, and its ratings."""
_MAX_BAD_SHARE = 0.01
_DRAWS = 5  # of the references of Pascal-50S
_KINDS = {1: "HC", 2: "HI", 3: "HM", 4: "MM"}  # of its pairs: human and correct, incorrect, machine
_COCO = ("captions_val2014.json", "dataset_coco.json")


@dataclass(frozen=True)
class RatedCaptions:
    """N captions with human ratings; those of a pair are neighbours."""

    name: str  # of the benchmark, followed by the number of references if it is not the published one
    candidates: list[str]  # the rated captions
    references: list[list[str]]  # captions of each image
    images: list[str]  # file name of each image
    ratings: np.ndarray  # (N, J), NaN where a rater gave none; for pairs, the votes for each caption
    variant: Literal["b", "c", "pairs"]  # Kendall's tau of the papers, or accuracy
    num_bad_lines: int = 0  # lines that could not be read and are left out
    categories: list[str] | None = None  # kind of the pair of each caption

    def scores(self, metric: Any, *, name: str = "metric", image_dir: str | Path = "") -> Sequence[float]:
        """Scores of a metric, given as anything that [`metric_function`] accepts, or as N numbers."""
        if not (isinstance(metric, str) or callable(metric) or hasattr(metric, "compute")):
            return metric  # type: ignore[no-any-return]
        images = [Path(image_dir) / image for image in self.images]
        return call_metric(metric_function(metric), name, self.candidates, self.references, images)

    def agreement(self, metrics: Any, *, image_dir: str | Path = "", **options: Any) -> dict[str, Any]:
        """How well a metric of [`scores`], or several in a `dict` by name, agree with the ratings of images in `image_dir`.

        Options and result are those of [`hf_captionrl.metrics.agreement`], with `accuracy` instead of `tau` for pairs.
        """
        if isinstance(metrics, Mapping):
            given: Any = {name: self.scores(of, name=name, image_dir=image_dir) for name, of in metrics.items()}
        else:
            given = self.scores(metrics, image_dir=image_dir)
        if self.variant == "pairs":
            return pairwise_accuracy(given, self.ratings, groups=self.images, categories=self.categories, **options)
        return agreement(given, self.ratings, groups=self.images, variant=self.variant, **options)


def load_ratings(name: str, folder: str | Path, *, num_references: int | None = None, seed: int = 0) -> RatedCaptions:
    """Read one of the benchmarks above from the folder with its published files.

    `num_references` is for `pascal50s` (5 by default, 0 for all 48) and `foil` (4, or 1); `seed` draws references and pairs.
    """
    if name not in _READERS:
        raise ValueError(f"There is no benchmark {name!r}. Use one of {', '.join(_READERS)}.")
    if name in _PAIRS:
        return _PAIRS[name](Path(folder), num_references, np.random.default_rng(seed))
    if num_references is not None:
        raise ValueError(f"num_references is for {' and '.join(_PAIRS)}, not for {name}. Leave it out.")
    return _READERS[name](Path(folder))


@functools.cache
def published_agreement(name: str) -> dict[str, dict[str, Any]]:
    """Published numbers of a benchmark, times 100: by metric, a `dict` with `mean`, the categories of pairs, and `source`."""
    path = Path(__file__).with_name("published_agreement.json")
    by_source = json.loads(path.read_text(encoding="utf-8")).get(name, {})
    return {
        metric: {**(value if isinstance(value, dict) else {"mean": value}), "source": source}
        for source, values in by_source.items()
        for metric, value in values.items()
    }


def _find(folder: Path, *names: str) -> Path:
    """The first of some files, in the folder or one below."""
    for name in names:
        for path in (folder / name, *sorted(folder.glob(f"*/{name}"))):
            if path.is_file():
                return path
    there = sorted(path.name for path in folder.iterdir())[:6] if folder.is_dir() else []
    has = f"it has {', '.join(there)}" if there else "it is empty or does not exist"
    raise FileNotFoundError(
        f"{folder} has no {' or '.join(names)}; {has}. Use --data_root with the published files under their names."
    )


@contextlib.contextmanager
def _layout(path: Path, wanted: str, *more: type[Exception]) -> Iterator[None]:
    refused: tuple[type[Exception], ...] = (ValueError, LookupError, TypeError, AttributeError, NotImplementedError)
    try:
        yield
    except (*refused, *more) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error}). It needs {wanted}.") from error


def _words(text: str) -> str:
    """Letters and digits, by which a rated caption is found among the references."""
    return " ".join(re.findall(rf"[{word_characters()}]+", text.casefold()))


def _plain(text: Any) -> str:
    return " ".join(str(text).split())


def _number(text: Any) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the rating is {text!r}")
    return number


def _lines(path: Path, errors: str) -> list[str]:
    # Not splitlines(), which also splits at control characters and U+2028 inside a text.
    return path.read_text(encoding="utf-8", errors=errors).removesuffix("\n").split("\n")


def _captions(folder: Path, *names: str) -> dict[str, list[str]]:
    """Captions by file name of the image."""
    path = _find(folder, *names)
    captions: dict[str, list[str]] = collections.defaultdict(list)
    with _layout(path, "the published captions"):
        if path.suffix != ".json":
            for line in _lines(path, "strict"):
                key, _, text = line.partition("\t")
                captions[key.partition("#")[0]].append(text.strip())
            return dict(captions)
        found = json.loads(path.read_text(encoding="utf-8"))
        for row in found.get("annotations", ()):  # COCO
            captions[f"COCO_val2014_{row['image_id']:012d}.jpg"].append(row["caption"].strip())
        for row in found["images"] if not captions else ():
            captions[row["filename"]] = [sentence["raw"].strip() for sentence in row["sentences"]]
    return dict(captions)


def _read(
    name: str, path: Path, lines: Iterable[Any], read: Callable[[Any], list[Row]], line_has: str
) -> tuple[list[Row], int]:
    """Rows of all lines, and the number of lines that cannot be read."""
    rows, bad, number = [], [], 0
    try:
        for number, line in enumerate(lines, start=1):
            try:
                rows += read(line)
            except (ValueError, LookupError, TypeError, SyntaxError, ZeroDivisionError):
                bad.append(number)
    except csv.Error as error:
        raise ValueError(f"{path} is not valid CSV after line {number}: {error}. Use the published file.") from error
    if not rows or len(bad) > _MAX_BAD_SHARE * number:
        first = f", the first is line {bad[0]}" if bad else ""
        raise ValueError(
            f"{path}: {len(bad)} of {number} lines cannot be read{first}. A line of {name} has {line_has}."
        )
    return rows, len(bad)


def _without_rated(rows: list[Row]) -> list[Row]:
    """Remove from the references of an image those of its own captions that are rated (Hessel et al. 2021, appendix A)."""
    rated = collections.defaultdict(set)
    for caption, _, image, _ in rows:
        rated[image].add(_words(caption))
    return [
        (caption, [text for text in references if _words(text) not in rated[image]], image, ratings)
        for caption, references, image, ratings in rows
    ]


def _rated(
    name: str, variant: Literal["b", "c", "pairs"], rows: list[Row], bad: int = 0, **more: Any
) -> RatedCaptions:
    texts, references, images, ratings = (list(column) for column in zip(*rows, strict=True))
    return RatedCaptions(name, texts, references, images, np.asarray(ratings, dtype=float), variant, bad, **more)


def _read_flickr8k(folder: Path, name: str) -> RatedCaptions:
    captions = _captions(folder, "Flickr8k.token.txt", "dataset_flickr8k.json")
    is_expert = name == "flickr8k-expert"
    path = _find(folder, "ExpertAnnotations.txt" if is_expert else "CrowdFlowerAnnotations.txt")

    def read(line: str) -> list[Row]:
        image, caption, *values = line.split("\t")
        source, _, index = caption.partition("#")
        text, ratings = captions[source][int(index)], [_number(value) for value in values]
        if len(ratings) != 3 or (is_expert and not all(1 <= rating <= 4 for rating in ratings)):
            raise ValueError("three ratings from 1 to 4, or the share and the numbers of yes and no")
        own = captions[image]
        return [(text, own, image, ratings if is_expert else [ratings[1] / (ratings[1] + ratings[2])])]

    line_has = "an image, 'IMAGE#NUMBER' and three numbers, separated by tabs, with the image names of the captions"
    rows, bad = _read(name, path, _lines(path, "replace"), read, line_has)
    if is_expert:
        return _rated(name, "c", [row for row in rows if row[0] not in row[1]], bad)
    return _rated(name, "b", _without_rated(rows), bad)


def _read_composite(folder: Path) -> RatedCaptions:
    rows: list[Row] = []
    bad = 0
    for part, names in {
        "8k": ("Flickr8k.token.txt", "dataset_flickr8k.json"),
        "30k": ("results_20130124.token", "dataset_flickr30k.json"),
        "coco": _COCO,
    }.items():
        path, captions = _find(folder, f"{part}_correctness.csv"), _captions(folder, *names)

        def read(line: dict[str, Any], captions: dict[str, list[str]] = captions) -> list[Row]:
            image = line["Input.image_url"].rpartition("/")[2]
            if not image and not line["Input.text1"]:
                return []  # the files end with lines without a task
            ratings = [_number(line[f"Answer.Q{number}Answer"]) for number in (1, 2, 3)]
            # Of "12K judgments", a fourth is not used.
            texts = [_plain(line[f"Input.text{number}"]) for number in (1, 2, 3)]
            if not all(texts) or not all(1 <= rating <= 5 for rating in ratings):
                raise ValueError("three captions and ratings from 1 to 5")
            return [(text, captions[image], image, [rating]) for text, rating in zip(texts, ratings, strict=True)]

        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            line_has = "Input.image_url, Input.text1 to 3 and Answer.Q1Answer to Q3Answer, separated by semicolons"
            found, more = _read("composite", path, csv.DictReader(file, delimiter=";"), read, line_has)
        rows, bad = rows + found, bad + more
    return _rated("composite", "c", _without_rated(rows), bad)


def _first(line: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if line.get(key) not in (None, ""):
            return line[key]
    raise KeyError(keys[0])


def _read_table(folder: Path, name: str) -> RatedCaptions:
    """Polaris and Nebula: the file of the test split, or the same columns in the Parquet files of the Hub."""
    parts = sorted(folder.rglob("test-*.parquet"))
    path = parts[0] if parts else _find(folder, f"{name}_test.csv")

    def read(line: Mapping[str, Any]) -> list[Row]:
        caption, rating = _first(line, "mt", "cand"), _first(line, "score", "human_score")
        image = _first(line, "imgid", "file_name", "img", "image")
        references = ast.literal_eval(line["refs"]) if isinstance(line["refs"], str) else line["refs"]
        if not references or isinstance(references, str):
            raise ValueError("a list of references")
        image = image["path"] if isinstance(image, dict) else image
        return [(_plain(caption), [_plain(text) for text in references], str(image), [_number(rating)])]

    with contextlib.ExitStack() as stack:
        if parts:
            lines: Iterable[Any] = _parquet_lines(parts)
        else:
            lines = csv.DictReader(stack.enter_context(path.open(encoding="utf-8", errors="replace", newline="")))
        line_has = "the columns imgid or file_name, mt or cand, refs (a list) and score or human_score"
        rows, bad = _read(name, path, lines, read, line_has)
    return _rated(name, "c", rows, bad)


def _parquet_lines(parts: list[Path]) -> Iterator[dict[str, Any]]:
    """Rows without the pictures, which are most of the bytes."""
    import pyarrow.parquet as pq

    for part in parts:
        with _layout(part, "the columns of the published table"):
            file = pq.ParquetFile(part)
            names = set(file.schema_arrow.names)
        wanted = ["mt", "cand", "score", "human_score", "refs", "imgid", "file_name"]
        pictures = [f"{key}.path" for key in ("img", "image") if key in names]
        for batch in file.iter_batches(columns=[*(key for key in wanted if key in names), *pictures]):
            yield from batch.to_pylist()


def _cell(value: Any) -> Any:
    """The text or number in nested cells of a MATLAB file."""
    while isinstance(value, np.ndarray):
        value = value.ravel()[0]
    return _plain(value) if isinstance(value, str) else float(value)


def _read_pascal50s(folder: Path, num_references: int | None, generator: np.random.Generator) -> RatedCaptions:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    count = 5 if num_references is None else num_references
    path, other = _find(folder, "pair_pascal.mat"), _find(folder, "consensus_pascal.mat")
    rows: list[Row] = []
    categories: list[str] = []
    with _layout(path, f"new_input and category, and {other.name} as many triplets per pair", MatReadError):
        pairs, triplets = loadmat(str(path)), loadmat(str(other))["triplets"].ravel()
        inputs, kinds = pairs["new_input"].ravel(), pairs["category"].ravel()
        per_pair, rest = divmod(len(triplets), len(inputs))  # 48 judgments
        if rest or not count <= per_pair:
            raise ValueError(f"{len(triplets)} triplets of {len(inputs)} pairs, num_references {count}")
        chosen: list[tuple[list[str], list[str], str, dict[str, int], str]] = []
        for index, (pair, kind) in enumerate(zip(inputs, kinds, strict=True)):
            image, *captions = (_cell(value) for value in pair)
            votes, seen = dict.fromkeys(captions, 0), []
            for triplet in triplets[index * per_pair : (index + 1) * per_pair]:
                reference, first, second, winner = (_cell(value) for value in triplet)
                votes[first if winner == 1 else second] += 1  # KeyError: the triplets are of other pairs
                seen.append(reference)
            chosen.append((captions, seen, image, votes, _KINDS[int(kind)]))
    for _ in range(_DRAWS if count else 1):
        for captions, seen, image, votes, kind in chosen:
            drawn = [seen[i] for i in generator.choice(len(seen), count, replace=False)] if count else seen
            rows += [(caption, drawn, image, [votes[caption]]) for caption in captions]
            categories += [kind, kind]
    name = "pascal50s" if count == 5 else f"pascal50s, {count or per_pair} references"
    return _rated(name, "pairs", rows, categories=categories)


def _read_foil(folder: Path, num_references: int | None, generator: np.random.Generator) -> RatedCaptions:
    count = 4 if num_references is None else num_references
    if count < 1:
        raise ValueError(f"num_references is {count}, but foil needs 1 or more. Use 1 or 4, as published.")
    path, captions = _find(folder, "foilv1.0_test_2017.json"), _captions(folder, *_COCO)
    pairs: dict[str, list[tuple[str, str]]] = {}
    with _layout(path, "images with id and file_name, and annotations with id, image_id, caption and foil"):
        found = json.loads(path.read_text(encoding="utf-8"))
        files = {row["id"]: row["file_name"] for row in found["images"]}
        true = {row["id"]: row["caption"] for row in found["annotations"] if not row["foil"]}
        for row in found["annotations"]:
            if row["foil"] and row["id"] in true:
                pairs.setdefault(files[row["image_id"]], []).append((_plain(true[row["id"]]), _plain(row["caption"])))
    rows: list[Row] = []
    for image, candidates in pairs.items():
        right, wrong = candidates[int(generator.integers(len(candidates)))]
        others = [text for text in captions.get(image, ()) if _words(text) != _words(right)][:count]
        if others:
            rows += [(right, others, image, [1.0]), (wrong, others, image, [0.0])]
    if len(rows) < 2 * (1 - _MAX_BAD_SHARE) * len(pairs) or not rows:
        raise ValueError(f"{path}: {len(pairs) - len(rows) // 2} of {len(pairs)} images have no captions in {folder}.")
    return _rated("foil" if count == 4 else f"foil, {count} reference{'s'[: count > 1]}", "pairs", rows)


_PAIRS = {"pascal50s": _read_pascal50s, "foil": _read_foil}
_READERS: dict[str, Any] = {
    "flickr8k-expert": lambda folder: _read_flickr8k(folder, "flickr8k-expert"),
    "flickr8k-cf": lambda folder: _read_flickr8k(folder, "flickr8k-cf"),
    "composite": _read_composite,
    **_PAIRS,
    "nebula": lambda folder: _read_table(folder, "nebula"),
    "polaris": lambda folder: _read_table(folder, "polaris"),
}
