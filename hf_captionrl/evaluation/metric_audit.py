"""What a metric of captions sees: probes on scenes, whose facts are exact, and on pairs of captions that users bring.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_captionrl.evaluation.metric_functions import MetricFunction, call_metric, metric_function
from hf_captionrl.metrics.bootstrap import bootstrap_interval, exact_interval, paired_test, proportion_interval
from hf_captionrl.scenes import Facts, check, full_caption, render_scene, sample_scene
from hf_captionrl.scenes.grammar import ANNOTATORS, Annotator, Words, annotate, article, write_sentence
from hf_captionrl.scenes.world import BACKGROUNDS, CATEGORIES, COLOURS, COUNTS, OPPOSITES, SIZES, category_of, choose
from hf_captionrl.utils.io import read_jsonl

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
        colours = {"colour": facts.second_colour, "second_colour": facts.colour}
        found["relation"] = replace(facts, relation=OPPOSITES[facts.relation])
        found["swapped objects"] = replace(facts, kind=second, second=kind, **colours)
        found["swapped colours"] = replace(facts, **colours)
    # Swapped colours may be equal, or natural and therefore true.
    return {name: wrong for name, wrong in found.items() if check(full_caption(wrong), facts).wrong}


def scene_captions(facts: Facts, rng: np.random.Generator) -> dict[str, str]:
    """All captions of one scene that are scored, by name; a name that does not apply to the scene is missing.

    `"true"` is the full caption. `"<kind>"` has one wrong fact, of the kinds of `KINDS`; `"negation, true"` is the true caption
    beside the wrong `"negation"`. `"<invariance>"` and `"longer <k>"` have the facts of the true caption in other or more words,
    `"facts <k>"` some of its facts. `"background, early"` and `"wrong, reworded"` are wrong captions in other wordings.
    """
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

    files: Sequence[Path | None]
    references: Sequence[Sequence[str]]
    facts: Sequence[Facts] | None = None


OWN_METRICS: dict[str, str] = {
    "truth_precision": "right claims over claims, by the truth checker of scenes",
    "truth_recall": "stated facts over facts, by the truth checker of scenes",
    "truth_f1": "the harmonic mean of both",
    "length": "words",
    "perplexity": "mean log-probability of a token under --language_model",
}
"""Metrics of the audit by name, in addition to those of `metric_functions`; `reward:NAME` is a registered reward."""


def truth_scores(caption: str, facts: Facts) -> dict[str, float]:
    """Precision, recall and their harmonic mean by the truth checker."""
    # The checker reads no negation: what follows "without" is judged alone, and reversed.
    said, _, denied = caption.partition(" without ")
    found = check(said, facts)
    right, wrong = len(found.right), len(found.wrong)
    if denied:
        is_there = any(claim.attribute in ("kind", "second") for claim in check(denied, facts).right)
        right, wrong = right + (not is_there), wrong + is_there
    precision = right / max(right + wrong, 1)
    recall = len(found.recalled) / max(len(found.recalled) + len(found.missed), 1)
    return {
        "truth_precision": precision,
        "truth_recall": recall,
        "truth_f1": 2 * precision * recall / max(precision + recall, 1e-12),
    }


def _keeping_images(scorer: Any) -> Any:
    """The scorer, which encodes each image once."""
    import torch

    keeps, kept = copy.copy(scorer), {}  # type: ignore[var-annotated]

    def image_features(images: Sequence[Any]) -> Any:
        keys = [image.tobytes() for image in images]
        new = {key: image for key, image in zip(keys, images, strict=True) if key not in kept}
        kept.update(zip(new, scorer.image_features(list(new.values())), strict=True))
        return torch.stack([kept[key] for key in keys])

    keeps.image_features = image_features
    return keeps


def reward_metric(reward: Any, images: AuditImages, scorer: Any = None) -> MetricFunction:
    """A reward as a metric: one caption per image, and all images of the audit as the rollout, whose others are distractors.

    Args:
        reward: A registered name, a [`Reward`], or a function with TRL's signature.
        images: The images; the rollout has a column `facts` where these are known.
        scorer: The trainer's scorer, for rewards that have none.
    """
    import torch

    from hf_captionrl.data.images import open_image
    from hf_captionrl.rewards.base import RewardContext, RewardData, resolve_rewards
    from hf_captionrl.text.tokenize import ptb_tokenize

    rewards, words = resolve_rewards(reward), {}  # type: ignore[var-annotated]
    rows = {file: row for row, file in reversed(list(enumerate(images.files)))}  # the first row of each file
    distinct = sorted(rows.values())
    position = {row: at for at, row in enumerate(distinct)}
    columns = {} if images.facts is None else {"facts": [images.facts[row].to_dict() for row in distinct]}

    def encode(captions: Sequence[str]) -> tuple[Any, Any]:
        """Words as tokens; 0 is the end token."""
        ids = [[*(words.setdefault(w, len(words) + 1) for w in ptb_tokenize(text)), 0] for text in captions]
        width = max(map(len, ids))
        return (
            torch.tensor([row + [0] * (width - len(row)) for row in ids]),
            torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in ids]),
        )

    def features(scorer: Any) -> Any:
        return scorer.image_features([open_image(images.files[row]) for row in distinct])

    names, references = [str(at) for at in position.values()], [list(images.references[row]) for row in distinct]
    device = getattr(scorer, "device", torch.device("cpu"))
    data = RewardData(names, references, features, encode, 0, device, scorer=scorer, columns=list(columns))
    rewards.prepare(data)

    def scores(candidates: Sequence[str], _: Any, files: Sequence[Any]) -> list[float]:
        ids, mask = encode(candidates)
        at = [position[rows[file]] for file in files]
        context = RewardContext(
            captions=list(candidates),
            ids=ids,
            mask=mask,
            ended=torch.ones(len(ids), dtype=torch.bool),
            rows=torch.tensor(at),
            image_ids=[names[i] for i in at],
            references=[references[i] for i in at],
            candidates=torch.arange(len(distinct)),
            positions=torch.tensor(at),
            columns={name: [values[i] for i in at] for name, values in columns.items()},
        )
        return rewards(context).sum(1).tolist()

    return scores


def audited_function(audited: AuditedMetric, images: AuditImages) -> MetricFunction:
    """The function of a metric on some images.

    Raises:
        ValueError: If there is no such metric, or it needs a scorer or facts that are not there.
    """
    metric, scorer = audited.metric, audited.scorer
    if scorer is not None:
        scorer = _keeping_images(scorer)
    if metric == "length":
        return lambda candidates, references, files: [float(len(text.split())) for text in candidates]
    if metric == "perplexity":
        return lambda candidates, references, files: _log_probs(candidates, *audited.language_model)
    if metric in OWN_METRICS:
        if images.facts is None:
            raise ValueError(f"{metric} knows the facts of scenes only. Leave it out, or use no --pairs.")
        facts = dict(zip(images.files, images.facts, strict=True))
        return lambda candidates, references, files: [
            truth_scores(text, facts[file])[metric] for text, file in zip(candidates, files, strict=True)
        ]
    if isinstance(metric, str) and metric.startswith("reward:"):
        metric = metric.removeprefix("reward:")
    elif isinstance(metric, str):
        return metric_function(metric, scorer=scorer, prefix=audited.prefix)
    elif not hasattr(metric, "prepare"):
        return metric  # type: ignore[no-any-return]
    return reward_metric(metric, images, scorer)


def _log_probs(captions: Sequence[str], model: Any, tokenizer: Any) -> list[float]:
    from hf_captionrl.metrics.perplexity import caption_losses

    losses = caption_losses(list(captions), model, tokenizer)
    return (-losses.nats / losses.tokens.clamp(min=1)).tolist()


# --- The probes of one metric ----------------------------------------------------------------------------------------

ERROR_RATES = ((0.1, 0.15), (0.1, 0.2), (0.1, 0.4))
"""Shares of wrong captions of two captioners, the better one first."""
SAMPLE_SIZES = (50, 200, 1000)
"""Images on which they are compared."""
_LEVEL = 0.05
_EXPERIMENTS = 400
_TESTED_IMAGES = 100
_TIMED_PARTS = 8


@dataclass
class _Probes:
    """Scores of one metric and the numbers made of them; `scores` has n numbers by the name of the captions."""

    scores: Mapping[str, np.ndarray]
    applies: Mapping[str, np.ndarray]  # n truth values: whether the scene has such a caption
    seed: int
    tolerance: float = field(init=False)

    def __post_init__(self) -> None:
        # Sums in another order are ties; models compute in fp32, whose rounding has either sign.
        self.tolerance = 1e-9 * max(float(np.abs(values).max()) for values in self.scores.values())

    def signs(self, above: str, below: str) -> np.ndarray:
        """1 where the first caption scores higher, 0 at a tie, -1 elsewhere."""
        difference = self.scores[above] - self.scores[below]
        return np.sign(np.where(np.abs(difference) <= self.tolerance, 0, difference))

    def mean(self, values: np.ndarray, is_share: bool = False) -> dict[str, Any]:
        function: Any = proportion_interval if is_share else bootstrap_interval
        interval = function(values, seed=self.seed)
        return {"value": float(values.mean()), "interval": list(interval), "n": len(values)}

    def sensitivity(self, kind: str, true: str = "true") -> dict[str, Any]:
        signs = self.signs(true, kind)[self.applies[kind]]
        return preference(signs, seed=self.seed)

    def invariance(self, name: str) -> dict[str, Any]:
        change = (self.scores[name] - self.scores["true"])[self.applies[name]]
        change = np.where(np.abs(change) <= self.tolerance, 0, change)
        spread = float(self.scores["true"].std())
        if not change.any():
            return self.mean(change)
        if spread <= self.tolerance:
            return {"value": None, "n": len(change), "reason": "true captions have equal scores"}
        return self.mean(change / spread)

    def trend(self, names: Sequence[str]) -> np.ndarray:
        """Kendall's tau-a of the scores of each scene with the order of the names."""
        return np.mean([self.signs(b, a) for a, b in itertools.combinations(names, 2)], axis=0)

    def misranked(self, rates: tuple[float, float], images: int) -> dict[str, Any]:
        """Probability that the worse of two captioners gets the higher mean, with an interval over scenes.

        Each writes a wrong caption with its rate, in one of two wordings. Mean and variance of the difference of a scene are
        enumerated; the sum over images is taken as normal.
        """
        true, wrong = self.wordings("true", "paraphrase"), self.wordings("wrong", "wrong, reworded")
        moments = [
            [(1 - rate) * (true**power).mean(0) + rate * (wrong**power).mean(0) for power in (1, 2)] for rate in rates
        ]
        (better, square), (worse, other) = moments
        n = len(better)
        draws = np.random.default_rng(self.seed).multinomial(n, np.full(n, 1 / n), size=1000)
        weights = np.concatenate([np.ones((1, n)), draws]) / n  # (1 + R, n)
        first = weights @ (better - worse)
        variance = np.maximum(weights @ (square + other - 2 * better * worse) - first**2, 0)
        first = np.where(np.abs(first) <= self.tolerance, 0, first)
        z = np.divide(first * math.sqrt(images), np.sqrt(variance), out=np.sign(first) * 40, where=variance > 0)
        shares = np.array([math.erfc(value / math.sqrt(2)) / 2 for value in z])
        interval = np.percentile(shares[1:], [2.5, 97.5]).tolist()
        return {"error_rates": list(rates), "images": images, "value": float(shares[0]), "interval": interval}

    def wordings(self, *names: str) -> np.ndarray:
        """Scores `(2, n)` of two wordings; the first one where there is no second."""
        first, second = (self.scores[name] for name in names)
        return np.stack([first, np.where(self.applies[names[1]], second, first)])

    def false_alarms(self) -> dict[str, Any]:
        """How often a paired test at 5 % separates two captioners of the same error rate."""
        rng = np.random.default_rng(self.seed)
        scores = np.stack([self.wordings("true", "paraphrase"), self.wordings("wrong", "wrong, reworded")])
        shape, found = (2, _TESTED_IMAGES), 0
        for _ in range(_EXPERIMENTS):
            scenes = rng.integers(scores.shape[2], size=_TESTED_IMAGES)
            is_wrong = (rng.random(shape) < ERROR_RATES[0][0]).astype(int)
            first, second = scores[is_wrong, rng.integers(2, size=shape), scenes]
            found += paired_test(first, second, num_resamples=199, seed=self.seed)["p_value"] <= _LEVEL
        interval = list(exact_interval(found, _EXPERIMENTS))
        return {"value": found / _EXPERIMENTS, "interval": interval, "level": _LEVEL, "n": _EXPERIMENTS}

    def results(self) -> dict[str, Any]:
        true = self.scores["true"]
        sensitivity = {kind: self.sensitivity(kind) for kind in KINDS if kind != "negation"}
        sensitivity["negation"] = self.sensitivity("negation", "negation, true")
        early = self.signs("word order", "background, early") - self.signs("true", "background")
        longer = ["true", "padding", "longer 1", "longer 2"]
        steps = [f"facts {level}" for level in range(_LEVELS)] + ["true"]
        upward = np.mean([self.signs(b, a) / 2 + 0.5 for a, b in itertools.pairwise(steps)], axis=0)
        return {
            "is_constant": bool(np.ptp(np.stack([*self.scores.values()])) <= self.tolerance),
            "mean": float(true.mean()),
            "standard_deviation": float(true.std()),
            "identical": self.sensitivity("identical"),
            "sensitivity": sensitivity,
            "invariance": {name: self.invariance(name) for name in INVARIANCES},
            "monotonicity": self.mean(upward, is_share=True),
            "length_bias": self.mean(self.trend(longer)),
            "position_bias": self.mean(early / 2),
            "misranked": [self.misranked(rates, size) for rates in ERROR_RATES for size in SAMPLE_SIZES],
            "false_alarms": self.false_alarms(),
            **verdict(sensitivity),
        }


def preference(signs: np.ndarray, groups: Sequence[Any] | None = None, seed: int = 0) -> dict[str, Any]:
    """Share of pairs whose better caption scores higher, ties 0.5, from signs `(N,)`; intervals resample whole groups."""
    shares = signs / 2 + 0.5
    interval = proportion_interval(shares, groups=groups, seed=seed)
    return {
        "value": float(shares.mean()),
        "interval": list(interval),
        "ties": float((signs == 0).mean()),
        "n": len(signs),
    }


def verdict(sensitivity: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Kinds of errors that a metric sees, does not see (the interval contains 0.5), and rewards (it lies below)."""
    found: dict[str, list[str]] = {"sees": [], "does_not_see": [], "prefers_the_error": []}
    for kind, row in sensitivity.items():
        low, high = row["interval"]
        found["sees" if low > 0.5 else "prefers_the_error" if high < 0.5 else "does_not_see"].append(kind)
    return found


# --- All metrics on scenes, and on pairs of users --------------------------------------------------------------------


def audit_on_scenes(
    metrics: Sequence[AuditedMetric],
    *,
    n: int = 500,
    seed: int = 0,
    references: str = "short",
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, Any]]:
    """The probes of each metric on n scenes that are drawn by seed.

    Args:
        metrics: The metrics, under different names.
        n: Number of scenes, at least 50; no two have the same facts.
        seed: Seed of scenes, captions and resamples.
        references: `"short"` or `"full"`, see [`scene_references`].
        progress: Called with a line per metric.
    Returns:
        `dict` by name of the metric: `sensitivity` by kind (`value`, `interval`, `ties`, `n`), `identical` (the same caption
        twice), `invariance` (mean change in standard deviations over true captions), `monotonicity` (share of steps upward from few
        to all facts), `length_bias` (Kendall's tau of words and score), `position_bias` (sensitivity at the beginning minus at the
        end), `misranked`, `false_alarms`, `cost` (time per caption over that of CIDEr-D), and the verdict.
    """
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
        everything = [AuditedMetric("", "cider_d"), *metrics]
        functions = [audited_function(audited, images) for audited in everything]

        def score(number: int, texts: Sequence[str], rows: slice = slice(None)) -> list[float]:
            given = texts[rows], images.references[rows], images.files[rows]
            return call_metric(functions[number], everything[number].name, *given)

        for number in range(len(everything)):  # a metric that cannot be computed is named before the first is computed
            score(number, captions["true"], slice(2))
        edges = np.linspace(0, n, _TIMED_PARTS + 1).astype(int).tolist()
        parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        of_cider: np.ndarray = np.zeros(0)
        for number, audited in enumerate(everything):
            seconds = []
            for part in parts:
                started = time.perf_counter()
                score(number, captions["true"], part)
                seconds.append(time.perf_counter() - started)
            if not number:
                of_cider = np.array(seconds)
                continue
            scores = {name: np.array(score(number, texts)) for name, texts in captions.items()}
            ratio = bootstrap_interval(seconds, weights=of_cider, seed=seed)
            cost = {"value": sum(seconds) / float(of_cider.sum()), "interval": list(ratio), "seconds": sum(seconds) / n}
            found[audited.name] = _Probes(scores, applies, seed).results() | {"cost": cost}
            progress(f"{audited.name}: {len(names)} x {n} captions")
    return found


def read_pairs(path: Path) -> list[dict[str, Any]]:
    """Pairs of captions from JSON Lines: `better`, `worse`, and optionally `image` (relative to the file), `references`, `kind`.

    Raises:
        ValueError: With the number of the line that is not such a pair.
        FileNotFoundError: If an image is missing.
    """
    pairs = []
    for number, row in read_jsonl(path):
        line = f"Line {number} of {path.name}"
        texts = [row.get(key) for key in ("better", "worse")] if isinstance(row, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{line} has no captions 'better' and 'worse'. Use an object with both as strings.")
        references, image = row.get("references", []), row.get("image")
        if not isinstance(references, list) or not all(isinstance(text, str) for text in references):
            raise ValueError(f"{line}: references is {references!r:.60}. Use a list of strings.")
        file = None if image is None else path.parent / str(image)
        if file is not None and not file.is_file():
            raise FileNotFoundError(f"{line}: there is no image {str(image)!r}. Use a path relative to the file.")
        kind = str(row.get("kind", "all"))
        pairs.append({"better": texts[0], "worse": texts[1], "references": references, "image": file, "kind": kind})
    if not pairs:
        raise ValueError(f"{path.name} has no pairs. Write one JSON object per line.")
    return pairs


def audit_on_pairs(
    metrics: Sequence[AuditedMetric], pairs: Sequence[Mapping[str, Any]], *, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Sensitivity and verdict of each metric on pairs of [`read_pairs`], by kind; intervals resample images."""
    images = AuditImages([pair["image"] for pair in pairs], [pair["references"] for pair in pairs])
    groups = [str(row if pair["image"] is None else pair["image"]) for row, pair in enumerate(pairs)]
    found = {}
    for audited in metrics:
        function = audited_function(audited, images)
        better, worse = (
            np.array(call_metric(function, audited.name, [pair[key] for pair in pairs], images.references, images.files))
            for key in ("better", "worse")
        )
        difference = better - worse
        signs = np.sign(np.where(np.abs(difference) <= 1e-9 * max(np.abs([better, worse]).max(), 0), 0, difference))
        of_kind = {}
        for kind in dict.fromkeys(pair["kind"] for pair in pairs):
            at = [row for row, pair in enumerate(pairs) if pair["kind"] == kind]
            of_kind[kind] = preference(signs[at], [groups[row] for row in at], seed)
        found[audited.name] = {"sensitivity": of_kind, **verdict(of_kind)}
    return found
