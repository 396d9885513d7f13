"""Measure Visual Caption Boosting on the embedded world: faithfulness by the truth checker, retrieval by the held-out
scorer.

    python scripts/boosting_quality.py --output docs/results/boosting_quality.json

For each seed, the whole pipeline runs on a different test split with the rule-based backends, at the default error rate
of the describer and at two others. Intervals are 95 % percentile bootstrap intervals over the images of all seeds.
`--picture docs/images/boosting_lengths.png` draws Figure 4, too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import AutoTokenizer

from hf_captionrl.apps.boosting import (
    SceneDescriber,
    SceneWriter,
    boost_shard,
    boosted_rows,
    scene_conflicts,
    source_statistics,
    text_conflicts,
    write_boosted_captions,
    write_source_histogram,
)
from hf_captionrl.data import open_image
from hf_captionrl.metrics.bootstrap import bootstrap_interval
from hf_captionrl.metrics.caption_faithfulness import faithfulness
from hf_captionrl.metrics.clip_scores import clip_score
from hf_captionrl.metrics.recall import self_retrieval
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, check, load_scenes
from hf_captionrl.utils.io import write_json
from hf_captionrl.utils.model_files import model_path

SOURCES = ("references", "BlendCap", "VisualCap", "HolisticCap")
ERROR_RATES = (0.10, 0.15, 0.20)
DEFAULT_RATE = 0.15
CLIP_SCORE = "clip_score"


def boosted(seed: int, error_rate: float, num_test: int) -> datasets.Dataset:
    """Boost the test split of a seed."""
    scenes = load_scenes(seed=seed, num_train=0, num_validation=0, num_test=num_test)["test"]
    facts = dict(zip(scenes["image_id"][:], scenes["facts"][:], strict=True))
    backends: dict[str, Any] = {
        "text": SceneWriter(),
        "vision": SceneDescriber(facts, error_rate=error_rate, seed=seed),
    }
    with tempfile.TemporaryDirectory() as folder:
        boost_shard(scenes, folder, **backends)
        found = boosted_rows(scenes, folder, exact_facts=True, **backends)
        report = write_boosted_captions(scenes, folder, found)
        return datasets.Dataset.from_parquet(str(report.path), cache_dir=folder, keep_in_memory=True)


def captions_of(rows: datasets.Dataset) -> dict[str, list[list[str]]]:
    """Captions of each image, by source."""
    columns = dict(zip(SOURCES[1:], ("blend_caption", "visual_caption", "holistic_caption"), strict=True))
    found: dict[str, list[list[str]]] = {"references": rows["references"][:]}
    return found | {name: [[text] for text in rows[column][:]] for name, column in columns.items()}


def claim_numbers(captions: Sequence[Sequence[str]], facts: Sequence[Any]) -> dict[str, np.ndarray]:
    """Correct and wrong claims, recalled and missed facts, summed over the captions of each image.

    Returns vectors of shape `(M,)`.
    """
    flat = [(text, truth) for texts, truth in zip(captions, facts, strict=True) for text in texts]
    numbers = faithfulness([text for text, _ in flat], [truth for _, truth in flat], check)["per_sample"]
    owner: np.ndarray = np.repeat(np.arange(len(captions)), [len(texts) for texts in captions])
    return {name: np.bincount(owner, values, minlength=len(captions)) for name, values in numbers.items()}


def ratio(values: Any, weights: Any = None) -> dict[str, Any]:
    """A ratio of sums, or a mean, with its interval.

    `values` and `weights` are `(M,)`; `weights` None: 1 each.
    """
    low, high = bootstrap_interval(values, weights=weights)
    total = len(values) if weights is None else np.sum(weights)
    return {"value": float(np.sum(values) / total), "interval": [low, high]}


def retrieval_numbers(rows: datasets.Dataset, scorer: Any) -> dict[str, dict[str, np.ndarray]]:
    """Success rate and CLIPScore of each image's captions, by source and setting; vectors of shape (M,)."""
    images = scorer.image_features([open_image(image) for image in rows["image"]])
    pools = {"rd100": None} | {f"bags_{size}": bags(rows["bag_id"][:], size) for size in BAG_SIZES}
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, captions in captions_of(rows).items():
        owner: np.ndarray = np.repeat(np.arange(len(captions)), [len(texts) for texts in captions])
        texts = scorer.text_features([text for group in captions for text in group])
        scores = clip_score(texts, images[owner], preset="ndlb")["per_sample"]
        found[name] = {CLIP_SCORE: np.bincount(owner, scores) / np.bincount(owner)}
        for pool, of_size in pools.items():
            options: dict[str, Any] = {"num_distractors": 99} if of_size is None else {"bags": of_size}
            result = self_retrieval(texts, images, targets=owner, ks=(1,), num_bootstrap=0, **options)
            image = owner[np.asarray(result["captions"])]
            hits = np.bincount(image, np.asarray(result["recall_at_1_per_sample"]), minlength=len(captions))
            times = np.bincount(image, minlength=len(captions))
            found[name][pool] = hits[times > 0] / times[times > 0]
    return found


def conflict_numbers(rows: datasets.Dataset, source: str) -> dict[str, int]:
    """How often a caption contradicts its BlendCap, by the truth checker, by the word lists, and by both."""
    counts = {"exact": 0, "by_words": 0, "both": 0, "captions": len(rows)}
    for blend, other, facts in zip(rows["blend_caption"], rows[source], rows["facts"], strict=True):
        exact, words = bool(scene_conflicts(blend, other, facts)), bool(text_conflicts(blend, other))
        counts["exact"] += exact
        counts["by_words"] += words
        counts["both"] += exact and words
    return counts


def _joined(parts: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _claims_section(runs: Sequence[datasets.Dataset]) -> dict[str, Any]:
    """The truth checker's results over all seeds."""
    numbers: dict[str, dict[str, np.ndarray]] = {}
    per_seed: dict[str, list[float]] = {"wrong_ratio": [], "recall_gain": []}
    each = [{name: claim_numbers(texts, run["facts"][:]) for name, texts in captions_of(run).items()} for run in runs]
    for name in SOURCES:
        numbers[name] = _joined([part[name] for part in each])
    section: dict[str, Any] = {}
    for name, n in numbers.items():
        captions = 5 if name == "references" else 1
        section[name] = {
            "fact_recall": ratio(n["recalled"], n["recalled"] + n["missed"]),
            "hallucination": ratio(n["wrong"], n["right"] + n["wrong"]),
            "wrong_claims_per_caption": ratio(n["wrong"] / captions),
        }
    for part in each:
        blend, visual, holistic = (part[name] for name in SOURCES[1:])
        per_seed["wrong_ratio"].append(float(holistic["wrong"].sum() / visual["wrong"].sum()))
        facts = (blend["recalled"] + blend["missed"]).sum()
        per_seed["recall_gain"].append(float((holistic["recalled"] - blend["recalled"]).sum() / facts))
    blend, visual, holistic = (numbers[name] for name in SOURCES[1:])
    section["holistic_wrong_over_visual_wrong"] = ratio(holistic["wrong"], visual["wrong"]) | {
        "by_seed": per_seed["wrong_ratio"]
    }
    section["holistic_recall_minus_blend_recall"] = ratio(
        holistic["recalled"] - blend["recalled"], blend["recalled"] + blend["missed"]
    ) | {"by_seed": per_seed["recall_gain"]}
    return section


def _cell(number: dict[str, Any], digits: int = 3) -> str:
    low, high = number["interval"]
    return f"{number['value']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def to_markdown(result: dict[str, Any]) -> str:
    """The full table, of which docs/boosting.md shows some columns."""
    claims = {
        "fact_recall": "Fact recall ↑",
        "hallucination": "Hallucination ↓",
        "wrong_claims_per_caption": "Wrong claims per caption ↓",
    }
    pools = {"rd100": "R@1 RD100 ↑"} | {f"bags_{size}": f"R@1 bags of {size} ↑" for size in BAG_SIZES}
    heads = ["", *claims.values(), "ClipSc ↑", *pools.values()]
    lines = ["| " + " | ".join(heads) + " |", "|:--" + "|--:" * (len(heads) - 1) + "|"]
    for name in SOURCES:
        cells = [_cell(result["claims"][name][key]) for key in claims] + [_cell(result[CLIP_SCORE][name], 1)]
        cells += [_cell(result["recall_at_1"][name][pool]) for pool in pools]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/boosting_quality.json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_test", type=int, default=1000)
    parser.add_argument(
        "--scorer", default="scenes:siglip-held-out", help="held-out scorer, whose tokenizer counts the tokens"
    )
    parser.add_argument("--picture", type=Path, help="PNG file for the plot of the lengths")
    arguments = parser.parse_args(argv)
    runs = {rate: [boosted(seed, rate, arguments.num_test) for seed in arguments.seeds] for rate in ERROR_RATES}
    result: dict[str, Any] = {
        "command": f"python scripts/boosting_quality.py --seeds {' '.join(map(str, arguments.seeds))}"
        f" --output {arguments.output}",
        "seeds": arguments.seeds,
        "scenes_per_seed": arguments.num_test,
        "scorer": arguments.scorer,
        "error_rate": DEFAULT_RATE,
        "claims": _claims_section(runs[DEFAULT_RATE]),
    }
    sweep = {}
    for rate in ERROR_RATES:
        section = _claims_section(runs[rate])
        keys = ("holistic_wrong_over_visual_wrong", "holistic_recall_minus_blend_recall")
        sweep[str(rate)] = {key: section[key] for key in keys} | {
            "visual_hallucination": section["VisualCap"]["hallucination"],
            "holistic_hallucination": section["HolisticCap"]["hallucination"],
        }
    result["error_rates"] = sweep
    scorer = load_scorer(model_path(arguments.scorer))
    each = [retrieval_numbers(run, scorer) for run in runs[DEFAULT_RATE]]
    hits = {name: _joined([part[name] for part in each]) for name in SOURCES}
    result[CLIP_SCORE] = {name: ratio(hits[name].pop(CLIP_SCORE)) for name in SOURCES}
    result["recall_at_1"] = {name: {pool: ratio(values) for pool, values in of.items()} for name, of in hits.items()}
    result["recall_at_1_by_seed"] = {
        name: {pool: [float(part[name][pool].mean()) for part in each] for pool in hits[name]} for name in SOURCES
    }
    steps = (("references", "BlendCap"), ("BlendCap", "HolisticCap"), ("VisualCap", "HolisticCap"))
    result["recall_at_1_gains"] = {
        f"{after} - {before}": {pool: ratio(hits[after][pool] - hits[before][pool]) for pool in hits[after]}
        for before, after in steps
    }
    result["conflicts_with_blend_cap"] = {
        name: [conflict_numbers(run, column) for run in runs[DEFAULT_RATE]]
        for name, column in (("HolisticCap", "holistic_caption"), ("VisualCap", "visual_caption"))
    }
    sources = {
        name: [text for run in runs[DEFAULT_RATE] for group in captions_of(run)[name] for text in group]
        for name in SOURCES
    }
    tokenizer = AutoTokenizer.from_pretrained(model_path(arguments.scorer), trust_remote_code=False)
    result["statistics"] = source_statistics(
        sources, count_tokens=lambda texts: [len(ids) for ids in tokenizer(texts)["input_ids"]]
    )
    if arguments.picture is not None:
        write_source_histogram(arguments.picture, sources)
    return write_json(arguments.output, result)


if __name__ == "__main__":
    main()
