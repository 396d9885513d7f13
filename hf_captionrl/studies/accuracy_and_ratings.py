"""Scores of human studies: accuracy of picks, mean ratings, intervals, agreement, differences between systems.

Pure functions of what people answered; `hf_captionrl.studies.answer_files` reads the answers and checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

from hf_captionrl.metrics.bootstrap import bootstrap_interval, exact_interval, paired_test, proportion_interval
from hf_captionrl.metrics.signature import signature
from hf_captionrl.studies.agreement import krippendorff_alpha

__all__ = ["Pick", "Rating", "exact_interval", "score_picks", "score_ratings"]


class Pick(NamedTuple):
    """One answer of a retrieval study."""

    participant: str  # id of the participant
    part: str  # the block; wrong controls are counted per block
    group: str  # the set of images; each set is shown once per system
    system: str | None  # system of the caption; None for a control
    value: int  # picked position, from 1
    right: int  # position of the target


class Rating(NamedTuple):
    """The rating of one caption by one participant: one number per scale; `item` is the image."""

    participant: str
    item: str
    system: str
    values: tuple[int, ...]


def _intervals(
    key: str,
    values: Sequence[float],
    questions: Sequence[Hashable],
    participants: Sequence[Hashable],
    options: Mapping[str, Any],
    *,
    interval: Callable[..., tuple[float, float]] = bootstrap_interval,
) -> dict[str, Any]:
    """A mean, its interval over questions and its interval over participants; `<key>_ci` is the wider of the two."""
    found: dict[str, Any] = {key: float(fmean(values))}
    ends = {}
    for name, labels in (("questions", questions), ("participants", participants)):
        # Resampling a single group gives no interval.
        ends[name] = interval(values, groups=labels, **options) if len(set(labels)) > 1 else None
        found[f"{key}_ci_{name}"] = ends[name]
    known = [interval for interval in ends.values() if interval is not None]
    found[f"{key}_ci"] = max(known, key=lambda interval: interval[1] - interval[0]) if known else None
    return found


def _pairs(
    names: Sequence[str],
    by_system: Mapping[str, Mapping[Hashable, float]],
    key: str,
    confidence: float,
    seed: int,
) -> list[dict[str, Any]]:
    """Differences between systems on the groups (sets, images) with answers for both."""
    found = []
    for first, second in combinations(names, 2):
        common = [group for group in by_system.get(first, {}) if group in by_system.get(second, {})]
        entry: dict[str, Any] = {"a": first, "b": second, "measure": key, "num_groups": len(common)}
        if len(common) < 2:
            entry.update(difference=None, difference_reason="fewer than two groups have answers for both")
        else:
            tested = paired_test(
                [by_system[first][group] for group in common],
                [by_system[second][group] for group in common],
                confidence=confidence,
                seed=seed,
            )
            entry.update(difference=tested["difference"], difference_ci=tested["interval"], p_value=tested["p_value"])
        found.append(entry)
    return found


def _by_group(values: Sequence[tuple[str, Hashable, float]]) -> dict[str, dict[Hashable, float]]:
    """Mean of each group, by system."""
    lists: dict[str, dict[Hashable, list[float]]] = {}
    for system, group, value in values:
        lists.setdefault(system, {}).setdefault(group, []).append(value)
    return {system: {group: fmean(many) for group, many in groups.items()} for system, groups in lists.items()}


def score_picks(
    picks: Sequence[Pick],
    systems: Sequence[str],
    *,
    set_size: int = 10,
    max_wrong_controls: int = 1,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Accuracy of each system's captions when people pick the image (DiscriTune, section 5.3 and Appendix A).

    A participant's block is dropped if more than `max_wrong_controls` of its controls are wrong.
    """
    if not picks:
        raise ValueError("There are no answers. Score at least one participant.")
    sessions: dict[tuple[str, str], list[Pick]] = {}
    for pick in picks:
        sessions.setdefault((pick.participant, pick.part), []).append(pick)
    participants, dropped, kept = [], [], []
    for (participant, part), answers in sorted(sessions.items()):
        controls = [pick for pick in answers if pick.system is None]
        others = [pick for pick in answers if pick.system is not None]
        wrong = sum(pick.value != pick.right for pick in controls)
        entry = {
            "participant": participant,
            "part": part,
            "answers": len(others),
            "correct": sum(pick.value == pick.right for pick in others),
            "controls": len(controls),
            "wrong_controls": wrong,
        }
        participants.append(entry)
        if wrong > max_wrong_controls:
            reason = f"{wrong} of {len(controls)} controls wrong, but at most {max_wrong_controls} are allowed"
            dropped.append({"participant": participant, "part": part, "reason": reason})
        else:
            kept += others
    if not kept:
        told = "; ".join(f"{d['participant']} in {d['part']}: {d['reason']}" for d in dropped)
        raise ValueError(
            f"No answers are left to score ({told or 'controls only'}). Raise --max_wrong_controls, or ask more participants."
        )
    options = {"confidence": confidence, "num_resamples": num_resamples, "seed": seed}
    rows = []
    for name in systems:
        own = [pick for pick in kept if pick.system == name]
        row: dict[str, Any] = {"name": name, "answers": len(own), "correct": sum(p.value == p.right for p in own)}
        if own:
            row |= _intervals(
                "accuracy",
                [float(pick.value == pick.right) for pick in own],
                [pick.group for pick in own],
                [pick.participant for pick in own],
                options,
                interval=proportion_interval,
            )
            row["accuracy_exact_ci"] = exact_interval(row["correct"], len(own), confidence=confidence)
        else:
            row |= {"accuracy": None, "accuracy_reason": "no answers, or all participants were dropped"}
        rows.append(row)
    hits = _by_group([(str(p.system), p.group, float(p.value == p.right)) for p in kept])
    return {
        "rows": rows,
        "participants": participants,
        "dropped": dropped,
        # Categories are positions, not images: the images of a set occur in no other set, so chance would be 0.
        "agreement": [
            {
                "measure": "pick",
                **krippendorff_alpha(((p.part, p.group, p.system), p.participant, p.value) for p in kept),
            }
        ],
        "paired": _pairs(systems, hits, "accuracy", confidence, seed),
        "chance": 1 / set_size,
        "signature": signature(
            study="retrieval",
            images=set_size,
            wrong_controls=max_wrong_controls,
            interval="wider of questions and participants",
            resamples=num_resamples,
            seed=seed,
        ),
    }


def score_ratings(
    ratings: Sequence[Rating],
    systems: Sequence[str],
    *,
    scales: Sequence[str] = ("descriptiveness", "accuracy", "fluency"),
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean rating of each system on each scale, and F1 of the first two (SMILE, Table 2).

    F1 = 2 D A / (D + A) of the means D and A, as in the table. F1 is homogeneous of degree one, so it equals the mean of its
    linearisation `(2 A^2 d + 2 D^2 a) / (D + A)^2` over ratings d and a; intervals and tests use the linearisation.
    """
    if not ratings:
        raise ValueError("There are no ratings. Score at least one participant.")
    if len(scales) < 2:
        raise ValueError(f"scales are {list(scales)}, but F1 needs at least two.")
    for rating in ratings:
        if len(rating.values) != len(scales) or min(rating.values) < 1:
            raise ValueError(
                f"{rating.participant!r} rated {rating.item!r} with {rating.values}, but needs {len(scales)} numbers "
                "of at least 1."
            )
    options = {"confidence": confidence, "num_resamples": num_resamples, "seed": seed}
    measures = (*scales, "f1")
    rows: list[dict[str, Any]] = []
    values: dict[str, list[tuple[str, Hashable, float]]] = {measure: [] for measure in measures}
    for name in systems:
        own = [rating for rating in ratings if rating.system == name]
        row: dict[str, Any] = {"name": name, "ratings": len(own)}
        rows.append(row)
        if not own:
            for measure in measures:
                row |= {measure: None, f"{measure}_reason": "no ratings"}
            continue
        columns = [[float(rating.values[place]) for rating in own] for place in range(len(scales))]
        d, a = fmean(columns[0]), fmean(columns[1])
        columns.append([2 * (a * a * x + d * d * y) / (d + a) ** 2 for x, y in zip(*columns[:2], strict=True)])
        for measure, column in zip(measures, columns, strict=True):
            row |= _intervals(measure, column, [r.item for r in own], [r.participant for r in own], options)
            values[measure] += [(name, r.item, x) for r, x in zip(own, column, strict=True)]
    counts: dict[str, int] = {}
    for rating in ratings:
        counts[rating.participant] = counts.get(rating.participant, 0) + 1
    agreement = []
    for place, scale in enumerate(scales):
        triples = [((r.item, r.system), r.participant, r.values[place]) for r in ratings]
        agreement += [
            {"measure": scale, **krippendorff_alpha(triples, level="ordinal")},
            {"measure": scale, **krippendorff_alpha(triples, level="interval")},
        ]
    return {
        "rows": rows,
        "participants": [{"participant": name, "answers": count} for name, count in sorted(counts.items())],
        "dropped": [],
        "agreement": agreement,
        "paired": [
            entry
            for measure in measures
            for entry in _pairs(systems, _by_group(values[measure]), measure, confidence, seed)
        ],
        "signature": signature(
            study="rating",
            scales=",".join(scales),
            f1="of the means",
            interval="wider of images and participants",
            resamples=num_resamples,
            seed=seed,
        ),
    }
