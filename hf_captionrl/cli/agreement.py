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


@dataclass
class AgreementOptions(JudgeOptions, SeedOptions, DeviceOptions, CommandOptions):
    """Kendall's tau of metrics with human ratings, with intervals over images, beside published numbers.

    The annotations and captions of a benchmark are read from --data_root, as their authors publish them.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl agreement --benchmark flickr8k-expert --data_root Flickr8k_text --metrics bleu_4 meteor cider_d
          captionrl agreement --benchmark flickr8k-expert --data_root Flickr8k --metrics cider_d clip_score \\
              --scorer openai/clip-vit-base-patch32 --image_dir Flickr8k/images
          captionrl agreement --benchmark flickr8k-cf --data_root Flickr8k_text --metrics cider_d --command "python mine.py"
    """

    benchmark: Literal["flickr8k-expert", "flickr8k-cf"] = option(help="the ratings")
    data_root: Path = option(help="folder with the files of the benchmark")
    metrics: list[str] = option(
        ["bleu_4", "rouge_l", "cider_d"],
        nargs="+",
        metavar="METRIC",
        help=f"metrics to compare: {', '.join((*TEXT_METRICS, *SCORER_METRICS, *JUDGE_METRICS))}, or package.module:function",
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
    num_bootstrap: NotNegative = option(1000, help="resamples of the images")
    output: Path | None = option(None, metavar="FILE", help="also write the result as JSON")


def measure_agreement(options: AgreementOptions) -> None:
    """Compute the scores, their agreement with the ratings, and print both beside the published numbers."""
    from hf_captionrl.evaluation.metric_functions import call_metric, metric_function, program_metric
    from hf_captionrl.evaluation.ratings import PUBLISHED, load_ratings

    by_scorer, by_judge = ([n for n in options.metrics if n in names] for names in (SCORER_METRICS, JUDGE_METRICS))
    if by_scorer and options.scorer is None:
        raise ValueError(f"{by_scorer[0]} needs a scorer. Use --scorer openai/clip-vit-base-patch32.")
    if by_judge and options.judge is None:
        raise ValueError(f"{by_judge[0]} needs a judge. Use --judge transformers:NAME.")
    judge_sees = [name for name in by_judge if name != "clair"]
    with_images = by_scorer + judge_sees
    rated = load_ratings(options.benchmark, options.data_root)
    folder = options.image_dir or options.data_root / "images"
    missing = [name for name in dict.fromkeys(rated.images) if not (folder / name).is_file()]
    if with_images and missing:
        raise FileNotFoundError(f"{folder} lacks {len(missing)} images, such as {missing[0]!r}.")
    scorer = None
    if by_scorer:
        from hf_captionrl.retrieval import load_scorer

        scorer = load_scorer(options.scorer, device=options.device)
    images = [folder / name for name in rated.images]
    with options.loaded_judge(with_images=bool(judge_sees)) as judge:
        functions = {name: metric_function(name, scorer=scorer, judge=judge) for name in options.metrics}
        if options.command is not None:
            functions["command"] = program_metric(options.command)
        scores = {
            name: call_metric(function, name, rated.candidates, rated.references, images)
            for name, function in functions.items()
        }
    found = rated.agreement(scores, num_bootstrap=options.num_bootstrap, seed=options.seed)
    published = PUBLISHED[options.benchmark]
    for name, row in found["metrics"].items():
        row["published"] = published.get(name)
    result = {
        "benchmark": options.benchmark,
        **found,
        "bad_lines": rated.num_bad_lines,
        "scorer": options.scorer,
        "judge": options.judge,
    }
    if options.output is not None:
        write_json(options.output, result | {"versions": installed_versions()})
    print(json.dumps(result) if options.json else _text(options.benchmark, rated, result))


def _text(benchmark: str, rated: Any, result: dict[str, Any]) -> str:
    first = next(iter(result["metrics"].values()))
    lines = [
        f"{benchmark}: {first['num_captions']:,} captions of {first['num_images']:,} images, {first['num_ratings']:,} ratings; "
        f"Kendall's tau-{rated.variant} x 100, 95 % intervals over images.",
        f"{'':16}{'tau':>6}  {'interval':16}published",
    ]
    if rated.num_bad_lines:
        lines.insert(1, f"{rated.num_bad_lines} lines of the annotations could not be read.")
    for name, row in result["metrics"].items():
        interval = "[{:.1f}, {:.1f}]".format(*(100 * end for end in row["tau_ci"])) if "tau_ci" in row else ""
        tau, published, said = 100 * row["tau"], row["published"], ""
        if published is not None and name in SCORER_METRICS:
            said = f"{published:.1f} (CLIP ViT-B/32)"
        elif published is not None:
            differs = f"differs by {tau - published:+.1f}" if round(tau, 1) != published else "reproduced"
            said = f"{published:.1f}, {differs}"
        lines.append(f"{name:16}{tau:6.1f}  {interval:16}{said}".rstrip())
    for row in result["differences"]:
        low, high = (100 * end for end in row["interval"])
        lines.append(
            f"{row['first']} - {row['second']}: {100 * row['difference']:+.1f} [{low:+.1f}, {high:+.1f}], "
            f"p = {row['adjusted_p_value']:.3f} (Benjamini and Hochberg)"
        )
    return "\n".join(lines)
