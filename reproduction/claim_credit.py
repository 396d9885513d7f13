"""Compares credit per claim with credit per caption exactly: bias and variance of both estimates of the policy gradient.

    OMP_NUM_THREADS=1 python reproduction/claim_credit.py

writes `reproduction/results/claim_credit.json`. The policy has a table of probabilities for each of four phrases given the one before, so that
every expectation over its 81 captions is a sum. Scenes and checker are those of the embedded world; the baseline is the expected reward.

Legend: S captions, T = 4 phrases, P parameters of a scene.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a program, only reproduction/ is on the path

from hf_captionrl.experimental.claim_rewards import ClaimReward, SceneChecker, claim_credit
from hf_captionrl.rewards.base import function_context
from hf_captionrl.scenes import Facts
from hf_captionrl.utils.io import installed_versions, write_json
from reproduction import RESULTS

RESULT = RESULTS / "claim_credit.json"
PHRASES = (("a", "two", "three"), ("", "small", "large"), ("pigs", "ducks", "cats"), ("", "on blue", "on white"))
PATHS = list(itertools.product(range(3), repeat=len(PHRASES)))  # S captions as places of their phrases
POLICIES, NUMBERS = 20, (1, 4, 16, 64, 256)
SCENES = list(itertools.product(("pig", "duck", "cat"), (1, 2, 3), ("small", "large"), ("blue", "white")))


def rewards_and_credit(facts: Facts, score: str) -> tuple[Tensor, Tensor]:
    """Rewards `(S,)` of all captions, and the credit `(S, T)` of their phrases."""
    words = [[phrases[place] for phrases, place in zip(PHRASES, path, strict=True)] for path in PATHS]
    captions, credit = [" ".join(filter(None, row)) for row in words], []
    for row, found in zip(words, SceneChecker(positions=True)(captions, [facts] * len(words)), strict=True):
        ends = [len(" ".join(filter(None, row[: t + 1]))) for t in range(len(row))]
        credit.append(claim_credit(found, list(itertools.pairwise([0, *ends]))))
    context = function_context(captions, torch.arange(len(captions)), captions, {"facts": [facts] * len(captions)})
    return ClaimReward(score=score)(context), torch.tensor(credit, dtype=torch.float64)  # type: ignore[arg-type]


def policy(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Probabilities `(S,)` of the captions, and the gradients `(S, T, P)` of the log-probabilities of their phrases."""
    table = torch.randn(len(PHRASES), 3, 3, generator=generator, dtype=torch.float64).log_softmax(2)
    places = torch.tensor([(0, *path) for path in PATHS])  # the first phrase is given the first one of the list
    before, now, t = places[:, :-1], places[:, 1:], torch.arange(len(PHRASES)).expand(len(PATHS), -1)
    scores = torch.zeros(*now.shape, *table.shape, dtype=torch.float64)  # (S, T, T, 3, 3)
    rows = torch.arange(len(PATHS))[:, None]
    scores[rows, t, t, before] = torch.nn.functional.one_hot(now, 3) - table[t, before].exp()
    return table[t, before, now].sum(1).exp(), scores.flatten(2)


def measure(score: str) -> dict[str, dict[str, float]]:
    """Means over scenes and policies, with the standard error over policies.

    Estimates are compared as directions, because an optimizer such as AdamW ignores the length of a gradient: `error_n` is the
    expected share of the exact gradient, as a squared length, that the mean over n captions misses after the best scaling.
    """
    generator = torch.Generator().manual_seed(0)
    known = [rewards_and_credit(Facts(k, n, size, "upright", "top", back), score) for k, n, size, back in SCENES]
    found: dict[str, list[float]] = {}
    for _ in range(POLICIES):
        probabilities, scores = policy(generator)
        rows: dict[str, list[Tensor]] = {}
        for rewards, credit in known:
            exact = torch.einsum("s,s,stp->p", probabilities, rewards, scores)
            advantages = (rewards - probabilities @ rewards)[:, None].expand_as(credit)
            for name, weights in (("caption", advantages), ("claim", advantages + credit)):
                samples = torch.einsum("st,stp->sp", weights, scores)  # the estimate of each caption
                mean = probabilities @ samples
                noise = probabilities @ (samples - mean).square().sum(1) / mean.square().sum()
                cosine = mean @ exact / (mean.norm() * exact.norm())
                values = {"length": mean.norm() / exact.norm(), "cosine": cosine, "deviation": noise.sqrt()}
                values |= {f"error_{n}": 1 - cosine.square() / (1 + noise / n) for n in NUMBERS}
                for key, value in values.items():
                    rows.setdefault(f"{name}/{key}", []).append(value)
        for key, column in rows.items():
            found.setdefault(key, []).append(float(torch.stack(column).mean()))
    return {k: {"mean": fmean(v), "standard_error": stdev(v) / len(v) ** 0.5} for k, v in found.items()}


if __name__ == "__main__":
    scores = {score: measure(score) for score in ("precision", "f1")}
    setting = {"captions": len(PATHS), "scenes": len(SCENES), "policies": POLICIES, "versions": installed_versions()}
    write_json(
        RESULT, {"command": "OMP_NUM_THREADS=1 python reproduction/claim_credit.py", **setting, "scores": scores}
    )
    for score, numbers in scores.items():
        print(score, {key: f"{value['mean']:.3f} ±{value['standard_error']:.3f}" for key, value in numbers.items()})
