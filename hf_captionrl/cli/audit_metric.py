"""`captionrl audit-metric`: which errors of captions a metric sees."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.cli.options import JudgeOptions
from hf_captionrl.evaluation.metric_functions import JUDGE_METRICS, SCORER_METRICS, TEXT_METRICS, metric_function
from hf_captionrl.utils.io import installed_versions, write_json
from hf_captionrl.utils.options import CommandOptions, DeviceOptions, NotNegative, SeedOptions, option

if TYPE_CHECKING:
    from hf_captionrl.experimental.metric_audit import AuditedMetric

_FEWEST = 50  # scenes; with fewer, intervals of rare kinds say nothing


@dataclass
class AuditMetricOptions(JudgeOptions, SeedOptions, DeviceOptions, CommandOptions):
    """Show which errors of captions a metric sees, on scenes of the embedded world.

    Measures, with 95 % intervals over scenes: how often a true caption scores higher than one with a single wrong fact, by kind of
    fact; the change of the score by paraphrase, word order, padding and punctuation; whether it rises with the number of true
    facts; bias to length and to the position of the error; how often two captioners of known error rates are ranked wrongly; false
    alarms; and the time per caption relative to CIDEr-D. Writes metric_audit.json.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl audit-metric --metric cider_d bleu_4 meteor --output audit
          captionrl audit-metric --metric clip_score reward:self_retrieval --scorer scenes:clip-reward --output audit
          captionrl audit-metric --metric my_package.my_module:my_metric --references full --output audit

        metrics:
          truth_precision, truth_recall, truth_f1    claims of a caption by the truth checker of scenes
          length, perplexity                         words; mean log-probability of a token under --language_model
          reward:NAME                                a registered reward of one caption per image, e.g. reward:self_retrieval
          package.module:function                    a function of captions, references and images that returns numbers
    """

    metric: list[str] = option(
        nargs="+",
        metavar="METRIC",
        help=f"metrics to audit: {', '.join((*TEXT_METRICS, *SCORER_METRICS, *JUDGE_METRICS))}, or those below",
    )
    scorer: list[str] = option(
        ["scenes:siglip-held-out"],
        nargs="+",
        metavar="NAME",
        help="dual encoders of clip_score, ref_clip_score and reward:self_retrieval, which are audited with each of them",
    )
    language_model: str = option("scenes:gpt2-perplexity", metavar="NAME", help="causal language model of perplexity")
    references: Literal["short", "full"] = option(
        "short",
        help="five references per scene: 'short' ones of simulated annotators, which mention a third of the facts, or 'full' ones, "
        "with all facts in other words",
    )
    n: NotNegative = option(500, help=f"number of scenes, at least {_FEWEST}")
    output: Path = option(metavar="DIR", help="folder to write")


def audit_metric(options: AuditMetricOptions) -> None:
    """Run the probes, and write and print what the metrics see."""
    if options.n < _FEWEST:
        raise ValueError(f"n is {options.n}. Use at least {_FEWEST} scenes.")

    from hf_captionrl.experimental import metric_audit
    from hf_captionrl.experimental.judges import judge_metric

    with_scorer = list(filter(_needs_scorer, options.metric))
    for name in options.metric:  # unknown names and a missing judge are refused before anything is loaded
        if name in JUDGE_METRICS:
            judge_metric(name, options.judge)
        elif not name.startswith("reward:") and name not in (*with_scorer, *metric_audit.OWN_METRICS):
            metric_function(name)
    judge_sees = any(name in JUDGE_METRICS and name != "clair" for name in options.metric)
    result: dict[str, Any] = {"n": options.n, "seed": options.seed, "references": options.references}
    with options.loaded_judge(with_images=judge_sees) as judge:
        metrics = _load(options, with_scorer, judge)
        result["metrics"] = metric_audit.audit_on_scenes(metrics, progress=_say, **result)
    path = write_json(options.output / "metric_audit.json", result | {"versions": installed_versions()})
    print(json.dumps(result) if options.json else _text(result, path))


def _say(line: str) -> None:
    print(f"captionrl audit-metric: {line}", file=sys.stderr)


def _needs_scorer(name: str) -> bool:
    from hf_captionrl.rewards.base import resolve_rewards

    if not name.startswith("reward:"):
        return name in SCORER_METRICS
    return hasattr(resolve_rewards(name.removeprefix("reward:")).rewards[0], "scorer")


def _load(options: AuditMetricOptions, with_scorer: Sequence[str], judge: Any) -> list[AuditedMetric]:
    from hf_captionrl.evaluation.options import clip_prefix
    from hf_captionrl.experimental.judges import judge_metric
    from hf_captionrl.experimental.metric_audit import AuditedMetric

    scorers, language_model = {}, None
    if with_scorer:
        from hf_captionrl.retrieval import load_scorer

        scorers = {name: load_scorer(name, device=options.device) for name in options.scorer}
    if "perplexity" in options.metric:
        from hf_captionrl.metrics.evaluate_modules.inputs import load_language_model

        language_model = load_language_model(options.language_model)
    found = []
    for name in options.metric:
        if name in with_scorer:
            for by, scorer in scorers.items():
                label = f"{name} ({by})" if len(scorers) > 1 else name
                found.append(AuditedMetric(label, name, scorer, clip_prefix(None, "", by)))
        else:
            metric = judge_metric(name, judge) if name in JUDGE_METRICS else name
            found.append(AuditedMetric(name, metric, language_model=language_model))
    return found


_SEEN = {"does_not_see": "does not see", "prefers_the_error": "prefers the error:"}


def _text(result: Mapping[str, Any], path: Path) -> str:
    lines = ["Share of pairs whose better caption scores higher; not seen: the 95 % interval contains 0.5."]
    for name, row in result["metrics"].items():
        parts = [f"{words} {', '.join(row[key])}" for key, words in _SEEN.items() if row[key]]
        shares = ", ".join(f"{kind} {share['value']:.2f}" for kind, share in row["sensitivity"].items())
        lines += [f"{name}: {'; '.join(parts) or 'sees every error'}", f"  {shares}"]
    return "\n".join([*lines, f"Written: {path}"])
