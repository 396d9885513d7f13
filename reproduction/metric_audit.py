"""Shows which errors of captions a metric or reward sees, on scenes, whose facts are exact: the table of docs/metrics.md.

python reproduction/metric_audit.py --output reproduction/results/metric_audit.json

A metric is called as in use, with one caption per scene and all scenes at once, so that document frequencies and distractors are
those of one file of captions.
Legend: n scenes, R resamples.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only reproduction/ is on the path
from hf_captionrl.data.images import open_image
from hf_captionrl.evaluation.metric_functions import MetricFunction, call_metric, metric_function
from hf_captionrl.evaluation.reward_scores import reward_scores
from hf_captionrl.metrics.bootstrap import (
    Interval,
    bootstrap_interval,
    exact_interval,
    mean_interval,
    paired_test,
    proportion_interval,
)
from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model
from hf_captionrl.metrics.perplexity import caption_perplexity
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.rewards.base import resolve_rewards
from hf_captionrl.scenes import Facts, check, full_caption, render_scene, sample_scene
from hf_captionrl.scenes.grammar import ANNOTATORS, Annotator, Words, annotate, article, write_sentence
from hf_captionrl.scenes.world import BACKGROUNDS, CATEGORIES, COLOURS, COUNTS, OPPOSITES, SIZES, category_of, choose
from hf_captionrl.utils.io import installed_versions, write_json

SCORERS = ("scenes:clip-reward", "scenes:siglip-held-out")
BY_SCORER = ("ref_clip_score", "clip_score", "reward:self_retrieval")
WITH_REFERENCES = ("bleu_1", "bleu_4", "rouge_l", "meteor", "cider_d", "cider", "ref_clip_score", "reward:cider")
OTHERS = (
    *("clip_score", "reward:self_retrieval", "reward:repetition", "reward:length", "reward:truncation"),
    *("reward:claim_f1", "reward:question_oracle", "perplexity", "length"),
    *("truth_precision", "truth_recall", "truth_f1"),
)

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


def _stated(facts: Facts) -> dict[str, Any]:
    """What the full caption says."""
    return facts.to_dict() | {"orientation": "" if facts.orientation == "upright" else facts.orientation}


def _other(rng: np.random.Generator, values: Sequence[Any], *but: Any) -> Any:
    return choose(rng, tuple(value for value in values if value and value not in but))


def _reworded(rng: np.random.Generator, facts: Facts, annotator: Annotator | None = None) -> str | None:
    """The full caption with at least one synonym; None if nothing in it has one."""
    drawn = (write_sentence(_stated(facts), Words(rng), annotator) for _ in range(20))
    return next((text for text in drawn if text != write_sentence(_stated(facts), None, annotator)), None)


def _changed(rng: np.random.Generator, facts: Facts) -> dict[str, Facts]:
    """Facts of the wrong captions by kind, where the kind applies and the caption is wrong."""
    kind, second = facts.kind, facts.second
    changes = {
        "object": replace(facts, kind=_other(rng, CATEGORIES[category_of(kind)], kind, second)),
        "count": replace(facts, count=_other(rng, COUNTS, facts.count)),
        "size": replace(facts, size=_other(rng, SIZES, facts.size)),
        "background": replace(facts, background=_other(rng, BACKGROUNDS, facts.background)),
    }
    if facts.colour:
        changes["colour"] = replace(facts, colour=_other(rng, COLOURS, facts.colour))
    if second:
        colours: Any = {"colour": facts.second_colour, "second_colour": facts.colour}
        changes["relation"] = replace(facts, relation=OPPOSITES[facts.relation])
        changes["swapped objects"] = replace(facts, kind=second, second=kind, **colours)
        changes["swapped colours"] = replace(facts, **colours)
    # Swapped colours may be equal, or natural and therefore true.
    return {name: wrong for name, wrong in changes.items() if check(full_caption(wrong), facts).wrong}


def scene_captions(facts: Facts, rng: np.random.Generator) -> dict[str, str]:
    """All captions of one scene that are scored, by name; a name that does not apply to the scene is missing."""
    # Those of KINDS, "wrong", "wrong, reworded" and "background, early" have a wrong fact; "negation, true" is the true one beside
    # "negation". Those of INVARIANCES, "identical" and "longer <k>" have the facts of the true caption, "facts <k>" some of them.
    true, values = full_caption(facts), _stated(facts)
    changed = _changed(rng, facts)
    captions = {"true": true, "identical": true, "word order": write_sentence(values, annotator=_SETTING_FIRST)}
    captions |= {kind: full_caption(wrong) for kind, wrong in changed.items()}
    if facts.second:
        alone = write_sentence(values | {"second": "", "relation": "", "second_colour": ""})
        absent = _other(rng, CATEGORIES[category_of(facts.second)], facts.kind, facts.second)
        for name, noun in (("negation, true", absent), ("negation", facts.second)):
            captions[name] = f"{alone} without {article(noun)} {noun}"
    if (text := _reworded(rng, facts)) is not None:
        captions["paraphrase"] = text
    captions |= {"padding": f"image of {true}", "case and punctuation": f"{true.capitalize()}."}
    captions |= {"longer 1": f"image of {true} in the picture"}
    captions |= {"longer 2": f"image of {write_sentence(values, opinion='nice lovely')} in the picture"}
    order: list[str] = []
    stated = [name for name, value in values.items() if value and name != "kind" and (name, value) != ("count", 1)]
    for name in rng.permutation(stated).tolist():
        # A relation and a colour of the second object need it.
        needs = ["second"] if name in ("relation", "second_colour") else []
        order += [one for one in (*needs, name) if one not in order]
    for level in range(_LEVELS):
        names = {"kind", *order[: round(level * len(order) / _LEVELS)]}
        some = {name: value if name in names else "" for name, value in values.items()}
        captions[f"facts {level}"] = write_sentence(some | {"several": facts.count > 1 and "count" not in names})
    early = _stated(changed["background"])
    captions["background, early"] = write_sentence(early, annotator=_SETTING_FIRST)
    wrong = changed[choose(rng, tuple(changed))]
    captions |= {"wrong": full_caption(wrong), "wrong, reworded": _reworded(rng, wrong) or full_caption(wrong)}
    return captions


def scene_references(facts: Facts, rng: np.random.Generator, style: str) -> list[str]:
    """Five references of a scene: `"short"` ones, those of the data set's annotators, or `"full"` ones, which say all facts."""
    if style == "short":
        return [annotate(rng, facts, annotator) for annotator in ANNOTATORS]
    wordings = itertools.islice(itertools.cycle([None, _SETTING_FIRST]), len(ANNOTATORS))
    return [_reworded(rng, facts, annotator) or full_caption(facts) for annotator in wordings]


@dataclass(frozen=True)
class Scenes:
    """The scenes of an audit: what a metric is called with, their facts, and the captions of each by name."""

    files: Sequence[Path]
    references: Sequence[list[str]]
    facts: Sequence[Facts]
    captions: Sequence[dict[str, str]]


def draw_scenes(n: int, style: str, folder: Path, seed: int = 0) -> Scenes:
    """Scenes that are not those of the data set, nor those that its models learned from."""
    rng = np.random.default_rng((seed, 38))
    scenes: dict[Facts, Any] = {}
    while len(scenes) < n:
        scene = sample_scene(rng)
        scenes.setdefault(scene.facts, scene)
    files = [folder / f"{number:05d}.png" for number in range(n)]
    for file, scene in zip(files, scenes.values(), strict=True):
        render_scene(scene).save(file)
    captions = [scene_captions(facts, rng) for facts in scenes]
    return Scenes(files, [scene_references(facts, rng, style) for facts in scenes], list(scenes), captions)


# --- Metrics and rewards as functions of captions, references and files ----------------------------------------------


def truth_score(name: str, caption: str, facts: Facts) -> float:
    """Precision of the claims, recall of the facts, or their harmonic mean, by the truth checker."""
    # The checker reads no negation: what follows "without" is judged alone, and reversed.
    affirmed, _, denied = caption.partition(" without ")
    result = check(affirmed, facts)
    right, wrong = len(result.right), len(result.wrong)
    if denied:
        is_there = any(claim.attribute in ("kind", "second") for claim in check(denied, facts).right)
        right, wrong = right + (not is_there), wrong + is_there
    precision = right / max(right + wrong, 1)
    recall = len(result.recalled) / max(len(result.recalled) + len(result.missed), 1)
    both = 2 * precision * recall / max(precision + recall, 1e-12)
    return {"truth_precision": precision, "truth_recall": recall, "truth_f1": both}[name]


def log_probs() -> MetricFunction:
    """Mean log-probability of a token by the language model of the embedded world."""
    language_model = load_language_model("scenes:gpt2-perplexity")

    def scores(captions: Sequence[str], references: Any, files: Any) -> list[float]:
        losses = caption_perplexity(captions, *language_model)
        return (-losses["nats"] / losses["tokens"].clip(1)).tolist()  # type: ignore[no-any-return]

    return scores


def reward_metric(reward: Any, scenes: Scenes, scorer: Any = None) -> MetricFunction:
    """A reward as a metric: one caption per image, and all scenes as the rollout, whose others are distractors."""
    every = range(len(scenes.files))
    position = {file: at for at, file in enumerate(scenes.files)}
    score = reward_scores(
        resolve_rewards(reward),
        list(map(str, every)),
        scenes.references,
        lambda scorer: scorer.image_features([open_image(file) for file in scenes.files]),
        {"facts": [facts.to_dict() for facts in scenes.facts]},
        scorer,
    )
    return lambda captions, _, files: score(captions, [position[file] for file in files], every)


def _keeping_images(scorer: Any) -> Any:
    """The scorer, which encodes each image once."""
    keeps, rows = copy.copy(scorer), dict[bytes, Any]()

    def image_features(images: Sequence[Any]) -> Any:
        keys = [image.tobytes() for image in images]
        if new := {key: image for key, image in zip(keys, images, strict=True) if key not in rows}:
            rows.update(zip(new, scorer.image_features(list(new.values())), strict=True))
        return torch.stack([rows[key] for key in keys])

    keeps.image_features = image_features
    return keeps


def functions_of(names: Sequence[str], scenes: Scenes) -> dict[str, MetricFunction]:
    """The functions of metrics and rewards by name; those that need a scorer are audited with each of `SCORERS`."""
    scorers = {by: load_scorer(by, device="cpu") for by in SCORERS if set(names) & set(BY_SCORER)}
    facts = dict(zip(scenes.files, scenes.facts, strict=True))

    def function(name: str, scorer: Any = None) -> MetricFunction:
        if name.startswith("reward:"):
            return reward_metric(name.removeprefix("reward:"), scenes, scorer)
        if name.startswith("truth_"):
            return lambda captions, _, files: [
                truth_score(name, text, facts[file]) for text, file in zip(captions, files, strict=True)
            ]
        if name == "length":
            return lambda captions, references, files: [float(len(text.split())) for text in captions]
        return log_probs() if name == "perplexity" else metric_function(name, scorer=scorer, prefix="")

    functions: dict[str, MetricFunction] = {}
    for name in names:
        if name in BY_SCORER:
            functions |= {f"{name} ({by})": function(name, _keeping_images(one)) for by, one in scorers.items()}
        else:
            functions[name] = function(name)
    return functions


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
    rng, scores, alarms = np.random.default_rng(seed), np.stack([true, wrong]), 0
    shape = (2, _TESTED_IMAGES)
    for number in range(_EXPERIMENTS):
        scenes = rng.integers(true.shape[1], size=_TESTED_IMAGES)
        is_wrong = (rng.random(shape) < rate).astype(int)
        first, second = scores[is_wrong, rng.integers(len(true), size=shape), scenes]
        alarms += paired_test(first, second, num_resamples=199, seed=number)["p_value"] <= 0.05
    return _with_interval(alarms / _EXPERIMENTS, exact_interval(alarms, _EXPERIMENTS)) | {"n": _EXPERIMENTS}


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
    kinds: dict[str, list[str]] = {"sees": [], "does_not_see": [], "prefers_the_error": []}
    for kind, row in sensitivity.items():
        low, high = row["interval"]
        kinds["sees" if low > 0.5 else "prefers_the_error" if high < 0.5 else "does_not_see"].append(kind)
    return kinds


# --- All metrics on scenes -------------------------------------------------------------------------------------------


def audit(metrics: Mapping[str, MetricFunction], scenes: Scenes, seed: int = 0) -> dict[str, dict[str, Any]]:
    """[`probe`] of each metric, and its `cost`, the time per caption over that of CIDEr-D."""
    n, cider_d = len(scenes.files), metric_function("cider_d")
    names = dict.fromkeys(name for row in scenes.captions for name in row)
    applies = {name: np.array([name in row for row in scenes.captions]) for name in names}
    captions = {name: [row.get(name, row["true"]) for row in scenes.captions] for name in names}

    def seconds(function: MetricFunction, rows: slice) -> float:
        started = time.perf_counter()
        call_metric(function, "", captions["true"][rows], scenes.references[rows], scenes.files[rows])
        return time.perf_counter() - started

    # A metric that cannot be computed ends the audit before the first is computed.
    for function in (cider_d, *metrics.values()):
        seconds(function, slice(2))
    parts = [slice(*ends) for ends in itertools.pairwise(np.linspace(0, n, _TIMED_PARTS + 1).astype(int).tolist())]
    results = {}
    for label, function in metrics.items():
        # In turn, so that another program on the machine delays both.
        times, base = np.array([(seconds(function, part), seconds(cider_d, part)) for part in parts]).T
        scores = {
            name: np.array(call_metric(function, label, texts, scenes.references, scenes.files))
            for name, texts in captions.items()
        }
        ratio = bootstrap_interval(times, weights=base, seed=seed)
        cost = _with_interval(times.sum() / base.sum(), ratio) | {"seconds": float(times.sum()) / n}
        results[label] = probe(scores, applies, seed) | {"cost": cost}
        print(f"{label}: {len(names)} x {n} captions", file=sys.stderr)
    return results


def tables(result: Mapping[str, Any]) -> str:
    """The numbers as Markdown: in parentheses what is not seen, in bold where the error is preferred."""
    lines = []
    for style, title in (("short", "Short references"), ("full", "References with all facts")):
        metrics = result[style]["metrics"]
        kinds = list(next(iter(metrics.values()))["sensitivity"])
        lines += ["", f"| {title} | {' | '.join(kinds)} |", f"|:--|{'--:|' * len(kinds)}"]
        for name, row in metrics.items():
            marks = {**dict.fromkeys(row["does_not_see"], "({})"), **dict.fromkeys(row["prefers_the_error"], "**{}**")}
            shares = row["sensitivity"].items()
            cells = [marks.get(kind, "{}").format(f"{value['value']:.2f}") for kind, value in shares]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    changes = list(next(iter(metrics.values()))["invariance"])
    header = [*changes, "rises with facts", "bias to length", "wrong ranking", "false alarms", "time / CIDEr-D"]
    lines += ["", f"| Short references | {' | '.join(header)} |", f"|:--|{'--:|' * len(header)}"]
    for name, row in result["short"]["metrics"].items():
        ranked = next(case for case in row["misranked"] if (case["error_rates"], case["images"]) == ([0.1, 0.2], 200))
        numbers = [*row["invariance"].values(), row["monotonicity"], row["length_bias"], ranked, row["false_alarms"]]
        cells = ["–" if one["value"] is None else f"{one['value']:.2f}" for one in numbers]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['cost']['value']:.2g} |")
    return "\n".join(lines[1:])


def main(argv: Sequence[str] | None = None) -> None:
    """Run both audits: with short references, and with full ones for the metrics that read references."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--n", type=int, default=1000, help="scenes")
    arguments = parser.parse_args(argv)
    command = f"python reproduction/metric_audit.py --output {arguments.output}"
    result: dict[str, Any] = {"command": command, "versions": installed_versions()}
    for style, names in (("short", (*WITH_REFERENCES, *OTHERS)), ("full", WITH_REFERENCES)):
        with tempfile.TemporaryDirectory() as folder:
            scenes = draw_scenes(arguments.n, style, Path(folder))
            metrics = audit(functions_of(names, scenes), scenes)
        result[style] = {"n": arguments.n, "seed": 0, "references": style, "metrics": metrics}
    write_json(arguments.output, result)
    print(tables(result))


if __name__ == "__main__":
    main()
