"""`captionrl audit-metric`: what a metric of captions sees, and what it does not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hf_captionrl.evaluation.metric_functions import SCORER_METRICS, TEXT_METRICS
from hf_captionrl.utils.io import atomic_write_text, installed_versions, write_json
from hf_captionrl.utils.options import CommandOptions, DeviceOptions, NotNegative, SeedOptions, option

if TYPE_CHECKING:
    from hf_captionrl.evaluation.metric_audit import AuditedMetric

_FEWEST = 50  # scenes; with fewer, intervals of rare kinds say nothing


@dataclass
class AuditMetricOptions(SeedOptions, DeviceOptions, CommandOptions):
    """Show which errors of captions a metric sees, on scenes of the embedded world and on your own pairs of captions.

    Measures, with 95 % intervals over scenes: how often a true caption scores higher than one with a single wrong fact, by kind of
    fact; the change of the score by paraphrase, word order, padding and punctuation; whether it rises with the number of true
    facts; bias to length and to the position of the error; how often two captioners of known error rates are ranked wrongly; false
    alarms; and the time per caption relative to CIDEr-D. Writes metric_audit.json and metric_audit.html.
    """

    examples: ClassVar[str] = """
        examples:
          captionrl audit-metric --metric cider_d bleu_4 meteor --output audit
          captionrl audit-metric --metric clip_score reward:self_retrieval --scorer scenes:clip-reward scenes:siglip-held-out \\
              --output audit
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
        help=f"metrics to audit: {', '.join((*TEXT_METRICS, *SCORER_METRICS))}, or those below",
    )
    command: str | None = option(
        None,
        metavar="COMMAND",
        help="another metric: a program that reads JSON lines with 'candidate', 'references' and 'image', and writes a number "
        "per line; it is started for each of some 40 sets of captions",
    )
    scorer: list[str] = option(
        ["scenes:siglip-held-out"],
        nargs="+",
        metavar="NAME",
        help="dual encoders of clip_score, ref_clip_score and reward:self_retrieval, which are audited with each of them",
    )
    language_model: str = option(
        "scenes:gpt2-perplexity", metavar="NAME", help="causal language model of perplexity"
    )
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
    with_scorer = _check_names(options.metric)

    from hf_captionrl.evaluation import metric_audit

    of_scenes = [name for name in options.metric if name.startswith("truth_")]
    if of_scenes and options.n == 0:
        raise ValueError(f"--metric {of_scenes[0]} knows the facts of scenes only. Leave it out, or raise n.")
    pairs = None if options.pairs is None else metric_audit.read_pairs(options.pairs)
    lacking = next((pair["better"] for pair in pairs or () if pair["image"] is None), None)
    if with_scorer and lacking is not None:
        raise ValueError(f"--metric {with_scorer[0]} needs images, and the pair of {lacking!r} has none. Add 'image'.")
    metrics = _load(options, with_scorer)
    result: dict[str, Any] = {"n": options.n, "seed": options.seed, "references": options.references}
    if options.n:
        settings = {"n": options.n, "seed": options.seed, "references": options.references}
        result["metrics"] = metric_audit.audit_on_scenes(metrics, **settings, progress=_say)
    if pairs is not None:
        others = [audited for audited in metrics if audited.metric not in of_scenes]
        result["pairs"] = metric_audit.audit_on_pairs(others, pairs, seed=options.seed)
    write_json(options.output / "metric_audit.json", result | {"versions": installed_versions()})
    atomic_write_text(options.output / "metric_audit.html", audit_html(result))
    print(json.dumps(result) if options.json else _text(result, options.output))


def _say(line: str) -> None:
    print(f"captionrl audit-metric: {line}", file=sys.stderr)


def _check_names(names: Sequence[str]) -> list[str]:
    """The metrics that need a scorer; unknown names are refused before anything is loaded."""
    from hf_captionrl.evaluation.metric_audit import OWN_METRICS
    from hf_captionrl.evaluation.metric_functions import metric_function
    from hf_captionrl.rewards.base import REWARDS, resolve_rewards

    if len(set(names)) < len(names):
        raise ValueError(f"--metric names a metric twice: {' '.join(names)}. Name each once.")
    found = []
    for name in names:
        if name.startswith("reward:"):
            resolve_rewards(name.removeprefix("reward:"))
            if "scorer" in getattr(REWARDS[name.removeprefix("reward:")], "__dataclass_fields__", ()):
                found.append(name)
        elif name in SCORER_METRICS:
            found.append(name)
        elif name not in OWN_METRICS:
            metric_function(name)
    return found


def _load(options: AuditMetricOptions, with_scorer: Sequence[str]) -> list[AuditedMetric]:
    from hf_captionrl.evaluation.metric_audit import AuditedMetric
    from hf_captionrl.evaluation.metric_functions import metric_function, program_metric
    from hf_captionrl.evaluation.options import clip_prefix

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
            found.append(AuditedMetric(name, name, language_model=language_model))
    if options.command is not None:
        found.append(AuditedMetric("command", program_metric(options.command)))
    return found


# --- The result as text and as a page --------------------------------------------------------------------------------

_SAID = {"sees": "sees", "does_not_see": "does not see", "prefers_the_error": "prefers the error"}


def _numbers(row: Mapping[str, Any], digits: int = 2) -> tuple[str, str]:
    """A number and its interval."""
    if row["value"] is None:
        return "–", row["reason"]
    return f"{row['value']:.{digits}f}", "[{:.{d}f}, {:.{d}f}]".format(*row["interval"], d=digits)


def _verdicts(of: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Of each metric what it sees, does not see and prefers, with the shares."""
    return [
        (
            name,
            [
                (said, ", ".join(f"{kind} {_numbers(row['sensitivity'][kind])[0]}" for kind in row[key]))
                for key, said in _SAID.items()
                if row[key]
            ],
        )
        for name, row in of.items()
    ]


def _text(result: Mapping[str, Any], output: Path) -> str:
    lines = []
    for key, title in (("metrics", f"{result['n']} scenes, {result['references']} references"), ("pairs", "pairs")):
        if key not in result:
            continue
        lines.append(f"{title}: share of pairs in which the better caption scores higher; not seen: the interval has 0.5")
        for name, said in _verdicts(result[key]):
            lines += [f"{name}", *(f"  {word}: {kinds}" for word, kinds in said)]
    return "\n".join([*lines, f"Written: {output / 'metric_audit.html'}"])


def _heat(of: Mapping[str, Mapping[str, Any]], note: str) -> dict[str, Any]:
    """The table of sensitivities: one row per metric, one column per kind."""
    kinds = list(dict.fromkeys(kind for row in of.values() for kind in row["sensitivity"]))
    rows = []
    for name, row in of.items():
        cells = []
        for kind in kinds:
            found = row["sensitivity"][kind]
            value, interval = _numbers(found)
            state = next(key for key in _SAID if kind in row[key])
            mark = {"sees": "", "does_not_see": "○ ", "prefers_the_error": "▼ "}[state]
            ties = f", {found['ties']:.0%} ties" if found["ties"] else ""
            title = f"{_SAID[state]}: {kind}, {found['n']} pairs{ties}"
            cells.append({"text": mark + value, "below": interval, "heat": round(10 * found["value"]), "title": title})
        rows.append({"name": name, "cells": cells})
    return {"title": "Errors that are seen", "note": note, "header": kinds, "rows": rows}


def _table(
    of: Mapping[str, Any], title: str, note: str, columns: Mapping[str, Callable[[Any], Mapping[str, Any]]], digits: int
) -> dict[str, Any]:
    rows = []
    for name, row in of.items():
        numbers = [_numbers(column(row), digits) for column in columns.values()]
        rows.append({"name": name, "cells": [{"text": text, "below": below} for text, below in numbers]})
    return {"title": title, "note": note, "header": list(columns), "rows": rows}


def audit_html(result: Mapping[str, Any]) -> str:
    """The result as one HTML page that needs nothing else."""
    from hf_captionrl.evaluation.metric_audit import INVARIANCES, KINDS
    from hf_captionrl.evaluation.pages import TEMPLATES, render_html

    heading = "Share of pairs in which the better caption scores higher; a tie counts 0.5. ○: the interval contains 0.5; ▼: the worse one is preferred. "
    tables = []
    if of := result.get("metrics"):
        meaning = "; ".join(f"{kind}: {said}" for kind, said in KINDS.items())
        tables.append(_heat(of, f"{heading}One wrong fact per pair. {meaning}."))
        said = "; ".join(f"{name}: {what}" for name, what in INVARIANCES.items())
        columns: dict[str, Any] = {name: lambda row, name=name: row["invariance"][name] for name in INVARIANCES}
        note = f"Mean change of the score, in standard deviations over true captions; 0 is best. {said}."
        tables.append(_table(of, "Changes that are not errors", note, columns, 2))
        columns = {
            "rises with facts": lambda row: row["monotonicity"],
            "bias to length": lambda row: row["length_bias"],
            "bias to position": lambda row: row["position_bias"],
            "identical captions": lambda row: row["identical"],
            "false alarms": lambda row: row["false_alarms"],
            "time / CIDEr-D": lambda row: row["cost"],
        }
        note = (
            "Rises with facts: share of steps from few to all true facts at which the score rises (1 is best). Bias to length: "
            "Kendall's tau of score and words of captions with the same facts (0 is best). Bias to position: sensitivity to a wrong "
            "background at the beginning minus at the end. Identical captions: must be 0.5. False alarms: share of paired tests at "
            "5 % that separate two captioners of equal error rate."
        )
        tables.append(_table(of, "Trends, biases, costs", note, columns, 2))
        cases = next(iter(of.values()))["misranked"]
        columns = {
            f"{case['error_rates'][0]:.0%} / {case['error_rates'][1]:.0%}, {case['images']} images": (
                lambda row, at=at: row["misranked"][at]
            )
            for at, case in enumerate(cases)
        }
        note = "Probability that the captioner with more wrong captions gets the higher mean, by both error rates and images."
        tables.append(_table(of, "Captioners ranked wrongly", note, columns, 3))
    if pairs := result.get("pairs"):
        tables.append({**_heat(pairs, f"{heading}Intervals resample images."), "title": "Your pairs"})
    where = f"{result['n']} scenes of the embedded world, {result['references']} references, seed {result['seed']}. "
    note = f"{where if result['n'] else ''}Intervals: 95 %, bootstrap."
    verdicts = _verdicts(result.get("metrics") or result["pairs"])
    return render_html(
        TEMPLATES, "metric_audit", styles=("gallery",), title="What metrics see", note=note, verdicts=verdicts, tables=tables
    )
