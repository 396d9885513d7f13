"""Rewards of what a caption claims: precision, recall and F of its claims, and the checkers that judge claims.

Legend: N captions, T tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hf_captionrl.rewards.base import CompletionReward, Reward, RewardContext, RewardData
from hf_captionrl.scenes.truth_checker import check, mark_caption
from hf_captionrl.utils.options import NotNegative, Positive, check_values

# --- Checkers: the claims of captions, with verdicts -----------------------------------------------------------------


class CheckedClaim(NamedTuple):
    """A claim of a caption."""

    text: str
    is_true: bool | None  # None: undecided
    start: int | None = None  # its first character in the caption, if that is known
    end: int | None = None  # and the one after its last


@dataclass(frozen=True)
class CheckedCaption:
    """What a checker finds out about a caption; the two numbers are None if they are unknown."""

    claims: Sequence[CheckedClaim]
    num_stated: int | None = None  # facts that a true claim states
    num_facts: int | None = None  # facts that there are

    @property
    def precision(self) -> float:
        """True claims divided by decided ones; 0 for a caption without claims, NaN if none is decided."""
        decided = [claim.is_true for claim in self.claims if claim.is_true is not None]
        return sum(decided) / len(decided) if decided else math.nan if self.claims else 0.0


Checker = Callable[..., Sequence[CheckedCaption | None]]
"""Called like a reward function, `checker(completions, **columns)`; None for a caption that it could not read."""


class SceneChecker:
    """The exact checker of the embedded world; `positions` of claims in the caption take ten times as long."""

    def __init__(self, positions: bool = False) -> None:
        self.positions = positions

    def __call__(self, completions: Sequence[str], facts: Sequence[Any]) -> list[CheckedCaption]:
        """Check N captions."""
        checked = []
        for caption, truth in zip(completions, facts, strict=True):
            result = check(caption, truth)
            if self.positions:
                marks = mark_caption(caption, truth)
                claims = [CheckedClaim(m.claim.text, m.verdict == "right", m.start, m.end) for m in marks]
            else:
                claims = [CheckedClaim(c.text, True) for c in result.right]
                claims += [CheckedClaim(c.text, False) for c in result.wrong]
            checked.append(CheckedCaption(claims, len(result.recalled), len(result.recalled) + len(result.missed)))
        return checked


# --- The reward ------------------------------------------------------------------------------------------------------


def token_spans(
    decode: Callable[[Tensor, Tensor], list[str]], ids: Tensor, mask: Tensor
) -> list[list[tuple[int, int]]]:
    """First character and the one after the last of each token in its caption, from the captions of all beginnings."""
    mask = mask.bool()
    texts = [decode(ids[:, :t], mask[:, :t]) for t in range(1, ids.size(1) + 1)]
    ends = [[0, *(len(text[n]) for text in texts)] for n in range(len(ids))]
    return [list(itertools.pairwise(row)) for row in ends]


@dataclass(eq=False)
class ClaimReward(Reward):
    r"""Precision, recall or F1 of the claims of a caption.

    Precision is the share of true claims among the decided ones, recall the share of the image's facts that true claims
    state. Reference: the rewards of claims of BalCapRL (Ye et al. 2026, arXiv:2605.07394). Differs from it by: exact truth on
    scenes, no score of the language, and the rules of length, `min_claims` and `max_words`.

    With `credit="claim"` a token has the advantage `A + v - P`, where `A` is that of its caption, `v` is 1 in a true claim and
    0 in a false one (the mean, if it belongs to several) and `P` the caption's precision. With `score="precision"` and the
    baseline `"group_mean"` this is `v` minus the mean precision of the group. Other tokens have the advantage of the
    caption. The gradient is biased, see reproduction/claims.md.

    Args:
        checker (`Callable`, *optional*): Called like a reward function; it returns a [`CheckedCaption`] per caption, or None
            where it could not read one, which then has no reward. None: the exact checker of scenes.
        score: `"precision"`, `"recall"` or `"f1"`.
        credit: `"caption"`, or `"claim"` for a credit of tokens; not in TRL's trainers.
        min_claims (`int`): A caption with fewer claims has precision 0, so that one safe claim is not worth most.
        max_words (`int`): A longer caption has recall 0, so that listing does not pay; 0: no limit.

    Example:
        >>> ClaimReward(score="precision").name
        'claim_precision'
    """

    name = "claim_f1"
    summary = "F1 of the claims"
    reads_only_text = True

    checker: Checker | None = None
    score: Literal["precision", "recall", "f1"] = "f1"
    credit: Literal["caption", "claim"] = "caption"
    min_claims: Positive = 1
    max_words: NotNegative = 0

    def __post_init__(self) -> None:
        check_values(self)
        self.name = f"claim_{self.score}"
        self.gives_token_credit = self.credit == "claim"
        checker = self.checker or SceneChecker(positions=self.gives_token_credit)
        self._function = CompletionReward(checker, self.name, conversational=False)
        self._decode: Callable[[Tensor, Tensor], list[str]] | None = None
        self._last: tuple[RewardContext | None, Sequence[CheckedCaption | None]] = (None, [])

    def describe(self) -> str:
        name = "F1" if self.score == "f1" else f"the {self.score}"
        return f"{name} of the claims{', with credit for each claim' if self.gives_token_credit else ''}"

    def prepare(self, data: RewardData) -> None:
        self._function.prepare(data)
        self._decode = data.decode

    def checked(self, context: RewardContext) -> Sequence[CheckedCaption | None]:
        """The claims of the captions of a rollout, checked once."""
        if self._last[0] is not context:
            found = self._function.call(context)
            if len(found) != len(context.captions):
                raise ValueError(f"checker returned {len(found)} results for {len(context.captions)} captions.")
            self._last = (context, found)
        return self._last[1]

    def __call__(self, context: RewardContext) -> Tensor:
        checked = self.checked(context)
        claims = [claim for one in checked if one is not None for claim in one.claims]
        context.statistics |= {
            "claims/number": [0 if one is None else len(one.claims) for one in checked],
            "claims/undecided": [claim.is_true is None for claim in claims],
            "claims/wrong": [not claim.is_true for claim in claims if claim.is_true is not None],
            "claims/unread_captions": float(sum(one is None for one in checked)),
        }
        values = list(map(self._score, checked, context.captions))
        return torch.tensor(values, dtype=torch.float64)

    def _score(self, found: CheckedCaption | None, caption: str) -> float:
        if found is None:
            return math.nan
        precision = found.precision if len(found.claims) >= self.min_claims else 0.0
        if self.score == "precision":
            return precision
        if found.num_facts is None or found.num_stated is None:
            raise ValueError(f"score is {self.score!r}, and the checker counts no facts. Use score='precision'.")
        recall = found.num_stated / found.num_facts if found.num_facts else math.nan
        if self.max_words and len(caption.split()) > self.max_words:
            recall = 0.0
        if self.score == "recall":
            return recall
        return 2 * precision * recall / (precision + recall) if precision + recall != 0 else 0.0

    def token_credit(self, context: RewardContext) -> Tensor:
        if self._decode is None:
            raise ValueError(f"{self.name!r} has credit='claim', but no decoder of tokens. Use credit='caption'.")
        spans = token_spans(self._decode, context.ids, context.mask)
        credit = torch.zeros(context.ids.shape, dtype=torch.float64)
        for n, found in enumerate(self.checked(context)):
            if found is not None:
                credit[n] = torch.tensor(claim_credit(found, spans[n]), dtype=torch.float64)
        return credit.masked_fill(~context.mask.bool().cpu(), 0.0)


def claim_credit(found: CheckedCaption, spans: Sequence[tuple[int, int]]) -> list[float]:
    """The credit `v - P` of each token of a caption; 0 outside of claims that are decided and have a place."""
    placed = [c for c in found.claims if c.is_true is not None and c.start is not None and c.end is not None]
    credits = []
    for start, end in spans:
        truths = [float(c.is_true) for c in placed if start < c.end and c.start < end and start < end]  # type: ignore[arg-type,operator]
        credits.append(sum(truths) / len(truths) - found.precision if truths else 0.0)
    return credits
