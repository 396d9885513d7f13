"""One caption, token by token: a page, a picture, and JSON.

The page is self-contained: it holds image and style, and its content security policy forbids requests and scripts.
Captions and tokens are escaped everywhere.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator
from PIL import Image

from hf_captionrl.explain.token_view import Alternative, CaptionView, TokenView, token_pushes
from hf_captionrl.io import atomic_write_text
from hf_captionrl.losses.policy_gradient import LossType
from hf_captionrl.reports.gallery import embedded_image
from hf_captionrl.reports.plot_style import COLOURS, new_figure, plain_label, save_figure, tidy
from hf_captionrl.reports.templating import TEMPLATES, content_hash, html_templates

__all__ = ["CaptionReward", "explanation_json", "visible_token", "write_explanation", "write_explanation_picture"]

_WEIGHTS = {
    "grpo": "1 / tokens of the caption",
    "dapo": "1 / tokens of the batch, here this caption",
    "sum": "1",
}


@dataclass(frozen=True)
class CaptionReward:
    """Reward of the caption for self-retrieval."""

    reward: float  # log-probability of the target among the images of the pool, in nats, at most 0
    baseline: float  # subtracted from the reward, in nats
    baseline_name: str  # description of the baseline
    rank: int  # rank of the image, 1 = best
    pool_size: int  # number of images in the pool, the target included
    scorer: str  # name of the scorer
    loss_type: LossType = "grpo"  # weight of a token in the policy gradient

    @property
    def advantage(self) -> float:
        """Reward minus baseline, in nats."""
        return self.reward - self.baseline


def visible_token(text: str) -> str:
    """A token without surrounding blanks, and with invisible characters escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text.strip(" "))
    return shown or "␣"


def explanation_json(view: CaptionView, reward: CaptionReward | None = None) -> dict[str, Any]:
    """Everything the page shows, in full precision."""
    found: dict[str, Any] = {
        **asdict(view),
        "mle_loss": view.mle_loss,
        "smile_loss": view.smile_loss,
        "log_prob": view.log_prob,
        "reward": None,
    }
    if reward is not None:
        weights, pushes = token_pushes(view, reward.advantage, loss_type=reward.loss_type)
        found["reward"] = {**asdict(reward), "advantage": reward.advantage, "weights": weights, "pushes": pushes}
    return found


def _probability(value: float) -> str:
    """A probability as percent."""
    if value >= 0.9995:
        return "100 %"
    return f"{100 * value:.1f} %" if value >= 0.001 else "<0.1 %"


def _loss(value: float) -> str:
    return f"{abs(value) if abs(value) < 0.005 else value:.2f}"  # never -0.00


def _alternative(other: Alternative, label: int) -> dict[str, Any]:
    return {
        "text": visible_token(other.text),
        "probability": other.probability,
        "shown": _probability(other.probability),
        "in_subset": other.in_subset,
        "is_label": other.token_id == label,
    }


def _row(number: int, token: TokenView, longest: float) -> dict[str, Any]:
    """Values of one token for the template; `longest` is the largest loss."""
    return {
        "number": number,
        "text": visible_token(token.text),
        "is_end": token.is_end,
        "mle_loss": _loss(token.mle_loss),
        "smile_loss": _loss(token.smile_loss),
        "mle_probability": _probability(token.mle_probability),
        "smile_probability": _probability(token.smile_probability),
        "outside": _probability(token.outside),
        "entropy": _loss(token.entropy),
        "mle_width": 100 * token.mle_loss / longest,
        "smile_width": 100 * max(token.smile_loss, 0.0) / longest,
        "outside_width": 100 * min(token.outside, 1.0),
        "whole_vocabulary": token.whole_vocabulary,
        "mle_top": [_alternative(other, token.token_id) for other in token.mle_top],
        "smile_top": [_alternative(other, token.token_id) for other in token.smile_top],
    }


def write_explanation(
    path: str | os.PathLike[str],
    view: CaptionView,
    image: Image.Image,
    title: str,
    *,
    image_name: str = "Image",
    note: str = "",
    reward: CaptionReward | None = None,
) -> Path:
    """Write the page, atomically.

    Reference: Yue et al. 2023 (SMILE), Figure 5.
    """
    longest = max(max(token.mle_loss, token.smile_loss) for token in view.tokens) or 1.0
    rows = [_row(number, token, longest) for number, token in enumerate(view.tokens, start=1)]
    shown = None
    if reward is not None:
        weights, pushes = token_pushes(view, reward.advantage, loss_type=reward.loss_type)
        largest = max(map(abs, pushes)) or 1.0
        for row, push in zip(rows, pushes, strict=True):
            row |= {"push": f"{push:+.3f}", "push_width": 100 * abs(push) / largest, "is_up": push >= 0}
        shown = {
            "rank": reward.rank,
            "pool_size": reward.pool_size,
            "scorer": reward.scorer,
            "reward": f"{reward.reward:.3f}",
            "baseline": f"{reward.baseline:.3f}",
            "baseline_name": reward.baseline_name,
            "advantage": f"{reward.advantage:+.3f}",
            "weight": f"{weights[0]:+.4f}",
            "weight_name": _WEIGHTS[reward.loss_type],
        }
    style = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("gallery.css", "explain.css"))
    environment = html_templates()
    html = environment.get_template("explain.html.j2").render(
        title=title,
        note=note,
        image=embedded_image(image),
        image_name=image_name,
        caption=view.caption,
        tokens=rows,
        reward=shown,
        mle_loss=_loss(view.mle_loss),
        smile_loss=_loss(view.smile_loss),
        subset=[visible_token(text) for text in view.subset],
        vocab_size=f"{view.vocab_size:,}",
        complete=view.complete,
        first_token=view.first_token,
        # The only text that is not escaped. The policy allows only its hash.
        style=Markup(style),
        style_hash=content_hash(style),
    )
    return atomic_write_text(path, html)


def _outside_word(token: TokenView) -> str:
    """The most likely listed token that the caption does not use."""
    words = [visible_token(other.text) for other in token.mle_top if not other.in_subset and other.probability > 0.05]
    return words[0] if words else ""


def _drawn(text: str, longest: int = 18) -> str:
    """Text that matplotlib can draw, truncated to fit the panels."""
    shown = visible_token(text)
    return plain_label(shown if len(shown) <= longest else shown[: longest - 1] + "…")


def write_explanation_picture(
    path: str | os.PathLike[str], view: CaptionView, *, title: str | None = None, reward: CaptionReward | None = None
) -> Path:
    """Draw the tokens of the caption from top to bottom, and write the PNG atomically.

    Left: loss of each token under MLE and under SMILE. Middle: probability of the token, of the caption's other tokens and
    of all other tokens, with the most likely of these; SMILE ignores them. Right, with a reward: gradient of one step of
    the policy gradient at the token's logit.
    """
    columns = 2 if reward is None else 3
    figure, axes = new_figure(3.4 * columns + 0.8, 1.5 + 0.34 * len(view.tokens), columns=columns)
    places = list(range(len(view.tokens)))
    for axis in axes:
        axis.set_ylim(len(places) - 0.4, -0.6)
        axis.set_yticks(places, [""] * len(places))
        tidy(axis, grid="x")
    axes[0].set_yticks(places, [_drawn(token.text) for token in view.tokens])
    grey, orange, blue = COLOURS[0], COLOURS[1], COLOURS[2]
    axes[0].barh([p - 0.19 for p in places], [t.mle_loss for t in view.tokens], 0.36, color=grey, label="MLE")
    axes[0].barh(
        [p + 0.19 for p in places], [t.smile_loss for t in view.tokens], 0.36, color=orange, hatch="//", label="SMILE",
        edgecolor="white", linewidth=0,
    )  # fmt: skip
    axes[0].set_xlabel("Loss in nats")
    own = [token.mle_probability for token in view.tokens]
    outside = [token.outside for token in view.tokens]
    others = [max(1 - p - q, 0.0) for p, q in zip(own, outside, strict=True)]
    left = [0.0] * len(places)
    for values, colour, label, hatch in (
        (own, orange, "the token", ""),
        (others, grey, "other caption words", ".."),
        (outside, "#b9d7ea", "other words", ""),
    ):
        axes[1].barh(places, values, 0.7, left=left, color=colour, hatch=hatch, label=label, edgecolor="white", linewidth=0)  # fmt: skip
        left = [a + b for a, b in zip(left, values, strict=True)]
    for place, token in zip(places, view.tokens, strict=True):
        word = _outside_word(token)
        if word:
            axes[1].text(0.985, place, _drawn(word), ha="right", va="center", fontsize=8, color="#12344d")
    axes[1].set_xlim(0, 1)
    axes[1].set_xlabel("Probability among the whole vocabulary")
    if reward is not None:
        _, pushes = token_pushes(view, reward.advantage, loss_type=reward.loss_type)
        axes[2].barh(places, pushes, 0.7, color=blue)
        axes[2].axvline(0.0, color="#5d6370", linewidth=0.8)
        axes[2].xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes[2].set_xlabel("RL: gradient at the token's logit")
        axes[2].set_title(f"advantage {reward.advantage:+.2f}, rank {reward.rank} of {reward.pool_size}", fontsize=9)
    for axis, number in zip(axes[:2], (2, 3), strict=True):
        axis.legend(frameon=False, fontsize=8, ncols=number, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderpad=0.1, handlelength=1.2, columnspacing=0.9)  # fmt: skip
    figure.suptitle(_drawn(" ".join((view.caption if title is None else title).split()), 100), fontsize=12)
    return save_figure(path, figure)
