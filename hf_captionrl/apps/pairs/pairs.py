"""`captionrl pairs`: preference pairs for TRL's DPO from several captions per image and any reward or metric."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
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
from hf_captionrl.evaluation.metric_functions import SCORER_METRICS, call_metric, metric_function
from hf_captionrl.evaluation.options import EMBEDDED
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards import Reward, RewardContext, RewardData, WeightedRewards
from hf_captionrl.rewards.base import reward_class
from hf_captionrl.text.ngrams import encode_words
from hf_captionrl.text.tokenize import ptb_tokenize_all
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


def parse_reward(spec: str) -> Reward:
    """A registered reward from `NAME` or `NAME:FIELD=VALUE,FIELD=VALUE`."""
    name, _, settings = spec.partition(":")
    fields = [setting.split("=", 1) for setting in settings.split(",") if setting]
    try:
        return reward_class(name)(**{field.strip(): yaml.safe_load(value) for field, value in fields})
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--reward {spec!r} ({error}). Use NAME:FIELD=VALUE,FIELD=VALUE.") from None


def _encoded(captions: Sequence[str], vocabulary: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Words as ids `(N, T)` with an end token, 0, and their mask; the vocabulary grows."""
    batch = encode_words(ptb_tokenize_all(captions), vocabulary)
    rows = [torch.cat([row, torch.zeros(1, dtype=row.dtype)]) for row in batch.tokens.split(batch.lengths.tolist())]
    return pad_sequence(rows, batch_first=True), torch.arange(max(map(len, rows))) <= batch.lengths[:, None]


def reward_scores(options: PairsOptions, rows: Any, texts: Sequence[Sequence[str]]) -> list[float]:
    """Weighted sums of the rewards of all captions, image after image; the images of a part are distractors of each other."""
    total = WeightedRewards([parse_reward(spec) for spec in options.reward or []], options.reward_weights)
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
        return _encoded(captions, vocabulary)

    device = getattr(scorer, "device", torch.device("cpu"))
    total.prepare(RewardData(ids, references, features, encode, 0, device, scorer, columns=data.column_names))
    scores: list[float] = []
    for part in np.array_split(np.arange(len(texts)), max(1, len(texts) // options.rollout_images)):
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


def metric_scores(options: PairsOptions, rows: Any, texts: Sequence[Sequence[str]]) -> list[float]:
    """Values of a metric of all captions, image after image."""
    image_of = [row for row, captions in enumerate(texts) for _ in captions]  # (N,)
    scorer = None
    if options.metric in SCORER_METRICS:
        scorer = load_scorer(model_path(str(options.scorer)), device=options.device)
    function = metric_function(str(options.metric), scorer=scorer)
    references, images = caption_column(rows), undecoded(rows)["image"][:]
    of_captions = ([column[image] for image in image_of] for column in (references, images))
    return call_metric(function, str(options.metric), [text for captions in texts for text in captions], *of_captions)


def write_pairs(options: PairsOptions) -> None:
    """Write the pairs, and print their number and the shares of ties and of pairs under the margin."""
    if (options.reward is None) == (options.metric is None):
        raise ValueError(f"--reward is {options.reward} and --metric {options.metric}. Use one of them.")
    if options.metric is not None and options.reward_weights is not None:
        raise ValueError(f"--reward_weights {options.reward_weights} has no effect with --metric. Leave it out.")
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
    scores = iter((reward_scores if options.metric is None else metric_scores)(options, rows, texts))
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
