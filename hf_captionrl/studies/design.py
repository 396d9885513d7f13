"""Design of human studies: images, questions and their order, and the key, which participants do not see.

Two designs: DiscriTune's retrieval study (section 5.3, Appendix A) and SMILE's rating study (section 3.2). The same
inputs and seed give a byte-identical study.

Legend: N images, D features.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_captionrl.retrieval.neighbours import normalised

__all__ = ["deal_blocks", "draw_controls", "draw_sets", "rating_parts", "retrieval_parts", "study_fingerprint"]

_CANDIDATES = 4
"""Groups of images that are tried per control."""

_SURE = 0.9
"""Smallest probability with which the scorer finds the image of a control."""


def draw_sets(
    features: Any,
    num_sets: int,
    *,
    rows: Sequence[int] | None = None,
    set_size: int = 10,
    max_similarity: float = 0.8,
) -> list[list[int]]:
    """Disjoint sets of a target and its nearest neighbours.

    Reference: DiscriTune, Appendix A. Neighbours with a cosine above 0.8 are often copies and are skipped. Targets are tried
    in the order of `rows`; targets with too few free neighbours are skipped.

    `features` are `(N, D)`.
    """
    if set_size < 2:
        raise ValueError(f"set_size is {set_size}, but must be at least 2.")
    if not -1 < max_similarity <= 1:
        raise ValueError(f"max_similarity is {max_similarity}; a cosine lies between -1 and 1.")
    unit = normalised(features)
    order = list(range(len(unit)) if rows is None else rows)
    free = torch.zeros(len(unit), dtype=torch.bool)
    free[order] = True
    sets: list[list[int]] = []
    for target in order:
        if len(sets) == num_sets:
            break
        if not free[target]:
            continue
        scores = (unit @ unit[target]).cpu()
        open_ = free & (scores <= max_similarity)
        open_[target] = False
        if int(open_.sum()) < set_size - 1:
            continue
        scores[~open_] = -torch.inf
        # A stable sort gives the same order of ties on every machine.
        found = [target, *scores.argsort(descending=True, stable=True)[: set_size - 1].tolist()]
        free[found] = False
        sets.append(found)
    return sets


def draw_controls(
    features: Any,
    captions: Sequence[Sequence[str]],
    encode: Callable[[list[str]], Any],
    num_controls: int,
    *,
    rows: Sequence[int],
    set_size: int = 10,
    logit_scale: float = 100.0,
) -> list[tuple[list[int], str]]:
    """Easy control questions: random images, and a human caption that fits only one of them.

    Images are grouped in the order of `rows`. The target of a group is the image that the scorer finds with the highest
    probability by one of its captions. Groups with a probability of at most 0.9 are skipped; the surest groups are used.

    `features` are `(N, D)`; `encode` gives text features `(M, D)`.
    """
    unit = normalised(features)
    groups = [list(rows[at : at + set_size]) for at in range(0, len(rows) - set_size + 1, set_size)]
    found: list[tuple[float, list[int], str]] = []
    for group in groups[: num_controls * _CANDIDATES]:
        asked = [(place, text) for place, row in enumerate(group) for text in captions[row] if text.strip()]
        if not asked:
            continue
        texts = normalised(encode([text for _, text in asked]), "text features").cpu()
        chances = (logit_scale * texts @ unit[group].cpu().T).softmax(dim=1)  # (captions, images)
        own = chances[range(len(asked)), [place for place, _ in asked]]
        best = int(own.argmax())
        place, text = asked[best]
        if float(own[best]) > _SURE:
            found.append((float(own[best]), [group[place], *group[:place], *group[place + 1 :]], text))
    found.sort(key=lambda control: -control[0])
    return [(images, text) for _, images, text in found[:num_controls]]


def deal_blocks(num_sets: int, num_systems: int, block_size: int, rng: random.Random) -> list[list[tuple[int, int]]]:
    """Distribute pairs of a set and a system over blocks of equal size, each set at most once per block."""
    if min(num_sets, num_systems, block_size) < 1:
        raise ValueError(f"{num_sets} sets, {num_systems} systems, blocks of {block_size}: each must be at least 1.")
    blocks: list[list[tuple[int, int]]] = [
        [] for _ in range(max(num_systems, -(-num_sets * num_systems // block_size)))
    ]
    for number in rng.sample(range(num_sets), num_sets):
        # The smallest blocks, ties at random: sizes differ by at most one.
        chosen = sorted(rng.sample(range(len(blocks)), len(blocks)), key=lambda block: len(blocks[block]))
        for system, block in enumerate(rng.sample(chosen[:num_systems], num_systems)):
            blocks[block].append((number, system))
    return [rng.sample(block, len(block)) for block in blocks]


def _question_id(rng: random.Random) -> str:
    """A random id, which does not reveal the answer."""
    return f"q{rng.getrandbits(40):010x}"


def retrieval_parts(
    sets: Sequence[Sequence[str]],
    captions: Mapping[str, Sequence[str]],
    controls: Sequence[tuple[Sequence[str], str]],
    *,
    block_size: int = 100,
    controls_per_block: int = 5,
    seed: int = 0,
) -> dict[str, list[dict[str, Any]]]:
    """The blocks of a retrieval study."""
    if len(controls) < controls_per_block:
        raise ValueError(
            f"There are {len(controls)} controls, but a block needs {controls_per_block}. Use more images."
        )
    for name, texts in captions.items():
        if len(texts) != len(sets):
            raise ValueError(f"{name!r} has {len(texts)} captions for {len(sets)} sets. Give one each.")
    rng = random.Random(f"retrieval {seed}")
    names = list(captions)

    def question(group: str, system: str | None, caption: str, images: Sequence[str]) -> dict[str, Any]:
        shown = rng.sample(list(images), len(images))
        place = shown.index(images[0]) + 1
        return {
            "id": _question_id(rng),
            "group": group,
            "system": system,
            "caption": caption,
            "images": shown,
            "right": place,
        }

    parts: dict[str, list[dict[str, Any]]] = {}
    blocks = deal_blocks(len(sets), len(names), block_size, rng)
    width = len(str(len(blocks)))
    for number, block in enumerate(blocks):
        questions = [question(f"set-{s}", names[k], captions[names[k]][s], sets[s]) for s, k in block]
        for step in range(controls_per_block):
            which = (number * controls_per_block + step) % len(controls)
            images, text = controls[which]
            asked = question(f"control-{which}", None, text, images)
            questions.insert(rng.randrange(len(questions) + 1), asked)
        parts[f"block-{number + 1:0{width}}"] = questions
    return parts


def rating_parts(
    image_ids: Sequence[str], captions: Mapping[str, Sequence[str]], *, num_raters: int = 5, seed: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """The pages of a rating study, one per rater: the same captions, each page in another order.

    Captions of one image follow each other; images, and the systems of each image, are shuffled.
    """
    for name, texts in captions.items():
        if len(texts) != len(image_ids):
            raise ValueError(f"{name!r} has {len(texts)} captions for {len(image_ids)} images. Give one each.")
    if num_raters < 1:
        raise ValueError(f"num_raters is {num_raters}, but must be at least 1.")
    rng = random.Random(f"rating {seed}")
    asked = [
        [
            {"id": _question_id(rng), "group": image_id, "system": name, "caption": texts[i], "images": [image_id]}
            for name, texts in captions.items()
        ]
        for i, image_id in enumerate(image_ids)
    ]
    width = len(str(num_raters))
    return {
        f"rater-{number + 1:0{width}}": [
            dict(question) for group in rng.sample(asked, len(asked)) for question in rng.sample(group, len(group))
        ]
        for number in range(num_raters)
    }


def study_fingerprint(key: Mapping[str, Any]) -> str:
    """Hash of the key, which identifies the study and detects edits."""
    counted = {name: value for name, value in key.items() if name != "fingerprint"}
    text = json.dumps(counted, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
