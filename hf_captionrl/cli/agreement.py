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

    Kendall's tau with ratings. The annotations and captions of a benchmark are read from --data_root, as their authors publish them.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl agreement --benchmark flickr8k-expert --data_root Flickr8k_text --metrics bleu_4 meteor cider_d
          captionrl agreement --benchmark flickr8k-expert --data_root Flickr8k --metrics cider_d clip_score \\
              --scorer openai/clip-vit-base-patch32 --image_dir Flickr8k/images
          captionrl agreement --benchmark flickr8k-cf --data_root Flickr8k_text --metrics cider_d mine:score
    """

    benchmark: Literal["flickr8k-expert", "flickr8k-cf"] = option(help="the ratings")
    data_root: Path = option(help="folder with the files of the benchmark")
    metrics: list[str] = option(
        ["bleu_4", "rouge_l", "cider_d"],
        nargs="+",
        metavar="METRIC",
        help=f"metrics to compare: {', '.join((*TEXT_METRICS, *SCORER_METRICS, *JUDGE_METRICS))}, package.module:function",
    )
    scorer: str | None = option(None, help=f"dual encoder of {', '.join(SCORER_METRICS)}")
    image_dir: Path | None = option(
        None, help="folder of the images, for metrics that see them (default: --data_root/images)"
    )
    num_bootstrap: NotNegative = option(1000, help="resamples of the images")
    output: Path | None = option(None, metavar="FILE", help="also write the result as JSON")


def measure_agreement(options: AgreementOptions) -> None:
    """Compute the scores, their agreement with the ratings, and print both beside the published numbers."""
    from hf_captionrl.evaluation.metric_functions import metric_function
    from hf_captionrl.experimental.judges import judge_metric
    from hf_captionrl.experimental.ratings import load_ratings, published_agreement
    from hf_captionrl.metrics.meteor_spice import JavaError

    def function(name: str, scorer: Any, judge: Any) -> Any:
        return judge_metric(name, judge) if name in JUDGE_METRICS else metric_function(name, scorer=scorer)

    for name in options.metrics:  # unknown names and missing models are refused before anything is loaded
        function(name, options.scorer, options.judge)
    rated = load_ratings(options.benchmark, options.data_root)
    by_scorer = set(options.metrics) & set(SCORER_METRICS)
    judge_sees = "vqa_score" in options.metrics
    folder = options.image_dir or options.data_root / "images"
    missing = [name for name in dict.fromkeys(rated.images) if not (folder / name).is_file()]
    if (by_scorer or judge_sees) and missing:
        raise FileNotFoundError(f"{folder} lacks images ({len(missing)}), such as {missing[0]!r}.")
    scorer, scores, not_run = None, dict[str, Any](), {}
    if by_scorer:
        from hf_captionrl.retrieval import load_scorer

        scorer = load_scorer(options.scorer, device=options.device)
    with options.loaded_judge(with_images=judge_sees) as judge:
        for name in dict.fromkeys(options.metrics):
            try:
                scores[name] = rated.scores(function(name, scorer, judge), name=name, image_dir=folder)
            except JavaError as error:
                not_run[name] = str(error)
    if not scores:
        raise ValueError(f"No metric could be computed: {'; '.join(not_run.values())}")
    result: dict[str, Any] = {"benchmark": rated.name, "not_run": not_run, "bad_lines": rated.num_bad_lines}
    result |= {"scorer": options.scorer, "judge": options.judge}
    result |= rated.agreement(scores, num_bootstrap=options.num_bootstrap, seed=options.seed)
    published = published_agreement(rated.name)
    for name, row in result["metrics"].items():
        row |= {"published": None, "verdict": None, "source": None}
        if name in published:  # it has one digit after the point
            row |= {"published": published[name]["mean"], "source": published[name]["source"]}
            difference = 100 * row["tau"] - row["published"]
            is_equal = round(100 * row["tau"], 1) == row["published"]
            row["verdict"] = "reproduced" if is_equal else f"differs by {difference:+.1f}"
            if name in by_scorer and options.scorer != _PUBLISHED_SCORER:
                row["verdict"] = "CLIP ViT-B/32"
    if options.output is not None:
        write_json(options.output, result | {"versions": installed_versions()})
    print(json.dumps(result) if options.json else _text(rated.variant, result))


def _text(variant: str, result: dict[str, Any]) -> str:
    first = next(iter(result["metrics"].values()))
    lines = [
        f"{result['benchmark']}: {first['num_captions']:,} captions of {first['num_images']:,} images, {first['num_ratings']:,} ratings; "
        f"Kendall's tau-{variant} x 100, 95 % intervals over images; {result['bad_lines']} lines could not be read."
    ]
    for name, row in result["metrics"].items():
        interval = " [{:.1f}, {:.1f}]".format(*(100 * end for end in row["tau_ci"])) if "tau_ci" in row else ""
        paper = "" if row["published"] is None else f"; {row['source']}: {row['published']:.1f}, {row['verdict']}"
        lines.append(f"{name:16}{100 * row['tau']:8.1f}{interval}{paper}")
    lines += [f"{name:16}{reason}" for name, reason in result["not_run"].items()]
    for row in result["differences"]:
        low, high = (100 * end for end in row["interval"])
        lines.append(
            f"{row['first']} - {row['second']}: {100 * row['difference']:+.1f} [{low:+.1f}, {high:+.1f}], "
            f"p = {row['adjusted_p_value']:.3f} (Benjamini and Hochberg)"
        )
    return "\n".join(lines)
