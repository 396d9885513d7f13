"""Finds and counts pairs of captions of one image of which CIDEr-D prefers the worse one.

Legend: N images.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from hf_captionrl.metrics.bootstrap import check_values
from hf_captionrl.metrics.signature import signature

__all__ = ["CiderFailure", "cider_failures", "unrewarded"]


@dataclass(frozen=True)
class CiderFailure:
    """One pair of captions on which CIDEr-D fails.

    Args:
        row: The image.
        preferred: The captioner with the higher CIDEr-D.
        better: The other one, whose caption is the better one.
        gap: Difference of the two scores, at least 0.
    """

    row: int
    preferred: str
    better: str
    gap: float


def _columns(values: Mapping[str, Any] | None, names: list[str], number: int, what: str) -> dict[str, np.ndarray]:
    """One array of N numbers per captioner; empty if `values` is None."""
    if values is None:
        return {}
    found = {}
    for name in names:
        if name not in values:
            raise ValueError(f"{what} lacks {name!r}; it has {sorted(values)}. Pass one list per captioner.")
        found[name] = check_values(values[name], f"{what}[{name!r}]")
        if len(found[name]) != number:
            raise ValueError(
                f"{what}[{name!r}] has {len(found[name])} numbers for {number} images. Pass one per image."
            )
    return found


def cider_failures(
    scores: Mapping[str, Any],
    *,
    wrong: Mapping[str, Any] | None = None,
    recalled: Mapping[str, Any] | None = None,
    ranks: Mapping[str, Any] | None = None,
    min_gap: float = 0.0,
) -> dict[str, Any]:
    """Find pairs of captions of which CIDEr-D prefers the less faithful one, or the one with the larger rank.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 6 and Appendix C.6, which show such captions. Here every
    pair of captioners is compared on every image. Of two captions of one image with different CIDEr-D:

    - the more faithful one makes no more wrong claims and mentions no fewer facts, and is strictly better in one of them;
    - the one that retrieves better has the smaller rank;
    - CIDEr-D fails on the pair if the caption with the lower score is the better one by every rule whose numbers are given.
    """
    names = list(scores)
    if len(names) < 2:
        raise ValueError(f"scores are of {names}. Pass at least two captioners.")
    if (wrong is None) != (recalled is None):
        raise ValueError(
            "wrong and recalled must be given together, because a caption without claims is not faithful."
        )
    if wrong is None and ranks is None:
        raise ValueError("There is nothing to compare CIDEr-D with. Pass wrong and recalled, or ranks.")
    if min_gap < 0:
        raise ValueError(f"min_gap ({min_gap}) must be at least 0.")
    number = len(check_values(scores[names[0]], f"scores[{names[0]!r}]"))
    cider = _columns(scores, names, number, "scores")
    errors, facts = _columns(wrong, names, number, "wrong"), _columns(recalled, names, number, "recalled")
    places = _columns(ranks, names, number, "ranks")
    counts = {"pairs": 0, "faithful": 0, "faithful_failures": 0, "retrieval": 0, "retrieval_failures": 0}
    cases = []
    for row in range(number):
        for one, other in combinations(names, 2):
            high, low = (one, other) if cider[one][row] > cider[other][row] else (other, one)
            gap = float(cider[high][row] - cider[low][row])
            if gap <= min_gap:
                continue
            counts["pairs"] += 1
            verdicts = []
            if errors:
                fewer, more = errors[high][row] - errors[low][row], facts[low][row] - facts[high][row]
                low_wins = fewer >= 0 and more >= 0 and (fewer > 0 or more > 0)
                high_wins = fewer <= 0 and more <= 0 and (fewer < 0 or more < 0)
                counts["faithful"] += low_wins or high_wins
                counts["faithful_failures"] += low_wins
                verdicts.append(low_wins)
            if places:
                low_wins = places[low][row] < places[high][row]
                counts["retrieval"] += low_wins or places[high][row] < places[low][row]
                counts["retrieval_failures"] += low_wins
                verdicts.append(low_wins)
            if all(verdicts):
                cases.append(CiderFailure(row, high, low, gap))
    return {
        "pairs": counts["pairs"],
        "faithful_pairs": int(counts["faithful"]) if errors else None,
        "faithful_failures": float(counts["faithful_failures"] / max(counts["faithful"], 1)) if errors else None,
        "retrieval_pairs": int(counts["retrieval"]) if places else None,
        "retrieval_failures": float(counts["retrieval_failures"] / max(counts["retrieval"], 1)) if places else None,
        "failures": len(cases),
        "cases": sorted(cases, key=lambda case: (-case.gap, case.row)),
        "signature": signature(
            metric="cider_failures",
            captioners=len(names),
            rules="+".join(["faithful"] * bool(errors) + ["retrieval"] * bool(places)),
            min_gap=min_gap,
        ),
    }


def unrewarded(
    scores: Mapping[str, Any], *, right: Mapping[str, Any], wrong: Mapping[str, Any], below: float = 0.1
) -> dict[str, Any]:
    """Captions without a wrong claim whose CIDEr-D is almost 0.

    Reference: Gaur et al. 2024 (No Detail Left Behind), Figure 6: correct captions whose CIDEr against one long reference
    is about 0. The paper chooses them by hand; the rule here is: at least one right claim, no wrong one, and CIDEr-D below a
    bound.

    Returns `right_captions`, number of captions without a wrong claim; `unrewarded`, those below the bound; `share`, the
    second divided by the first (0 if there are none); `cases`, (row, captioner, score) of each, those with the most
    right claims first; `signature`.
    """
    if below <= 0:
        raise ValueError(f"below ({below}) must be above 0, the smallest value of CIDEr-D.")
    names = list(scores)
    if not names:
        raise ValueError("scores is empty. Pass at least one captioner.")
    number = len(check_values(scores[names[0]], f"scores[{names[0]!r}]"))
    cider, said = _columns(scores, names, number, "scores"), _columns(right, names, number, "right")
    errors = _columns(wrong, names, number, "wrong")
    good = [(row, name) for row in range(number) for name in names if said[name][row] > 0 and errors[name][row] == 0]
    cases = [(row, name, float(cider[name][row])) for row, name in good if cider[name][row] < below]
    return {
        "right_captions": len(good),
        "unrewarded": len(cases),
        "share": len(cases) / max(len(good), 1),
        "cases": sorted(cases, key=lambda case: (-said[case[1]][case[0]], case[2], case[0])),
        "signature": signature(metric="unrewarded", captioners=len(names), below=below),
    }
