"""What a metric of captions sees: probes on scenes, whose facts are exact.

A metric is called as in use, with one caption per scene and all scenes at once, so that document frequencies and distractors are
those of one file of captions.
Legend: n scenes, R resamples.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_captionrl.evaluation.metric_functions import MetricFunction, call_metric, metric_function
from hf_captionrl.metrics.bootstrap import (
    Interval,
    bootstrap_interval,
    exact_interval,
    mean_interval,
    paired_test,
    proportion_interval,
)
from hf_captionrl.scenes import Facts, check, full_caption, render_scene, sample_scene
from hf_captionrl.scenes.grammar import ANNOTATORS, Annotator, Words, annotate, article, write_sentence
from hf_captionrl.scenes.world import BACKGROUNDS, CATEGORIES, COLOURS, COUNTS, OPPOSITES, SIZES, category_of, choose

# --- Captions of a scene: true ones in several wordings, and true ones with one exact changed fact -------------------

KINDS = {
    "object": "the object is another one of its category",
    "colour": "the object has another colour",
    "count": "another number",
    "size": "small for large, and the reverse",
    "background": "another background colour",
    "relation": "left of for right of, above for below, and the reverse",
    "swapped objects": "each object, with its colour, in the place of the other",
    "swapped colours": "each object in the colour of the other",
    "negation": '"without" the object that is there, against "without" one that is not',
}
"""Changed facts of the pairs (true caption, caption with one wrong fact)."""

INVARIANCES = {
    "paraphrase": "synonyms",
    "word order": "the setting first",
    "padding": '"image of" before the caption',
    "case and punctuation": "a capital letter and a full stop",
}
"""Changes of the wording that change no claim."""

_SETTING_FIRST = Annotator(1.0, setting_first=True)
_LEVELS = 3  # of captions with some of the facts, below the one with all; every scene has three facts beside the kind


def _said(facts: Facts) -> dict[str, Any]:
    """What the full caption says."""
    return facts.to_dict() | {"orientation": "" if facts.orientation == "upright" else facts.orientation}


def _other(rng: np.random.Generator, values: Sequence[Any], *but: Any) -> Any:
    return choose(rng, tuple(value for value in values if value and value not in but))


def _reworded(rng: np.random.Generator, facts: Facts, annotator: Annotator | None = None) -> str | None:
    """The full caption with at least one synonym; None if nothing in it has one."""
    drawn = (write_sentence(_said(facts), Words(rng), annotator) for _ in range(20))
    return next((text for text in drawn if text != write_sentence(_said(facts), None, annotator)), None)


def _changed(rng: np.random.Generator, facts: Facts) -> dict[str, Facts]:
    """Facts of the wrong captions by kind, where the kind applies and the caption is wrong."""
    kind, second = facts.kind, facts.second
    found = {
        "object": replace(facts, kind=_other(rng, CATEGORIES[category_of(kind)], kind, second)),
        "count": replace(facts, count=_other(rng, COUNTS, facts.count)),
        "size": replace(facts, size=_other(rng, SIZES, facts.size)),
        "background": replace(facts, background=_other(rng, BACKGROUNDS, facts.background)),
    }
    if facts.colour:
        found["colour"] = replace(facts, colour=_other(rng, COLOURS, facts.colour))
    if second:
        colours: Any = {"colour": facts.second_colour, "second_colour": facts.colour}
        found["relation"] = replace(facts, relation=OPPOSITES[facts.relation])
        found["swapped objects"] = replace(facts, kind=second, second=kind, **colours)
        found["swapped colours"] = replace(facts, **colours)
    # Swapped colours may be equal, or natural and therefore true.
    return {name: wrong for name, wrong in found.items() if check(full_caption(wrong), facts).wrong}


def scene_captions(facts: Facts, rng: np.random.Generator) -> dict[str, str]:
    """All captions of one scene that are scored, by name; a name that does not apply to the scene is missing."""
    # Those of KINDS, "wrong", "wrong, reworded" and "background, early" have a wrong fact; "negation, true" is the true one beside
    # "negation". Those of INVARIANCES, "identical" and "longer <k>" have the facts of the true caption, "facts <k>" some of them.
    true, said = full_caption(facts), _said(facts)
    changed = _changed(rng, facts)
    found = {"true": true, "identical": true, "word order": write_sentence(said, annotator=_SETTING_FIRST)}
    found |= {kind: full_caption(wrong) for kind, wrong in changed.items()}
    if facts.second:
        alone = write_sentence(said | {"second": "", "relation": "", "second_colour": ""})
        absent = _other(rng, CATEGORIES[category_of(facts.second)], facts.kind, facts.second)
        for name, noun in (("negation, true", absent), ("negation", facts.second)):
            found[name] = f"{alone} without {article(noun)} {noun}"
    if (text := _reworded(rng, facts)) is not None:
        found["paraphrase"] = text
    found |= {"padding": f"image of {true}", "case and punctuation": f"{true.capitalize()}."}
    found |= {"longer 1": f"image of {true} in the picture"}
    found |= {"longer 2": f"image of {write_sentence(said, opinion='nice lovely')} in the picture"}
    order: list[str] = []
    stated = [name for name, value in said.items() if value and name != "kind" and (name, value) != ("count", 1)]
    for name in rng.permutation(stated).tolist():
        # A relation and a colour of the second object need it.
        needs = ["second"] if name in ("relation", "second_colour") else []
        order += [one for one in (*needs, name) if one not in order]
    for level in range(_LEVELS):
        kept = {"kind", *order[: round(level * len(order) / _LEVELS)]}
        some = {name: value if name in kept else "" for name, value in said.items()}
        found[f"facts {level}"] = write_sentence(some | {"several": facts.count > 1 and "count" not in kept})
    early = _said(changed["background"])
    found["background, early"] = write_sentence(early, annotator=_SETTING_FIRST)
    wrong = changed[choose(rng, tuple(changed))]
    found |= {"wrong": full_caption(wrong), "wrong, reworded": _reworded(rng, wrong) or full_caption(wrong)}
    return found


def scene_references(facts: Facts, rng: np.random.Generator, style: str) -> list[str]:
    """Five references of a scene: `"short"` ones, those of the data set's annotators, or `"full"` ones, which say all facts."""
    if style == "short":
        return [annotate(rng, facts, annotator) for annotator in ANNOTATORS]
    wordings = itertools.islice(itertools.cycle([None, _SETTING_FIRST]), len(ANNOTATORS))
    return [_reworded(rng, facts, annotator) or full_caption(facts) for annotator in wordings]


# --- Metrics that need more than captions, references and images: facts, a language model, a training run ------------


@dataclass(frozen=True)
class AuditedMetric:
    """A metric under its name in the results: a name, a reward, or a function; `scorer` and `language_model` are those it uses."""

    name: str
    metric: Any
    scorer: Any = None
    prefix: str | None = None  # text before captions for CLIPScore; None for its own
    language_model: Any = None  # model and tokenizer


@dataclass(frozen=True)
class AuditImages:
    """The images that a metric is called with: their files, references, and facts where they are known."""

    files: Sequence[Any]
    references: Sequence[Sequence[str]]
    facts: Sequence[Facts] | None = None


OWN_METRICS = ("truth_precision", "truth_recall", "truth_f1", "length", "perplexity")
"""Metrics of the audit by name, in addition to those of `metric_functions`; `reward:NAME` is a registered reward."""


def truth_score(name: str, caption: str, facts: Facts) -> float:
    """Precision of the claims, recall of the facts, or their harmonic mean, by the truth checker."""
    # The checker reads no negation: what follows "without" is judged alone, and reversed.
    said, _, denied = caption.partition(" without ")
    found = check(said, facts)
    right, wrong = len(found.right), len(found.wrong)
    if denied:
        is_there = any(claim.attribute in ("kind", "second") for claim in check(denied, facts).right)
        right, wrong = right + (not is_there), wrong + is_there
    precision = right / max(right + wrong, 1)
    recall = len(found.recalled) / max(len(found.recalled) + len(found.missed), 1)
    both = 2 * precision * recall / max(precision + recall, 1e-12)
    return {"truth_precision": precision, "truth_recall": recall, "truth_f1": both}[name]


def _keeping_features(scorer: Any) -> Any:
    """The scorer, which encodes each image and each text once."""
    import torch

    keeps = copy.copy(scorer)

    def keeping(encode: Callable[[list[Any]], Any], key: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
        kept: dict[Any, Any] = {}

        def features(values: Sequence[Any]) -> Any:
            keys = [key(value) for value in values]
            new = {name: value for name, value in zip(keys, values, strict=True) if name not in kept}
            if new:
                kept.update(zip(new, encode(list(new.values())), strict=True))
            return torch.stack([kept[name] for name in keys])

        return features

    keeps.image_features = keeping(scorer.image_features, lambda image: (image.size, image.tobytes()))
    keeps.text_features = keeping(scorer.text_features, str)
    return keeps


def reward_metric(reward: Any, images: AuditImages, scorer: Any = None) -> MetricFunction:
    """A reward as a metric: one caption per image, and all images of the audit as the rollout, whose others are distractors."""
    from hf_captionrl.data.images import open_image
    from hf_captionrl.evaluation.reward_scores import reward_scores
    from hf_captionrl.rewards.base import resolve_rewards

    distinct = list(dict.fromkeys(images.files))
    position = {file: at for at, file in enumerate(distinct)}
    rows = [images.files.index(file) for file in distinct]
    score = reward_scores(
        resolve_rewards(reward),
        [str(at) for at in range(len(distinct))],
        [list(images.references[row]) for row in rows],
        lambda scorer: scorer.image_features([open_image(file) for file in distinct]),
        {} if images.facts is None else {"facts": [images.facts[row].to_dict() for row in rows]},
        scorer,
    )
    every = list(range(len(distinct)))
    return lambda candidates, _, files: score(candidates, [position[file] for file in files], every)


def audited_function(audited: AuditedMetric, images: AuditImages) -> MetricFunction:
    """The function of a metric on some images."""
    metric = audited.metric
    scorer = None if audited.scorer is None else _keeping_features(audited.scorer)
    if metric == "length":
        return lambda candidates, references, files: [float(len(text.split())) for text in candidates]
    if metric == "perplexity":
        from hf_captionrl.metrics.perplexity import caption_losses

        def log_probs(candidates: Sequence[str], references: Any, files: Any) -> list[float]:
            losses = caption_losses(list(candidates), *audited.language_model)
            return (-losses.nats / losses.tokens.clamp(min=1)).tolist()  # type: ignore[no-any-return]

        return log_probs
    if metric in OWN_METRICS:
        facts = dict(zip(images.files, images.facts or (), strict=True))
        return lambda candidates, references, files: [
            truth_score(metric, text, facts[file]) for text, file in zip(candidates, files, strict=True)
        ]
    if hasattr(metric, "prepare") or (isinstance(metric, str) and metric.startswith("reward:")):
        return reward_metric(metric.removeprefix("reward:") if isinstance(metric, str) else metric, images, scorer)
    return metric_function(metric, scorer=scorer, prefix=audited.prefix)


# --- The probes of one metric ----------------------------------------------------------------------------------------

ERROR_RATES = ((0.1, 0.15), (0.1, 0.2), (0.1, 0.4))
"""Shares of wrong captions of two captioners, the better one first."""
SAMPLE_SIZES = (50, 200, 1000)
"""Images on which they are compared."""
_EXPERIMENTS, _TESTED_IMAGES = 400, 100
_TIMED_PARTS = 8
_ROUNDING = 1e-9  # relative; sums in another order are ties, and fp32 of models rounds in either direction


def _with_interval(value: float, interval: Interval) -> dict[str, Any]:
    return {"value": float(value), "interval": list(interval), "method": interval.method}


def misranked(true: np.ndarray, wrong: np.ndarray, images: int, rates: Sequence[float], seed: int) -> dict[str, Any]:
    """Probability that the worse of two captioners gets the higher mean; scores `(W, n)` are in W equally likely wordings."""
    # Mean and variance of the difference of a scene are enumerated; the sum over images, which are drawn from the scenes, is normal.
    means, squares = ([(1 - e) * (true**k).mean(0) + e * (wrong**k).mean(0) for e in rates] for k in (1, 2))
    n = true.shape[1]
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=1000)
    weights = np.concatenate([np.ones((1, n)), draws]) / n  # (1 + R, n)
    mean = weights @ (means[0] - means[1])
    mean = np.where(np.abs(mean) <= _ROUNDING * np.abs(true).max(), 0, mean)
    variance = np.maximum(weights @ (squares[0] + squares[1] - 2 * means[0] * means[1]) - mean**2, 0)
    z = np.divide(mean * math.sqrt(images), np.sqrt(variance), out=np.sign(mean) * 40, where=variance > 0)
    shares = [math.erfc(value / math.sqrt(2)) / 2 for value in z]
    interval = Interval(np.percentile(shares[1:], [2.5, 97.5]), "bootstrap")
    return {"error_rates": list(rates), "images": images} | _with_interval(shares[0], interval)


def false_alarms(true: np.ndarray, wrong: np.ndarray, rate: float, seed: int) -> dict[str, Any]:
    """How often a paired test at 5 % separates two captioners of the same error rate; arguments as of [`misranked`]."""
    rng, scores, found = np.random.default_rng(seed), np.stack([true, wrong]), 0
    shape = (2, _TESTED_IMAGES)
    for number in range(_EXPERIMENTS):
        scenes = rng.integers(true.shape[1], size=_TESTED_IMAGES)
        is_wrong = (rng.random(shape) < rate).astype(int)
        first, second = scores[is_wrong, rng.integers(len(true), size=shape), scenes]
        found += paired_test(first, second, num_resamples=199, seed=number)["p_value"] <= 0.05
    return _with_interval(found / _EXPERIMENTS, exact_interval(found, _EXPERIMENTS)) | {"n": _EXPERIMENTS}


def probe(scores: Mapping[str, np.ndarray], applies: Mapping[str, np.ndarray], seed: int) -> dict[str, Any]:
    """All numbers of one metric but its cost, from n scores for each name of [`scene_captions`], and whether each scene has it."""
    true, spread = scores["true"], float(scores["true"].std())
    tolerance = _ROUNDING * max(float(np.abs(values).max()) for values in scores.values())

    def signs(above: str, below: str) -> np.ndarray:
        """1 where the first caption scores higher, 0 at a tie, -1 elsewhere."""
        difference = scores[above] - scores[below]
        return np.sign(np.where(np.abs(difference) <= tolerance, 0, difference))

    def mean(values: np.ndarray, interval: Any = mean_interval) -> dict[str, Any]:
        return _with_interval(values.mean(), interval(values)) | {"n": len(values)}

    def change(name: str) -> dict[str, Any]:
        changes = (scores[name] - true)[applies[name]]
        changes = np.where(np.abs(changes) <= tolerance, 0, changes)
        if changes.any() and spread <= tolerance:
            return {"value": None, "n": len(changes), "reason": "true captions have equal scores"}
        return mean(changes / (spread or 1))

    def wordings(first: str, second: str) -> np.ndarray:
        return np.stack([scores[first], np.where(applies[second], scores[second], scores[first])])  # (2, n)

    sensitivity = {
        kind: preference(signs("negation, true" if kind == "negation" else "true", kind)[applies[kind]])
        for kind in KINDS
    }
    early = signs("word order", "background, early") - signs("true", "background")
    longer = itertools.combinations(["true", "padding", "longer 1", "longer 2"], 2)
    steps = itertools.pairwise([*(f"facts {level}" for level in range(_LEVELS)), "true"])
    captions = wordings("true", "paraphrase"), wordings("wrong", "wrong, reworded")
    return {
        "is_constant": bool(np.ptp(np.stack([*scores.values()])) <= tolerance),
        "mean": float(true.mean()),
        "standard_deviation": spread,
        "identical": preference(signs("true", "identical")),
        "sensitivity": sensitivity,
        "invariance": {name: change(name) for name in INVARIANCES},
        "monotonicity": mean(np.mean([signs(b, a) / 2 + 0.5 for a, b in steps], axis=0), proportion_interval),
        "length_bias": mean(np.mean([signs(long, short) for short, long in longer], axis=0)),
        "position_bias": mean(early / 2),
        "misranked": [misranked(*captions, size, rates, seed) for rates in ERROR_RATES for size in SAMPLE_SIZES],
        "false_alarms": false_alarms(*captions, ERROR_RATES[0][0], seed),
        **verdict(sensitivity),
    }


def preference(signs: np.ndarray) -> dict[str, Any]:
    """Share of pairs whose better caption scores higher, ties 0.5, from signs `(N,)`, with its interval."""
    shares = signs / 2 + 0.5
    result = _with_interval(shares.mean(), proportion_interval(shares))
    return result | {"ties": float((signs == 0).mean()), "n": len(signs)}


def verdict(sensitivity: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Kinds of errors that a metric sees, does not see (the interval contains 0.5), and rewards (it lies below)."""
    found: dict[str, list[str]] = {"sees": [], "does_not_see": [], "prefers_the_error": []}
    for kind, row in sensitivity.items():
        low, high = row["interval"]
        found["sees" if low > 0.5 else "prefers_the_error" if high < 0.5 else "does_not_see"].append(kind)
    return found


# --- All metrics on scenes -------------------------------------------------------------------------------------------


def audit_on_scenes(
    metrics: Sequence[AuditedMetric],
    *,
    n: int = 500,
    seed: int = 0,
    references: str = "short",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, Any]]:
    """[`probe`] of each metric on n scenes (50 or more), and its `cost`, the time per caption over that of CIDEr-D."""
    rng = np.random.default_rng((seed, 38))  # not the scenes of the data set, nor those that its models learned from
    scenes: dict[Facts, Any] = {}
    while len(scenes) < n:
        scene = sample_scene(rng)
        scenes.setdefault(scene.facts, scene)
    rows = [scene_captions(facts, rng) for facts in scenes]
    names = dict.fromkeys(name for row in rows for name in row)
    applies = {name: np.array([name in row for row in rows]) for name in names}
    captions = {name: [row.get(name, row["true"]) for row in rows] for name in names}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number:05d}.png" for number in range(n)]
        for file, scene in zip(files, scenes.values(), strict=True):
            render_scene(scene).save(file)
        images = AuditImages(files, [scene_references(f, rng, references) for f in scenes], list(scenes))
        everything = [AuditedMetric("cider_d", "cider_d"), *metrics]
        functions = [audited_function(audited, images) for audited in everything]

        def score(number: int, texts: Sequence[str], rows: slice = slice(None)) -> list[float]:
            given = texts[rows], images.references[rows], images.files[rows]
            return call_metric(functions[number], everything[number].name, *given)

        def seconds(number: int, rows: slice) -> float:
            started = time.perf_counter()
            score(number, captions["true"], rows)
            return time.perf_counter() - started

        for number in range(len(everything)):  # a metric that cannot be computed is named before the first is computed
            score(number, captions["true"], slice(2))
        parts = [slice(*ends) for ends in itertools.pairwise(np.linspace(0, n, _TIMED_PARTS + 1).astype(int).tolist())]
        for number, audited in enumerate(metrics, start=1):
            # In turn, so that another program on the machine delays both.
            times = np.array([(seconds(number, part), seconds(0, part)) for part in parts])
            mine, base = times.T
            ratio = bootstrap_interval(mine, weights=base, seed=seed)
            scores = {name: np.array(score(number, texts)) for name, texts in captions.items()}
            cost = _with_interval(mine.sum() / base.sum(), ratio) | {"seconds": float(mine.sum()) / n}
            found[audited.name] = probe(scores, applies, seed) | {"cost": cost}
            progress(f"{audited.name}: {len(names)} x {n} captions")
    return found
