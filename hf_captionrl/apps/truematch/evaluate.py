"""`captionrl truematch evaluate`: evaluate captioners on a benchmark of similar images."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_captionrl.apps.truematch.build import bag_id, bags_fingerprint, load_truematch, print_status
from hf_captionrl.apps.truematch.options import EvaluateOptions
from hf_captionrl.data.benchmarks import load_imagecode
from hf_captionrl.data.images import open_image
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.caption_files import read_files, source_names
from hf_captionrl.evaluation.evaluator import Evaluator, Source, compare_with_first, human_captions, source_row
from hf_captionrl.evaluation.options import load_evaluators
from hf_captionrl.metrics import self_retrieval
from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.columns import SUITES, bag_column, table_columns
from hf_captionrl.metrics.suites import bag_keys
from hf_captionrl.metrics.table import Section, comparison_markdown, installed_versions, print_comparison
from hf_captionrl.utils.io import atomic_write_text, to_plain, write_json

# Metrics beside the recall in bags: recall among random distractors, and faithfulness of the captions.
COLUMNS = ("rd100_recall_at_1", "cider_d", "ndlb_clip_score", "hallucination", "fact_recall")
RESULTS_FORMAT = "truematch-results-1"  # `format` in results.json


def _scorer(arguments: EvaluateOptions, source: str) -> Any:
    """The scorer of the options, or the default for the data."""
    scorer, _, reasons = load_evaluators(source, arguments.scorer, "none")
    if scorer is None:
        why = reasons.get("no scorer", "--scorer is 'none'")
        raise ValueError(f"Retrieval needs a scorer, but {why}. Use another --scorer.")
    return scorer


def _evaluate_imagecode(arguments: EvaluateOptions) -> None:
    """R@1 of captions among ImageCoDe's ten images: all sets, photographs, frames of videos."""
    import torch

    if not arguments.captions:
        raise ValueError("ImageCoDe ranks captions. Use --captions, from `captionrl caption --dataset imagecode`.")
    names = source_names(arguments.captions, arguments.names)
    sets = load_imagecode(arguments.folder / "valid_data.json", arguments.folder / "image-sets")
    ids = [sets.image_ids[row] for row in sets.targets]
    files = read_files(arguments.captions, names)
    texts = [[group[0] for group in file.aligned(ids, set(ids))] for file in files]
    scorer = _scorer(arguments, "")
    images = torch.cat([scorer.image_features([open_image(path)]) for path in sets.paths])
    rows = []
    for name, captions in zip(names, texts, strict=True):
        features = scorer.text_features(spoken(captions))
        row: dict[str, Any] = {"name": name}
        for kind, is_video in (("all", None), ("static", False), ("video", True)):
            at = [n for n, video in enumerate(sets.is_video) if is_video in (None, video)]
            if at:
                targets, candidates = [sets.targets[n] for n in at], [sets.sets[n] for n in at]
                recall = self_retrieval(features[at], images, targets=targets, sets=candidates, ks=(1,))
                row[f"recall_at_1_{kind}"] = recall["recall_at_1"]
        rows.append(row)
    result = {"benchmark": "imagecode", "descriptions": len(ids), "scorer": scorer.signature, "rows": rows}
    path = write_json((arguments.output_dir or Path("outputs") / "imagecode") / "results.json", to_plain(result))
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    for row in rows:
        print(", ".join(f"{key}: {value if key == 'name' else format(value, '.3f')}" for key, value in row.items()))
    print(f"Written to {path}")


def evaluate(arguments: EvaluateOptions) -> None:
    """Evaluate captioners on the benchmark; writes results.json and results.md."""
    if (arguments.folder / "valid_data.json").is_file():
        _evaluate_imagecode(arguments)
        return
    benchmark = load_truematch(arguments.folder)
    bags = benchmark.kept
    output_dir = arguments.output_dir or Path("outputs") / benchmark.folder.resolve().name

    if not arguments.captions and not arguments.references:
        raise ValueError("There is nothing to evaluate. Use --captions or --references.")
    files = read_files(arguments.captions, source_names(arguments.captions, arguments.names))
    images = arguments if arguments.dataset else replace(arguments, dataset=benchmark.images, split="test")
    split = load_split(images, quarantine_path=output_dir / "quarantine.jsonl")
    ids = [str(i) for i in split.dataset["image_id"][:]]
    rows_of = bags.rows(ids)  # fails on missing images before any model is loaded
    aligned = [file.aligned(ids, split.all_ids) for file in files]

    held_out = _scorer(arguments, benchmark.manifest["source"])
    evaluator = Evaluator(split.dataset, held_out, None, seed=arguments.seed, cache_dir=arguments.cache_dir)
    evaluator.bags = rows_of
    sources = [Source(f.name, c, evaluator.references) for f, c in zip(files, aligned, strict=True)]
    if arguments.references:
        human = human_captions(evaluator)
        if human is None:
            raise ValueError("--references needs at least two references per image. Leave it out.")
        sources.append(human)
    columns = [*map(bag_column, sorted(rows_of)), *table_columns(*COLUMNS)]
    computed = [*dict.fromkeys((*SUITES["ndlb"], *bag_keys(rows_of)))]
    rows = [source_row(source, evaluator, computed) for source in sources]
    signatures = rows[0]["signatures"]
    compare_with_first(rows, seed=arguments.seed)
    # Hit or miss per caption, with the id of its bag or image, so that results can be paired.
    groups_of = {
        f"bag_{size}_recall_at_1": [bag_id([ids[row] for row in bag]) for bag in group]
        for size, group in rows_of.items()
    }
    groups_of["rd100_recall_at_1"] = ids

    def hits(row: Mapping[str, Any], key: str) -> dict[str, Any]:
        return {"values": row["per_sample"][key], "groups": [groups_of[key][number] for number in row["groups"][key]]}

    keys = tuple(column.key for column in columns)
    shown = [{"name": row["name"], **{k: v for k, v in row.items() if k.startswith(keys)}} for row in rows]
    result: dict[str, Any] = {
        "format": RESULTS_FORMAT,
        "benchmark": benchmark.manifest["card"]["dataset_id"],
        "fingerprint": bags_fingerprint(bags),
        "bags": {str(size): len(group) for size, group in rows_of.items()},
        "review": benchmark.status(),
        "num_images": len(ids),
        "scorer": held_out.signature,
        "scorer_made_the_bags": held_out.signature == bags.signature,
        "rows": shown,
        "hits": {row["name"]: {key: hits(row, key) for key in groups_of if row.get(key) is not None} for row in rows},
        "signatures": {column.key: signatures[column.key] for column in columns if column.key in signatures},
        "seed": arguments.seed,
        "versions": installed_versions(),
    }
    section = Section(f"{result['benchmark']}, judged by {held_out.signature.partition('|')[0]}", columns, shown)
    title = f"{', '.join(f'{n} bags of {size}' for size, n in result['bags'].items())}; {len(ids)} images"
    atomic_write_text(output_dir / "results.md", comparison_markdown([section], title=title))
    write_json(output_dir / "results.json", result)
    if result["scorer_made_the_bags"]:
        print(
            "captionrl truematch: the bags were built with the scorer that evaluates, so they are harder for it than for "
            "others. Use another --scorer.",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    print_status(benchmark)
    print_comparison([section])
    print(f"Written to {output_dir}: results.json, results.md")
