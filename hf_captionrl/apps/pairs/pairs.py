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
import torch
import yaml
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_captionrl.apps.pairs.options import PairsOptions
from hf_captionrl.captioners.pipeline import scorer_features
from hf_captionrl.data.columns import caption_column, id_column, undecoded
from hf_captionrl.data.images import image_bytes
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.caption_files import read_caption_file
from hf_captionrl.evaluation.options import EMBEDDED
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards import Reward, RewardContext, RewardData, WeightedRewards
from hf_captionrl.rewards.base import reward_class
from hf_captionrl.text.ngrams import encode_words
from hf_captionrl.text.tokenize import ptb_tokenize_all
from hf_captionrl.utils.io import atomic_file, refuse_other_file
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


def parse_reward(spec: str) -> Reward:
    """A registered reward from `NAME` or `NAME:FIELD=VALUE,FIELD=VALUE`."""
    name, _, settings = spec.partition(":")
    fields = [setting.split("=", 1) for setting in settings.split(",") if setting]
    try:
        return reward_class(name)(**{field.strip(): yaml.safe_load(value) for field, value in fields})
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--reward {spec!r} ({error}). Use NAME:FIELD=VALUE,FIELD=VALUE.") from None


def reward_scores(options: PairsOptions, rows: Any, texts: Sequence[Sequence[str]]) -> list[float]:
    """Weighted sums of the rewards of all captions, image after image."""
    total = WeightedRewards([parse_reward(spec) for spec in options.reward], options.reward_weights)
    name = options.scorer or ("scenes:clip-reward" if options.dataset in EMBEDDED else None)
    if name is None and "self_retrieval" in total.names:
        raise ValueError("--reward self_retrieval needs a scorer. Use --scorer openai/clip-vit-base-patch32.")
    if "truncation" in total.names:
        raise ValueError(
            "--reward truncation counts tokens of a policy, and files of captions have none. Leave it out."
        )
    scorer = None if name is None else load_scorer(model_path(name), device=options.device)
    data = rows.remove_columns("image")
    ids, references, vocabulary = id_column(rows), caption_column(rows), {"": 0}

    def features(other: Any) -> Tensor:
        return scorer_features(other, rows, cache_dir=options.cache_dir)

    def encode(captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Words as ids `(N, T)` with an end token, 0, and their mask."""
        batch = encode_words(ptb_tokenize_all(captions), vocabulary)
        words = [
            torch.cat([row, torch.zeros(1, dtype=row.dtype)]) for row in batch.tokens.split(batch.lengths.tolist())
        ]
        return pad_sequence(words, batch_first=True), torch.arange(max(map(len, words))) <= batch.lengths[:, None]

    device = getattr(scorer, "device", torch.device("cpu"))
    total.prepare(RewardData(ids, references, features, encode, 0, device, scorer, columns=data.column_names))
    scores: list[float] = []
    for part in np.array_split(np.arange(len(texts)), max(1, len(texts) // _IMAGES_AT_ONCE)):
        lengths = [len(texts[image]) for image in part]
        # Rewards see groups of equal size; where images have different numbers of captions, each caption is a group.
        repeats = [1] * len(part) if len(set(lengths)) == 1 else lengths
        positions = torch.arange(len(part)).repeat_interleave(torch.tensor(repeats))  # (B,)
        candidates = torch.from_numpy(part)  # (C,)
        of_group = candidates[positions].tolist()
        captions = [text for image in part for text in texts[image]]
        tokens, mask = encode(captions)
        context = RewardContext(
            captions=captions,
            ids=tokens,
            mask=mask,
            ended=torch.ones(len(captions), dtype=torch.bool),
            rows=candidates[positions],
            image_ids=[ids[image] for image in of_group],
            references=[references[image] for image in of_group],
            candidates=candidates,
            positions=positions,
            columns=data[of_group],
        )
        values = total(context)  # (N, R)
        scores += (values * torch.tensor(total.weights, dtype=values.dtype)).sum(1).tolist()
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
            f"--captions name {len(foreign)} images that are not in the data: {foreign[0]!r}, ... Check --split."
        )
    several = {image_id: list(dict.fromkeys(texts)) for image_id, texts in pooled.items() if len(set(texts)) > 1}
    rows = split.dataset.select([row for row, image_id in enumerate(id_column(split.dataset)) if image_id in several])
    if not len(rows):
        raise ValueError("--captions have no image of the data with two different captions. Write several per image.")
    texts = [several[image_id] for image_id in id_column(rows)]
    scores = iter(reward_scores(options, rows, texts))
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
    text = f"{options.output}: {len(pairs):,} pairs of {len(rows):,} images with several captions, of {len(pooled):,}."
    print(json.dumps({"output": str(options.output), **numbers}) if options.json else text)
