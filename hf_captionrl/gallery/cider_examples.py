"""CIDEr-D of the captions of a gallery: where it prefers the worse caption, and right captions with a score near 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_captionrl.evaluation.evaluator import Evaluator

__all__ = ["CiderScores", "cider_note"]


class CiderScores:
    """CIDEr-D of every caption, with the claims and ranks that it is compared with; `ranks` is empty without a scorer."""

    def __init__(
        self, captions: Mapping[str, list[str]], evaluator: Evaluator, ranks: Mapping[str, list[int]]
    ) -> None:
        from hf_captionrl.metrics import cider_d, faithfulness
        from hf_captionrl.metrics.suites.suite_row import spoken
        from hf_captionrl.scenes import check

        self.ranks = ranks
        self.scores: dict[str, list[float]] = {}
        self.claims: dict[str, dict[str, Any]] = {}
        for name, mine in captions.items():
            self.scores[name] = cider_d(spoken(mine), evaluator.references)["per_sample"].tolist()
            if evaluator.facts is not None:
                self.claims[name] = faithfulness(spoken(mine), evaluator.facts, check)["per_sample"]

    def of(self, what: str) -> dict[str, Any]:
        """Number of claims of one kind, per caption of each source."""
        return {name: counts[what] for name, counts in self.claims.items()}

    def numbers(self, row: int, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Numbers shown beside the captions of an image."""
        return {name: {"CIDEr-D": f"{self.scores[name][row]:.2f}"} for name in names}

    def failures(self, min_gap: float) -> dict[str, Any] | None:
        """Pairs of captions of which it prefers the worse."""
        if len(self.scores) < 2 or not (self.claims or self.ranks):
            return None
        from hf_captionrl.metrics.cider_failures import cider_failures

        known = {name: self.of(name) for name in ("wrong", "recalled")} if self.claims else {}
        return cider_failures(self.scores, ranks=self.ranks or None, min_gap=min_gap, **known)

    def unrewarded(self, below: float) -> dict[str, Any] | None:
        """Right captions whose score is near 0."""
        if not self.claims:
            return None
        from hf_captionrl.metrics.cider_failures import unrewarded

        return unrewarded(self.scores, right=self.of("right"), wrong=self.of("wrong"), below=below)


def cider_note(found: Mapping[str, Any]) -> str:
    """The counts as a few sentences."""
    parts = [f"CIDEr-D differs on {found['pairs']} pairs of captions."]
    for name, said in (("faithful", "more faithful"), ("retrieval", "better retrieving")):
        if found[f"{name}_pairs"] is not None:
            share, number = found[f"{name}_failures"], found[f"{name}_pairs"]
            parts.append(f"Where one is {said} ({number}), CIDEr-D prefers the other in {share:.0%}.")
    return " ".join([*parts, f"By every rule at once: {found['failures']}."])
