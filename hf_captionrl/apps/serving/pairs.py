"""`captionrl pairs`: preference pairs for TRL's DPO from several captions per image and any reward or metric."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet

from hf_captionrl.apps.serving.options import PairsOptions
from hf_captionrl.apps.serving.server import RewardService
from hf_captionrl.data.columns import caption_column, id_column, undecoded
from hf_captionrl.data.images import image_bytes
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.evaluation.metric_functions import SCORER_METRICS, call_metric, metric_function
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.utils.io import atomic_file
from hf_captionrl.utils.model_files import model_path

_MESSAGES = datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
_FEATURES = datasets.Features(
    dict.fromkeys(("prompt", "chosen", "rejected"), _MESSAGES)
    | {"images": datasets.List(datasets.Image()), "image_id": datasets.Value("string")}
    | {f"score_{name}": datasets.Value("float64") for name in ("chosen", "rejected")}
)
"""TRL's vision preference format, and where a pair comes from."""


_COUNTS = ("compared", "ties", "under_margin", "written")


def choose_pairs(scores: Mapping[str, float], margin: float, most: int) -> tuple[list[tuple[str, str]], np.ndarray]:
    """Pairs (chosen, rejected) of the captions of an image, widest first, and the numbers of pairs that `_COUNTS` names."""
    ordered = [tuple(sorted(pair, key=lambda text: -scores[text])) for pair in combinations(scores, 2)]
    gaps = np.array([scores[better] - scores[worse] for better, worse in ordered])
    wide, ties = int((gaps >= margin).sum()), int((gaps == 0).sum())
    chosen = np.argsort(-gaps, kind="stable")[: min(wide, most)].tolist()
    counts = np.array([len(gaps), ties, len(gaps) - wide - ties, len(chosen)])
    return [ordered[row] for row in chosen], counts  # type: ignore[misc]


def _scores(options: PairsOptions, rows: Any, texts: Sequence[Sequence[str]]) -> list[float]:
    """The scores of all captions, image after image."""
    image_of: np.ndarray = np.repeat(np.arange(len(texts)), list(map(len, texts)))  # (N,)
    flat = [text for each in texts for text in each]
    if options.metric is not None:
        scorer = None
        if options.metric in SCORER_METRICS:
            scorer = load_scorer(model_path(str(options.scorer)), device=options.device)
        function = metric_function(options.metric, scorer=scorer)
        references, images = caption_column(rows), undecoded(rows)["image"][:]
        of_captions = ([each[int(image)] for image in image_of] for each in (references, images))
        return call_metric(function, options.metric, flat, *of_captions)
    service, ids, found = RewardService(options, options.reward or []), id_column(rows), []
    for part in np.array_split(np.arange(len(texts)), max(1, len(texts) // options.rollout_images)):
        mine = (image_of >= part[0]) & (image_of <= part[-1])
        captions = [flat[row] for row in np.flatnonzero(mine)]
        rollout = (captions, [ids[int(i)] for i in part], (image_of[mine] - part[0]).tolist())
        found += service.score(*rollout)["rewards"]
    return found


def write_pairs(options: PairsOptions) -> None:
    """Write the pairs, and print their number and the shares of ties and of pairs under the margin."""
    if (options.reward is None) == (options.metric is None):
        raise ValueError(f"--reward is {options.reward} and --metric {options.metric}. Use one of them.")
    for name in ("reward_weights", "tokenizer"):
        if options.metric is not None and getattr(options, name) is not None:
            raise ValueError(f"--{name} {getattr(options, name)} has no effect with --metric. Leave it out.")
    if options.metric in SCORER_METRICS and options.scorer is None:
        raise ValueError(f"--metric {options.metric} needs a scorer. Use --scorer openai/clip-vit-base-patch32.")
    if options.output.exists():
        try:
            is_ours = set(pyarrow.parquet.read_schema(options.output).names) == _FEATURES.keys()
        except (pyarrow.ArrowInvalid, OSError):
            is_ours = False
        if not is_ours:
            raise ValueError(f"--output {str(options.output)!r} exists and is no file of pairs. Use another --output.")
    pooled: dict[str, list[str]] = {}
    for path in options.captions:
        for image_id, captions in read_caption_file(path).captions.items():
            pooled.setdefault(image_id, []).extend(captions)
    split = load_split(options, quarantine_path=None, require_captions=False)
    if foreign := sorted(set(pooled).difference(split.all_ids)):
        raise ValueError(
            f"--captions name {len(foreign)} images that are not in the data: {foreign[0]!r}, ... Check --split."
        )
    several = {image_id: list(dict.fromkeys(texts)) for image_id, texts in pooled.items() if len(set(texts)) > 1}
    kept = [row for row, image_id in enumerate(id_column(split.dataset)) if image_id in several]
    if not kept:
        raise ValueError("--captions have no image of the data with two different captions. Write several per image.")
    rows = split.dataset.select(kept)
    texts = [several[image_id] for image_id in id_column(rows)]
    scores = iter(_scores(options, rows, texts))
    pairs: list[dict[str, Any]] = []
    totals: np.ndarray = np.zeros(len(_COUNTS), np.int64)
    for value, image_id, own in zip(undecoded(rows)["image"], id_column(rows), texts, strict=True):
        scored = dict(zip(own, scores, strict=False))
        chosen, counts = choose_pairs(scored, options.margin, options.max_pairs_per_image)
        totals += counts
        for better, worse in chosen:
            row: dict[str, Any] = {"prompt": [{"role": "user", "content": options.prompt}], "image_id": image_id}
            for name, text in (("chosen", better), ("rejected", worse)):
                row |= {name: [{"role": "assistant", "content": text}], f"score_{name}": scored[text]}
            pairs.append(row | {"images": [image_bytes(value)]})
    if not pairs:
        raise ValueError(f"No two captions of an image differ by --margin {options.margin:g} or more. Lower it.")
    with atomic_file(options.output) as file:
        datasets.Dataset.from_list(pairs, features=_FEATURES).to_parquet(file)
    number = dict(zip(_COUNTS, totals.tolist(), strict=True))
    shares = {f"{name}_share": number[name] / number["compared"] for name in ("ties", "under_margin")}
    images = {"images": len(pooled), "images_with_several": len(kept)}
    text = (
        f"{options.output}: {number['written']:,} pairs of {len(kept):,} images ({len(pooled) - len(kept):,} of {len(pooled):,} have no "
        f"two different captions). Of {number['compared']:,} pairs compared, {shares['ties_share']:.1%} are ties and "
        f"{shares['under_margin_share']:.1%} differ by less than {options.margin:g}."
    )
    print(json.dumps({"output": str(options.output), **images, **number, **shares}) if options.json else text)
