"""`captionrl audit-metric`: what a metric of captions sees, and what it does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.cli.options import JudgeOptions
from hf_captionrl.evaluation.metric_functions import JUDGE_METRICS, SCORER_METRICS, TEXT_METRICS
from hf_captionrl.utils.io import atomic_write_text, installed_versions, write_json
from hf_captionrl.utils.options import CommandOptions, DeviceOptions, NotNegative, SeedOptions, option

if TYPE_CHECKING:
    from hf_captionrl.experimental.metric_audit import AuditedMetric

_FEWEST = 50  # scenes; with fewer, intervals of rare kinds say nothing
_REWARDS_OF_SCENES = ("reward:claim_f1", "reward:question_oracle")


@dataclass
class AuditMetricOptions(JudgeOptions, SeedOptions, DeviceOptions, CommandOptions):
    """Show which errors of captions a metric sees, on scenes of the embedded world and on your own pairs of captions.

    Measures, with 95 % intervals over scenes: how often a true caption scores higher than one with a single wrong fact, by kind of
    fact; the change of the score by paraphrase, word order, padding and punctuation; whether it rises with the number of true
    facts; bias to length and to the position of the error; how often two captioners of known error rates are ranked wrongly; false
    alarms; and the time per caption relative to CIDEr-D. Writes metric_audit.json and metric_audit.html.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl audit-metric --metric cider_d bleu_4 meteor --output audit
          captionrl audit-metric --metric clip_score reward:self_retrieval --scorer scenes:clip-reward --output audit
          captionrl audit-metric --metric my_package.my_module:my_metric --references full --output audit
          captionrl audit-metric --command "python mine.py" --n 200 --output audit
          captionrl audit-metric --metric clip_score --scorer openai/clip-vit-base-patch32 --pairs pairs.jsonl --n 0 --output audit

        metrics:
          truth_precision, truth_recall, truth_f1    claims of a caption by the truth checker of scenes
          length, perplexity                         words; mean log-probability of a token under --language_model
          reward:NAME                                a registered reward of one caption per image, e.g. reward:self_retrieval
          package.module:function                    a function of captions, references and images that returns numbers
    """

    metric: list[str] = option(
        [],
        nargs="+",
        metavar="METRIC",
        help=f"metrics to audit: {', '.join((*TEXT_METRICS, *SCORER_METRICS, *JUDGE_METRICS))}, or those below",
    )
    command: str | None = option(
        None,
        metavar="COMMAND",
        help="another metric: a program that reads JSON lines with 'candidate', 'references' and 'image', and writes a number "
        "per line; it is started some 35 times",
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
    n: NotNegative = option(500, help=f"number of scenes, at least {_FEWEST}; 0: only --pairs")
    pairs: Path | None = option(
        None,
        metavar="FILE",
        help="your own pairs, as JSON Lines: 'better' and 'worse', and optionally 'image', 'references' (a list) and 'kind'",
    )
    output: Path = option(metavar="DIR", help="folder to write")


def audit_metric(options: AuditMetricOptions) -> None:
    """Run the probes, and write and print what the metrics see."""
    if not options.metric and options.command is None:
        raise ValueError("There is no metric. Use --metric or --command.")
    if 0 < options.n < _FEWEST or (options.n == 0 and options.pairs is None):
        raise ValueError(f"n is {options.n}. Use at least {_FEWEST} scenes, or 0 with --pairs.")
    if len(set(options.metric)) < len(options.metric):
        raise ValueError(f"--metric names a metric twice: {' '.join(options.metric)}. Name each once.")

    from hf_captionrl.evaluation.metric_functions import metric_function
    from hf_captionrl.experimental import metric_audit
    from hf_captionrl.experimental.judges import judge_metric

    with_scorer = list(filter(_needs_scorer, options.metric))
    for name in options.metric:  # unknown names and a missing judge are refused before anything is loaded
        if name in JUDGE_METRICS:
            judge_metric(name, options.judge)
        elif not name.startswith("reward:") and name not in (*with_scorer, *metric_audit.OWN_METRICS):
            metric_function(name)
    of_scenes = [name for name in options.metric if name.startswith("truth_") or name in _REWARDS_OF_SCENES]
    if of_scenes and options.n == 0:
        raise ValueError(f"--metric {of_scenes[0]} knows the facts of scenes only. Leave it out, or raise n.")
    pairs = None if options.pairs is None else metric_audit.read_pairs(options.pairs)
    lacking = next((pair["better"] for pair in pairs or () if pair["image"] is None), None)
    judge_sees = [name for name in options.metric if name in JUDGE_METRICS and name != "clair"]
    needing = [n for n in options.metric if n in (*with_scorer, *judge_sees) or n.startswith("reward:")]
    if needing and lacking is not None:
        raise ValueError(f"--metric {needing[0]} needs images, and the pair of {lacking!r} has none. Add 'image'.")
    settings: dict[str, Any] = {"n": options.n, "seed": options.seed, "references": options.references}
    result = dict(settings)
    with options.loaded_judge(with_images=bool(judge_sees)) as judge:
        metrics = _load(options, with_scorer, judge)
        if pairs is not None:  # before the scenes, because a metric may refuse them
            others = [audited for audited in metrics if audited.name not in of_scenes]
            result["pairs"] = metric_audit.audit_on_pairs(others, pairs)
        if options.n:
            result["metrics"] = metric_audit.audit_on_scenes(metrics, **settings, progress=_say)
    write_json(options.output / "metric_audit.json", result | {"versions": installed_versions()})
    atomic_write_text(options.output / "metric_audit.html", audit_html(result))
    print(json.dumps(result) if options.json else _text(result, options.output))


def _say(line: str) -> None:
    print(f"captionrl audit-metric: {line}", file=sys.stderr)


def _needs_scorer(name: str) -> bool:
    from hf_captionrl.rewards.base import resolve_rewards

    if not name.startswith("reward:"):
        return name in SCORER_METRICS
    return hasattr(resolve_rewards(name.removeprefix("reward:")).rewards[0], "scorer")


def _load(options: AuditMetricOptions, with_scorer: Sequence[str], judge: Any) -> list[AuditedMetric]:
    from hf_captionrl.evaluation.metric_functions import program_metric
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
    if options.command is not None:
        found.append(AuditedMetric("command", program_metric(options.command)))
    return found


# --- The result as text and as a page --------------------------------------------------------------------------------

_SAID = {"does_not_see": ("does not see", "○ "), "prefers_the_error": ("prefers the error:", "▼ ")}


def _verdict(row: Mapping[str, Any]) -> str:
    """The errors that a metric does not see or prefers."""
    said = [f"{words} {', '.join(row[key])}" for key, (words, _) in _SAID.items() if row[key]]
    if not row["sees"]:
        said = ["sees no error", *said[bool(row["does_not_see"]) :]]
    return "; ".join(said) or "sees every error"


def _text(result: Mapping[str, Any], output: Path) -> str:
    lines = ["Share of pairs whose better caption scores higher; not seen: the 95 % interval contains 0.5."]
    for part in ("metrics", "pairs"):
        for name, row in result.get(part, {}).items():
            shares = ", ".join(f"{kind} {found['value']:.2f}" for kind, found in row["sensitivity"].items())
            lines += [f"{name}{' on your pairs' if part == 'pairs' else ''}: {_verdict(row)}", f"  {shares}"]
    return "\n".join([*lines, f"Written: {output / 'metric_audit.html'}"])


def _cell(found: Mapping[str, Any], digits: int = 2, mark: str = "") -> dict[str, Any]:
    """A number, and its interval below it."""
    if found["value"] is None:
        return {"text": "–", "below": found["reason"]}
    interval = ", ".join(f"{end:.{digits}f}" for end in found["interval"])
    return {"text": f"{mark}{found['value']:.{digits}f}", "below": f"[{interval}]"}


def _heat_map(title: str, of: Mapping[str, Any], note: str) -> dict[str, Any]:
    """Sensitivities: one row per metric, one column per kind."""
    rows = []
    for name, row in of.items():
        marks = {kind: mark for key, (_, mark) in _SAID.items() for kind in row[key]}
        cells = [
            _cell(found, mark=marks.get(kind, ""))
            | {"heat": round(10 * found["value"]), "title": f"{found['n']} pairs, {found['ties']:.0%} ties"}
            for kind, found in row["sensitivity"].items()
        ]
        rows.append({"name": name, "cells": cells})
    note = f"Share of pairs whose better caption scores higher; a tie counts 0.5. ○: the interval contains 0.5; ▼: it is below. {note}"
    return {"title": title, "note": note, "header": list(next(iter(of.values()))["sensitivity"]), "rows": rows}


_TRENDS = {
    "monotonicity": "rises with facts",
    "length_bias": "bias to length",
    "position_bias": "bias to position",
    "identical": "identical captions",
    "false_alarms": "false alarms",
    "cost": "time / CIDEr-D",
}
_TREND_NOTE = (
    "Rises with facts: share of steps from few to all true facts at which the score rises (1 is best). Bias to length: Kendall's tau "
    "of score and words among captions with the same facts (0 is best). Bias to position: sensitivity to a wrong background at the "
    "beginning minus at the end. Identical captions: must be 0.5. False alarms: share of paired tests at 5 % that separate two "
    "captioners of equal error rate. Time: per caption, images included, but for rewards, which encode them before."
)


def audit_html(result: Mapping[str, Any]) -> str:
    """The result as one HTML page that needs nothing else."""
    from hf_captionrl.evaluation.pages import TEMPLATES, render_html
    from hf_captionrl.experimental.metric_audit import INVARIANCES, KINDS

    def table(title: str, note: str, header: Sequence[str], columns: Callable[[Any], Any], digits: int = 2) -> Any:
        rows = [{"name": name, "cells": [_cell(c, digits) for c in columns(row)]} for name, row in of.items()]
        return {"title": title, "note": note, "header": header, "rows": rows}

    of, pairs, tables = result.get("metrics", {}), result.get("pairs", {}), []
    if of:
        kinds, changes = ("; ".join(f"{name}: {said}" for name, said in by.items()) for by in (KINDS, INVARIANCES))
        tables.append(_heat_map("Errors that are seen", of, f"Each pair differs in one fact. {kinds}."))
        note = f"Mean change of the score, in standard deviations over true captions; 0 is best. {changes}."
        tables.append(
            table("Changes that are not errors", note, [*INVARIANCES], lambda row: row["invariance"].values())
        )
        trends = [*_TRENDS.values()]
        tables.append(table("Trends, biases, costs", _TREND_NOTE, trends, lambda row: [row[key] for key in _TRENDS]))
        cases = [
            "{:.0%} / {:.0%}, {} images".format(*case["error_rates"], case["images"])
            for case in next(iter(of.values()))["misranked"]
        ]
        note = "Probability that the captioner with more wrong captions gets the higher mean, by both error rates."
        tables.append(table("Captioners ranked wrongly", note, cases, lambda row: row["misranked"], 3))
    if pairs:
        tables.append(_heat_map("Your pairs", pairs, "Intervals resample images."))
    where = f"{result['n']} scenes of the embedded world, {result['references']} references, seed {result['seed']}. "
    values: dict[str, Any] = {"title": "What metrics see", "note": f"{where if of else ''}Intervals: 95 %."}
    values["verdicts"] = [(name, _verdict(row)) for name, row in (of or pairs).items()]
    return render_html(TEMPLATES, "metric_audit", styles=("gallery",), tables=tables, **values)
