"""`captionrl pairs`: preference pairs for TRL's DPO from several captions per image and any reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet

from hf_captionrl.apps.pairs.options import PairsOptions
from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.data.columns import caption_column, id_column, undecoded
from hf_captionrl.data.images import image_bytes
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.evaluation.options import EMBEDDED
from hf_captionrl.evaluation.reward_scores import reward_scores
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards.base import resolve_rewards
from hf_captionrl.utils.io import atomic_file, counted, refuse_other_file
from hf_captionrl.utils.model_files import model_path

_MESSAGES = datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
_FEATURES = datasets.Features(
    dict.fromkeys(("prompt", "chosen", "rejected"), _MESSAGES)
    | {"images": datasets.List(datasets.Image()), "image_id": datasets.Value("string")}
    | {f"score_{name}": datasets.Value("float64") for name in ("chosen", "rejected")}
)
"""TRL's vision preference format, and where a pair comes from."""

_IMAGES_AT_ONCE = 100  # at least; they are distractors of each other


def choose_pairs(scores: Mapping[str, float], margin: float, most: int) -> list[tuple[str, str]]:
    """Pairs (chosen, rejected) of the captions of an image, widest first."""
    pairs = [sorted(pair, key=lambda text: -scores[text]) for pair in combinations(scores, 2)]
    wide = [(better, worse) for better, worse in pairs if scores[better] - scores[worse] >= margin]
    return sorted(wide, key=lambda pair: scores[pair[1]] - scores[pair[0]])[:most]


def score_captions(options: PairsOptions, rows: Any, texts: Sequence[Sequence[str]]) -> list[float]:
    """Weighted sums of the rewards of all captions, image after image."""
    name = options.scorer or ("scenes:clip-reward" if options.dataset in EMBEDDED else None)
    if name is None and "self_retrieval" in options.reward:
        raise ValueError("--reward self_retrieval needs a scorer. Use --scorer openai/clip-vit-base-patch32.")
    scorer = None if name is None else load_scorer(model_path(name), device=options.device)
    data = rows.remove_columns("image")
    score = reward_scores(
        resolve_rewards(options.reward, options.reward_weights),
        id_column(rows),
        caption_column(rows),
        lambda other: scorer_features(other, rows, cache_dir=options.cache_dir),
        {column: data[column] for column in data.column_names},
        scorer,
    )
    scores: list[float] = []
    for part in np.array_split(np.arange(len(texts)), max(1, len(texts) // _IMAGES_AT_ONCE)):
        images = part.tolist()
        lengths = [len(texts[image]) for image in images]
        # Rewards see groups of equal size; where images have different numbers of captions, each caption is a group.
        groups = images if len(set(lengths)) == 1 else np.repeat(part, lengths).tolist()
        scores += score([text for image in images for text in texts[image]], groups, images)
    return scores


def _read_columns(path: Path) -> None:
    """Raises a `ValueError` if the file is none of pairs."""
    if set(pyarrow.parquet.read_schema(path).names) != _FEATURES.keys():
        raise ValueError(f"{path} has other columns.")


def write_pairs(options: PairsOptions) -> None:
    """Write the pairs, and print their number."""
    if options.output.suffix != ".parquet":
        raise ValueError(f"--output {str(options.output)!r} must end in .parquet.")
    refuse_other_file(options.output, _read_columns, "pairs")
    pooled: dict[str, list[str]] = {}
    for path in options.captions:
        for image_id, captions in read_caption_file(path).captions.items():
            pooled.setdefault(image_id, []).extend(captions)
    split = load_split(options, quarantine_path=None, require_captions=False)
    if foreign := sorted(set(pooled).difference(split.all_ids)):
        raise ValueError(
            f"--captions has images that are not in the data ({len(foreign)}), such as {foreign[0]!r}. Check --split."
        )
    several = {image_id: list(dict.fromkeys(texts)) for image_id, texts in pooled.items() if len(set(texts)) > 1}
    rows = split.dataset.select([row for row, image_id in enumerate(id_column(split.dataset)) if image_id in several])
    if not len(rows):
        raise ValueError("--captions have no image of the data with two different captions. Write several per image.")
    texts = [several[image_id] for image_id in id_column(rows)]
    scores = iter(score_captions(options, rows, texts))
    pairs: list[dict[str, Any]] = []
    for value, image_id, captions in zip(undecoded(rows)["image"], id_column(rows), texts, strict=True):
        scored = dict(zip(captions, scores, strict=False))
        for pair in choose_pairs(scored, options.margin, options.max_pairs_per_image):
            row: dict[str, Any] = {"prompt": [{"role": "user", "content": options.prompt}], "image_id": image_id}
            for name, text in zip(("chosen", "rejected"), pair, strict=True):
                row |= {name: [{"role": "assistant", "content": text}], f"score_{name}": scored[text]}
            pairs.append(row | {"images": [image_bytes(value)]})
    if not pairs:
        raise ValueError(f"No two captions of an image differ by --margin {options.margin:g} or more. Lower it.")
    with atomic_file(options.output) as file:
        datasets.Dataset.from_list(pairs, features=_FEATURES).to_parquet(file)
    numbers = {"images": len(pooled), "images_with_several": len(rows), "written": len(pairs)}
    text = f"{options.output}: {counted(len(pairs), 'pair')} of {counted(len(rows), 'image')} with several captions, of {len(pooled):,}."
    print(json.dumps({"output": str(options.output), **numbers}) if options.json else text)
