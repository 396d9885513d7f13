r"""Can a frozen image-text model find the image from its caption?

Legend: B images, G captions an image, N = B * G captions, C images of the rollout, K images compared, D features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_captionrl.retrieval import load_scorer
from hf_captionrl.retrieval.ranking import ranks_from_scores
from hf_captionrl.rewards.base import Reward, RewardContext, RewardData

__all__ = ["SelfRetrieval", "retrieval_rewards"]

Kind = Literal["log_prob", "cosine", "accuracy"]
DistractorScope = Literal["batch", "bag", "hard"]


def retrieval_rewards(similarity: Tensor, columns: Tensor, kind: Kind = "log_prob", scale: float = 1.0) -> Tensor:
    r"""Reward of each caption from its similarity with its own image and with the distractors.

    Reference: Dessi et al. 2023, Eq. 2 and Table 9. `log_prob`: `log softmax_k(scale * s_nk)` at the own image;
    `cosine`: `s` of the own image; `accuracy`: 1 if the own image ranks first, 0 otherwise (also on a tie).

    Args:
        similarity (`torch.Tensor` of shape `(N, K)`): Cosines.
        columns (`torch.Tensor` of shape `(N,)`): Column of the own image.
        kind: Which reward.
        scale (`float`): Factor on the cosines inside the softmax.

    Returns:
        `torch.Tensor` of shape `(N,)`: Nats (at most 0), a cosine in [-1, 1], or 0 and 1; NaN where the own similarity
        is NaN.

    Raises:
        ValueError: If the kind is unknown.
    """
    if kind == "log_prob":
        return (scale * similarity).log_softmax(1).gather(1, columns[:, None])[:, 0]
    if kind == "cosine":
        return similarity.gather(1, columns[:, None])[:, 0]
    if kind == "accuracy":
        found = (ranks_from_scores(similarity, columns) == 1).to(similarity.dtype)
        # A rank is a number even of NaN, which would pass for a caption that missed.
        return found.masked_fill(similarity.gather(1, columns[:, None])[:, 0].isnan(), math.nan)
    raise ValueError(f"kind is {kind!r}. Use one of {get_args(Kind)}.")


class SelfRetrieval(Reward):
    r"""Reward of a caption from which a frozen scorer finds its image among distractors.

    Reference: Dessi et al. 2023, "Cross-Domain Image Captioning with Discriminative Finetuning" (`distractor_scope="batch"`);
    "No Detail Left Behind", Section 4.6 (batches of bags; the softmax still runs over the whole batch) and its bags alone
    (`distractor_scope="bag"`). Distractors are the images of the whole rollout on all processes.

    Args:
        scorer (`Scorer` or `str`, *optional*): The scorer or its name, or several of them; None for the trainer's.
        kind: `"log_prob"`, `"cosine"` or `"accuracy"`.
        similarity_scale (`float`, *optional*): Factor on the cosine; None for the scorer's own logit scale, as the
            authors' code does. The paper's formula has 1.
        distractor_scope: The whole batch, the image's own bag, or the `num_hard` images of the batch that are most similar
            to the image for the scorer (DiscriTune, Tables 12 and 13).
        num_hard (`int`): k of the hard distractors.
        ensemble: Of several scorers, `"mean"` averages their rewards, `"alternate"` uses one a step in turn.
        allow_truncation (`bool`): Accept a policy that may write more than a scorer reads; what it reads is then rewarded.
        undefined_reward (`float`, *optional*): For captions without a word and features that are no numbers. None: twice
            the reward of a caption that fits all images alike, 2 log(1/K); -1 for cosines; 0 for accuracies.

    Raises:
        ValueError: If an argument is none of these.

    Example:
        >>> reward = SelfRetrieval("openai/clip-vit-base-patch32", kind="log_prob")  # doctest: +SKIP
    """

    name = "self_retrieval"

    def __init__(
        self,
        scorer: Any | Sequence[Any] | None = None,
        *,
        kind: Kind = "log_prob",
        similarity_scale: float | None = None,
        distractor_scope: DistractorScope = "batch",
        num_hard: int = 10,
        ensemble: Literal["mean", "alternate"] = "mean",
        allow_truncation: bool = False,
        undefined_reward: float | None = None,
    ) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"kind is {kind!r}. Use one of {get_args(Kind)}.")
        if distractor_scope not in get_args(DistractorScope):
            raise ValueError(f"distractor_scope is {distractor_scope!r}. Use one of {get_args(DistractorScope)}.")
        if ensemble not in ("mean", "alternate"):
            raise ValueError(f"ensemble is {ensemble!r}. Use 'mean' or 'alternate'.")
        if similarity_scale is not None and not (math.isfinite(similarity_scale) and similarity_scale > 0):
            raise ValueError(
                f"similarity_scale is {similarity_scale}. Use a positive number, or None for the model's."
            )
        if num_hard < 1:
            raise ValueError(f"num_hard is {num_hard}. Use at least one hard distractor.")
        several = isinstance(scorer, (list, tuple))
        self.scorers: list[Any] = list(scorer) if several else ([] if scorer is None else [scorer])  # type: ignore[arg-type]
        self.kind: Kind = kind
        self.similarity_scale = similarity_scale
        self.distractor_scope = distractor_scope
        self.num_hard = num_hard
        self.ensemble = ensemble
        self.allow_truncation = allow_truncation
        self.undefined_reward = undefined_reward
        self._features: list[Tensor] = []

    def prepare(self, data: RewardData) -> None:
        """Load the scorers and encode every training image once."""
        if not self.scorers and data.scorer is None:
            raise ValueError("Self-retrieval needs a scorer. Pass SelfRetrieval(scorer) or the trainer's scorer.")
        if self.distractor_scope == "bag" and not data.bags:
            raise ValueError(
                "distractor_scope='bag' needs batches that are made of bags. Pass the trainer neighbours (and a schedule), or use "
                "distractor_scope='batch'."
            )
        self.scorers = [load_scorer(scorer) for scorer in self.scorers or [data.scorer]]
        for scorer in self.scorers:
            reads = scorer.max_text_tokens - 2  # beside its start and end token
            if (
                not self.allow_truncation
                and data.max_completion_length is not None
                and data.max_completion_length > reads
            ):
                raise ValueError(
                    f"The policy may write {data.max_completion_length} tokens and {scorer.signature.split('|')[0]} reads "
                    f"{reads}, so the end of a caption would earn nothing. Lower max_completion_length to {reads}, or allow "
                    "it with allow_truncation=True (allow_truncation_captions in SelfRetrievalConfig)."
                )
        for scorer in self.scorers:
            if hasattr(scorer, "to"):
                scorer.to(data.device)  # each process has a device of its own
        self._features = [data.image_features(scorer).to(data.device) for scorer in self.scorers]  # (num_images, D)
        for scorer, features in zip(self.scorers, self._features, strict=True):
            if len(features) != len(data.image_ids):
                raise ValueError(
                    f"{scorer.signature} has features of {len(features)} images for {len(data.image_ids)} training images."
                )

    def __call__(self, context: RewardContext) -> Tensor:
        if not self._features:
            raise RuntimeError("SelfRetrieval was not prepared. Trainers do it; elsewhere call prepare(data) first.")
        if len(context.candidates) < 2:
            raise ValueError(
                "A rollout of one image has no distractors, so every caption finds it. Raise per_device_train_batch_size."
            )
        turn = context.step % len(self.scorers)
        members = [turn] if self.ensemble == "alternate" else list(range(len(self.scorers)))
        # What is logged is of the first of them, so that it is there at every step.
        total = torch.stack([self._one(m, context, log=m == members[0]) for m in members]).mean(0)  # (N,)
        return total.masked_fill(context.is_empty.to(total.device), math.nan)

    def _one(self, member: int, context: RewardContext, *, log: bool) -> Tensor:
        """Rewards `(N,)` by one scorer."""
        scorer, features = self.scorers[member], self._features[member]
        scale = scorer.logit_scale if self.similarity_scale is None else self.similarity_scale
        images = features[context.candidates.to(features.device)].float()  # (C, D)
        positions = context.positions.to(features.device)  # (B,)
        # fp32: at scale 100, bf16 is 0.2 nats off.
        text = self._text_features(scorer, context.captions).to(images.device, torch.float32)  # (N, D)
        similarity = text @ images.T  # (N, C)
        if log:
            own = positions.repeat_interleave(context.group_size)
            context.ranks = ranks_from_scores(similarity, own)
            context.statistics["recall_at_1"] = float((context.ranks == 1).float().mean())
            context.statistics["completions/cut_by_scorer"] = scorer.count_truncated(context.captions) / max(
                len(context.captions), 1
            )
        compared = self._compared(images, positions, context.bag_size)  # (B, K), the own image first, or None
        if compared is None:
            return retrieval_rewards(similarity, positions.repeat_interleave(context.group_size), self.kind, scale)
        compared = compared.repeat_interleave(context.group_size, dim=0)  # (N, K)
        first = torch.zeros(len(compared), dtype=torch.long, device=compared.device)
        return retrieval_rewards(similarity.gather(1, compared), first, self.kind, scale)

    @staticmethod
    def _text_features(scorer: Any, captions: list[str]) -> Tensor:
        """Features of the captions; NaN for those that the scorer cannot read (its features are not finite)."""
        try:
            return scorer.text_features(captions)
        except ValueError:
            rows: list[Tensor | None] = []
            for caption in captions:
                try:
                    rows.append(scorer.text_features([caption])[0])
                except ValueError:
                    rows.append(None)
            known = next((row for row in rows if row is not None), None)
            if known is None:
                raise
            return torch.stack([torch.full_like(known, math.nan) if row is None else row for row in rows])

    def _compared(self, images: Tensor, positions: Tensor, bag_size: int) -> Tensor | None:
        """Which candidates each image is compared with, itself first; None for all."""
        if self.distractor_scope == "batch":
            return None
        if self.distractor_scope == "bag":
            if not bag_size:
                raise ValueError("distractor_scope='bag' needs batches of bags, and this rollout has none.")
            if len(images) % bag_size:
                raise ValueError(
                    f"{len(images)} candidates are no whole number of bags of {bag_size}. Pass whole bags."
                )
            start = positions // bag_size * bag_size  # (B,)
            steps = torch.arange(1, bag_size, device=positions.device)
            others = start[:, None] + (positions[:, None] - start[:, None] + steps) % bag_size
        else:
            alike = images[positions] @ images.T  # (B, C)
            alike.scatter_(1, positions[:, None], -math.inf)  # the own column by its index, never by its value
            others = alike.topk(min(self.num_hard, images.size(0) - 1), dim=1).indices
        return torch.cat([positions[:, None], others], dim=1)

    def undefined(self, context: RewardContext) -> float:
        if self.undefined_reward is not None:
            return self.undefined_reward
        number = {
            "batch": len(context.candidates),
            "bag": context.bag_size,
            "hard": min(self.num_hard + 1, len(context.candidates)),
        }[self.distractor_scope]
        return {"log_prob": -2 * math.log(max(number, 2)), "cosine": -1.0, "accuracy": 0.0}[self.kind]
