"""`captionrl agreement`: how well metrics agree with human ratings of captions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from hf_captionrl.cli.options import JudgeOptions
from hf_captionrl.evaluation.metric_functions import JUDGE_METRICS, SCORER_METRICS, TEXT_METRICS
from hf_captionrl.utils.io import installed_versions, write_json
from hf_captionrl.utils.options import CommandOptions, DeviceOptions, NotNegative, SeedOptions, option

_PUBLISHED_SCORER = "openai/clip-vit-base-patch32"


@dataclass
class AgreementOptions(JudgeOptions, SeedOptions, DeviceOptions, CommandOptions):
    """Agreement of metrics with people, with intervals over images, beside published numbers.

    Kendall's tau with ratings, or accuracy on pairs of captions (pascal50s and foil). The annotations and captions of a
    benchmark are read from --data_root, as their authors publish them.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl agreement --benchmark flickr8k-expert --data_root Flickr8k_text --metrics bleu_4 meteor cider_d
          captionrl agreement --benchmark flickr8k-expert --data_root Flickr8k --metrics cider_d clip_score \\
              --scorer openai/clip-vit-base-patch32 --image_dir Flickr8k/images
          captionrl agreement --benchmark pascal50s --data_root pyCIDErConsensus --metrics cider_d mine:score evaluate:mine.py
          captionrl agreement --benchmark flickr8k-cf --data_root Flickr8k_text --metrics cider_d --command "python mine.py"
    """

    benchmark: Literal["flickr8k-expert", "flickr8k-cf", "composite", "pascal50s", "foil", "nebula", "polaris"] = (
        option(help="the ratings")
    )
    data_root: Path = option(help="folder with the files of the benchmark")
    metrics: list[str] = option(
        ["bleu_4", "rouge_l", "cider_d"],
        nargs="+",
        metavar="METRIC",
        help=f"metrics to compare: {', '.join((*TEXT_METRICS, *SCORER_METRICS, *JUDGE_METRICS))}, package.module:function, "
        "evaluate:NAME, evaluate:PATH.py, or evaluate:NAME:KEY",
    )
    command: str | None = option(
        None,
        metavar="COMMAND",
        help="another metric: a program that reads JSON lines with 'candidate', 'references' and 'image', and writes a number "
        "per line",
    )
    scorer: str | None = option(None, help=f"dual encoder of {', '.join(SCORER_METRICS)}")
    image_dir: Path | None = option(
        None, help="folder of the images, for metrics that see them (default: --data_root/images)"
    )
    num_references: NotNegative | None = option(
        None,
        metavar="N",
        help="references of each caption of pascal50s (0: all 48) and foil (default: 5 and 4, as published)",
    )
    num_bootstrap: NotNegative = option(1000, help="resamples of the images")
    output: Path | None = option(None, metavar="FILE", help="also write the result as JSON")


def measure_agreement(options: AgreementOptions) -> None:
    """Compute the scores, their agreement with the ratings, and print both beside the published numbers."""
    from hf_captionrl.evaluation.metric_functions import metric_function, program_metric
    from hf_captionrl.experimental.judges import judge_metric
    from hf_captionrl.experimental.ratings import load_ratings, published_agreement
    from hf_captionrl.metrics.meteor_spice import JavaError

    # Unknown names and missing models are refused before anything is loaded.
    by_judge = [name for name in options.metrics if name in JUDGE_METRICS]
    functions = {
        n: judge_metric(n, options.judge) if n in by_judge else metric_function(n, scorer=options.scorer)
        for n in options.metrics
    }
    by_scorer = [name for name in functions if name in SCORER_METRICS]
    judge_sees = [name for name in by_judge if name != "clair"]
    rated = load_ratings(
        options.benchmark, options.data_root, num_references=options.num_references, seed=options.seed
    )
    folder = options.image_dir or options.data_root / "images"
    missing = [name for name in dict.fromkeys(rated.images) if not (folder / name).is_file()]
    if (by_scorer or judge_sees) and missing:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} images, such as {missing[0]!r}.")
    if by_scorer:
        from hf_captionrl.retrieval import load_scorer

        scorer = load_scorer(options.scorer, device=options.device)
        functions |= {name: metric_function(name, scorer=scorer) for name in by_scorer}
    if options.command is not None:
        functions["command"] = program_metric(options.command)
    scores: dict[str, Any] = {}
    not_run = {}
    with options.loaded_judge(with_images=bool(judge_sees)) as judge:
        functions |= {name: judge_metric(name, judge) for name in by_judge}
        for name, function in functions.items():
            try:
                scores[name] = rated.scores(function, name=name, image_dir=folder)
            except JavaError as error:
                not_run[name] = str(error)
    if not scores:
        raise ValueError(f"No metric could be computed: {'; '.join(not_run.values())}")
    found = rated.agreement(scores, num_bootstrap=options.num_bootstrap, seed=options.seed)
    published = published_agreement(rated.name)
    for name, row in found["metrics"].items():
        given = published.get(name, {})
        own = name not in SCORER_METRICS or options.scorer == _PUBLISHED_SCORER
        row |= _beside(row, given.get("mean"), own) | {"source": given.get("source")}
        for kind, part in row.get("categories", {}).items():
            part |= _beside(part, given.get(kind), own)
    result = {"benchmark": rated.name, **found, "not_run": not_run, "bad_lines": rated.num_bad_lines}
    result |= {"scorer": options.scorer, "judge": options.judge}
    if options.output is not None:
        write_json(options.output, result | {"versions": installed_versions()})
    print(json.dumps(result) if options.json else _text(rated, result, published))


def _beside(row: dict[str, Any], published: float | None, same_scorer: bool) -> dict[str, Any]:
    """The published number, which has one digit after the point, and whether ours equals it."""
    if published is None:
        return {"published": None, "verdict": None}
    ours = 100 * row["tau" if "tau" in row else "accuracy"]
    verdict = "reproduced" if round(ours, 1) == published else f"differs by {ours - published:+.1f}"
    return {"published": published, "verdict": verdict if same_scorer else "CLIP ViT-B/32"}


def _text(rated: Any, result: dict[str, Any], published: dict[str, Any]) -> str:
    first = next(iter(result["metrics"].values()))
    key = "tau" if "tau" in first else "accuracy"
    measured = f"Kendall's tau-{rated.variant}" if key == "tau" else "accuracy"
    rows = f"{first['num_ratings']:,} ratings" if key == "tau" else f"{first['num_pairs']:,} pairs"
    width = max(16, *(len(name) + 1 for name in result["metrics"]))
    lines = [
        f"{rated.name}: {first['num_captions']:,} captions of {first['num_images']:,} images, {rows}; {measured} x 100, "
        "95 % intervals over images.",
        f"{'':{width}}{key:>8}  {'interval':16}published",
    ]
    if rated.num_bad_lines:
        lines.insert(1, f"{rated.num_bad_lines} lines of the annotations could not be read.")
    for name, row in result["metrics"].items():
        for label, part in {
            name: row,
            **{f"  {kind}": part for kind, part in row.get("categories", {}).items()},
        }.items():
            interval = "[{:.1f}, {:.1f}]".format(*(100 * e for e in part[f"{key}_ci"])) if f"{key}_ci" in part else ""
            said = "" if part["published"] is None else f"{part['published']:.1f}, {part['verdict']}"
            lines.append(f"{label:{width}}{100 * part[key]:8.1f}  {interval:16}{said}".rstrip())
    for name, reason in result["not_run"].items():
        said = f"; published {published[name]['mean']:.1f}" if name in published else ""
        lines.append(f"{name:{width}}{reason}{said}")
    others = {name: row for name, row in published.items() if name not in (*result["metrics"], *result["not_run"])}
    if others:
        lines.append("Not run: " + ", ".join(f"{name} (published {row['mean']:.1f})" for name, row in others.items()))
    sources = dict.fromkeys(row["source"] for row in result["metrics"].values() if row["source"])
    lines += [f"Published: {'; '.join(sources)}."] if sources else []
    for row in result["differences"]:
        low, high = (100 * end for end in row["interval"])
        lines.append(
            f"{row['first']} - {row['second']}: {100 * row['difference']:+.1f} [{low:+.1f}, {high:+.1f}], "
            f"p = {row['adjusted_p_value']:.3f} (Benjamini and Hochberg)"
        )
    return "\n".join(lines)
