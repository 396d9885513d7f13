"""The self-retrieval reward: within the batch, or with a bank of distractors, also as a function with TRL's signature.

Legend: B images, G captions per image, N = B * G captions, C images of the rollout, K images compared, M images of a bank,
P images of a concept, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import hf_captionrl.retrieval as retrieval  # banks and named scorers are imported at their first use
from hf_captionrl.retrieval.feature_cache import RowLookup
from hf_captionrl.retrieval.ranking import concept_numbers, ranks_from_scores
from hf_captionrl.rewards.base import Reward, RewardContext, RewardData, WeightedRewards, function_context
from hf_captionrl.utils.options import Positive, Range, documented

if TYPE_CHECKING:
    from hf_captionrl.retrieval import Scorer
    from hf_captionrl.rewards.banks import ImageBank

# --- Self-retrieval: can a frozen image-text model find the image from its caption? ----------------------------------

_MOST_VIEWS = 64  # images of a concept that a caption is compared with, evenly spaced in the data

RewardKind = Literal["log_prob", "cosine", "accuracy"]


def retrieval_rewards(
    similarity: Tensor,
    columns: Tensor,
    reward_kind: str = "log_prob",
    scale: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Reward of each caption from its similarities with its target and with the distractors.

    Reference: Dessi et al. 2023, section 3 and Table 9. `log_prob`: `log softmax_k(scale * s_nk)` at the target;
    `cosine`: `s` of the target; `accuracy`: 1 if the target ranks first, 0 otherwise (also on a tie).

    Args:
        similarity (`torch.Tensor` of shape `(N, K)`): Cosines.
        columns (`torch.Tensor` of shape `(N,)`): Column of the target.
        reward_kind (`str`): `"log_prob"`, `"cosine"` or `"accuracy"`.
        scale (`float`): Factor on the cosines inside the softmax.
        weights (`torch.Tensor` of shape `(N, K)`, *optional*): Weight of each image's exponential in the sum of the softmax;
            1 for the target, 0 leaves an image out. None: 1 each. A cosine has no sum, so weights do not change it.

    Returns:
        `torch.Tensor` of shape `(N,)`: Nats (at most 0), a cosine in [-1, 1], or 0 and 1; NaN where the target's similarity
        is NaN.
    """
    of_target = similarity.gather(1, columns[:, None])[:, 0]  # (N,)
    if reward_kind == "log_prob":
        logits = scale * similarity if weights is None else scale * similarity + weights.log()
        return logits.log_softmax(1).gather(1, columns[:, None])[:, 0]
    if reward_kind == "cosine":
        return of_target
    if reward_kind != "accuracy" or weights is not None:
        raise ValueError(f"reward_kind is {reward_kind!r}. Use 'log_prob', 'cosine' or, without weights, 'accuracy'.")
    found = (ranks_from_scores(similarity, columns) == 1).to(similarity.dtype)
    # NaN would otherwise get a rank and count as a caption that missed its image.
    return found.masked_fill(of_target.isnan(), math.nan)


@dataclass(kw_only=True)
class RetrievalOptions:
    """Options of [`SelfRetrieval`], also of the configurations of its trainers. `similarity_scale` may be a number, too."""

    reward_kind: RewardKind = documented(
        "log_prob", "Reward: 'log_prob', 'cosine' or 'accuracy' (DiscriTune, Table 9)."
    )
    similarity_scale: str = documented(
        "code", "Factor on cosines: 'code' is the scorer's logit scale, 'paper' is 1, or a number."
    )
    distractor_scope: Literal["batch", "bag", "hard", "bank"] = documented(
        "batch",
        "Distractors: the whole 'batch', the target's 'bag', 'hard': the images of the batch that are most similar to "
        "the target for the scorer, or 'bank': other training images, which need no other image in the batch "
        "(DiscriTune, Tables 12 and 13).",
    )
    num_hard_distractors: Positive = documented(
        10, "k, the nearest images of distractor_scope='hard' and bank_images='nearest_and_random'."
    )
    bank_images: Literal["random", "nearest", "nearest_and_random"] = documented(
        "random",
        "Images of distractor_scope='bank': 'random' training images, those 'nearest' to each target, or its k nearest "
        "and random ones of each step, 'nearest_and_random' (DiscriTune, Table 12).",
    )
    bank_size: Annotated[int, Range(at_least=2)] = documented(
        1000, "M, the number of images of distractor_scope='bank'."
    )
    bank_batch_size: Annotated[int, Range(at_least=2)] = documented(
        100, "C, the images of the batch that distractor_scope='bank' stands for: M distractors count as C - 1."
    )
    scorer_ensemble: Literal["mean", "alternate"] = documented(
        "mean", "Several scorers: the 'mean' of their rewards, or 'alternate' from step to step."
    )
    allow_truncation_captions: bool = documented(
        False, "Let the policy generate more tokens than the scorer reads; the rest is not rewarded."
    )


def _listed(value: Any) -> list[Any]:
    """One value, several, or None as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


@dataclass(eq=False)
class SelfRetrieval(RetrievalOptions, Reward):
    r"""Reward of a caption with which a frozen scorer retrieves its image among distractors.

    Reference: Dessi et al. 2023, "Cross-Domain Image Captioning with Discriminative Finetuning" (`distractor_scope="batch"`);
    "No Detail Left Behind", Section 4.6 (batches of bags; the softmax still runs over the whole batch) and its bags alone
    (`distractor_scope="bag"`). Distractors are the images of the whole rollout on all processes. Where the papers and their
    code differ, a field names both.

    With `distractor_scope="bank"` the distractors are fixed images of a bank, so that the captions of a single image can be
    rewarded: `log_prob` is `log [e(target) / (e(target) + (C - 1) / M sum_m e(m))]` with `e = exp(scale * s)`, C images per
    batch and M images of the bank. If the bank is random, the sum has the mean of that over the C - 1 distractors of a random batch.

    Where several training images show one concept (a column `concept` of the data), these are no distractors of each other, and the
    reward is the mean of the rewards with each of them (at most 64) as the target: words that fit only one of them do not pay.

    Args:
        scorer (`Scorer` or `str`, *optional*): The scorer or its name, or several of them; None for the trainer's.
        bank ([`ImageBank`] or a list of them, *optional*): For `distractor_scope="bank"`, one per scorer; None makes it of
            the training images.
        undefined_reward (`float`, *optional*): For captions without a word and features that are NaN or infinite. None:
            twice the reward of a caption that fits all images equally, 2 log(1/K); -1 for cosines; 0 for accuracies.

    Example:
        >>> reward = SelfRetrieval("openai/clip-vit-base-patch32", reward_kind="log_prob")  # doctest: +SKIP
    """

    name = "self_retrieval"
    summary = "the self-retrieval reward"

    scorer: Any = None
    undefined_reward: float | None = None
    bank: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scorers: list[Any] = _listed(self.scorer)
        self._given_banks: list[ImageBank] = _listed(self.bank)
        self._features: list[Tensor] = []
        self._banks: list[ImageBank] = []
        self._concepts: Tensor | None = None  # (num_images,)
        self.scale: float | None = None  # factor on the cosines; None for the scorer's
        if self.similarity_scale != "code":
            try:
                self.scale = 1.0 if self.similarity_scale == "paper" else float(self.similarity_scale)
            except (TypeError, ValueError):
                self.scale = 0.0
            if not 0 < self.scale < math.inf:
                raise ValueError(
                    f"similarity_scale is {self.similarity_scale!r}. Use 'code', 'paper' or a positive number."
                )
        if self.distractor_scope == "bank" and self.reward_kind == "accuracy":
            raise ValueError(
                "reward_kind='accuracy' has no sum over distractors, which a bank weights. Use 'log_prob'."
            )
        if self.distractor_scope != "bank" and self.bank is not None:
            raise ValueError("A bank is given. Use distractor_scope='bank'.")

    def describe(self) -> str:
        return {
            "log_prob": "the log-probability that the scorer gives the image after reading the caption",
            "cosine": "the cosine between caption and image under the scorer",
            "accuracy": "1 where the scorer finds the image from the caption, else 0",
        }[self.reward_kind]

    def prepare(self, data: RewardData) -> None:
        if not self.scorers and data.scorer is None:
            raise ValueError("Self-retrieval needs a scorer. Pass SelfRetrieval(scorer) or the trainer's scorer.")
        if self.distractor_scope == "bag" and not data.has_bags:
            raise ValueError(
                "distractor_scope='bag' needs batches of bags. Pass neighbours to the trainer, or use 'batch'."
            )
        self.scorers = [retrieval.load_scorer(scorer) for scorer in self.scorers or [data.scorer]]
        reads = min(scorer.max_text_tokens for scorer in self.scorers) - 2  # beside its start and end token
        if not self.allow_truncation_captions and (data.max_completion_length or 0) > reads:
            raise ValueError(
                f"max_completion_length is {data.max_completion_length}, and the scorer reads {reads} tokens. Lower it to {reads}, or "
                "use allow_truncation_captions=True."
            )
        self.prepare_images(data.image_ids, data.image_features, data.device, data.concepts)

    def prepare_images(
        self,
        image_ids: Sequence[str],
        image_features: Callable[[Any], Tensor],
        device: torch.device,
        concepts: Sequence[int] | None = None,
    ) -> None:
        """Keep the features of all images `(num_images, D)`, for the loaded scorers, which are moved to the device."""
        for scorer in self.scorers:
            if hasattr(scorer, "to"):
                scorer.to(device)  # each process has another device
        self._features = [image_features(scorer).to(device) for scorer in self.scorers]  # (num_images, D)
        if any(len(features) != len(image_ids) for features in self._features):
            raise ValueError(f"Features of {list(map(len, self._features))} images for {len(image_ids)} images.")
        if concepts is not None and max(concepts) == 0:
            raise ValueError("All training images show one concept: no distractors are left. Check concept_column.")
        self._concepts = None if concepts is None else torch.tensor(concepts, device=device)
        if self.distractor_scope != "bank":
            return
        banks = self._given_banks
        if self.bank is None:
            from hf_captionrl.rewards.banks import training_bank

            settings = (self.bank_images, self.bank_size, self.num_hard_distractors, concepts)
            pairs = zip(self.scorers, self._features, strict=True)
            banks = [training_bank(features, image_ids, scorer.signature, *settings) for scorer, features in pairs]
        if len(banks) != len(self.scorers):
            raise ValueError(f"There are {len(banks)} banks for {len(self.scorers)} scorers. Pass one per scorer.")
        for bank, scorer, features in zip(banks, self.scorers, self._features, strict=True):
            bank.check(scorer.signature, features.size(1), image_ids)
        if concepts is not None:
            concept_of = dict(zip(image_ids, concepts, strict=True))
            for bank in banks:
                bank.concepts = torch.tensor([concept_of.get(name, -1) for name in bank.image_ids], device=device)
        self._banks = [bank.to(device) for bank in banks]

    def __call__(self, context: RewardContext) -> Tensor:
        if not self._features:
            raise RuntimeError("SelfRetrieval was not prepared. Call prepare(data) first; trainers do so.")
        if len(context.candidates) < 2 and self.distractor_scope != "bank":
            raise ValueError(
                "A rollout of one image has no distractors. Raise per_device_train_batch_size, or use distractor_scope='bank'."
            )
        turn = context.step % len(self.scorers)
        members = [turn] if self.scorer_ensemble == "alternate" else list(range(len(self.scorers)))
        # Every step has statistics: those of the first member.
        total = torch.stack([self._one(m, context, log=m == members[0]) for m in members]).mean(0)  # (N,)
        return total.masked_fill(context.is_empty.to(total.device), math.nan)

    def _one(self, member: int, context: RewardContext, *, log: bool) -> Tensor:
        """Rewards `(N,)` by one scorer."""
        scorer, features = self.scorers[member], self._features[member]
        scale = scorer.logit_scale if self.scale is None else self.scale
        images = features[context.candidates.to(features.device)].float()  # (C, D)
        positions = context.positions.to(features.device)  # (B,)
        # fp32: at scale 100, bf16 is 0.2 nats off.
        text = scorer.text_features(context.captions).to(images.device, torch.float32)  # (N, D)
        similarity = text @ images.T  # (N, C)
        columns = positions.repeat_interleave(context.group_size)  # (N,) of the targets
        alike = of_concept = None
        if self._concepts is not None:
            of_images = self._concepts[context.candidates.to(features.device)]  # (C,)
            of_targets = of_images[positions]  # (B,)
            alike = of_targets[:, None] == of_images  # (B, C)
            alike.scatter_(1, positions[:, None], False)
            similarity.masked_fill_(alike.repeat_interleave(context.group_size, dim=0), -math.inf)
            of_concept = self._of_concept(text, features, of_targets)  # (N, P)
        if log:
            if len(images) > 1:
                best = None if of_concept is None else of_concept.nan_to_num(-math.inf).amax(1, keepdim=True)
                scores = similarity if best is None else similarity.scatter(1, columns[:, None], best)
                context.ranks = ranks_from_scores(scores, columns)
                context.statistics["recall_at_1"] = (context.ranks == 1).tolist()
            truncated = scorer.count_truncated(context.captions) / max(len(context.captions), 1)
            context.statistics["completions/truncated_by_scorer"] = [truncated]  # processes have as many captions
        weights = None
        if self.distractor_scope == "bank":
            bank = self._banks[member]
            similarity, weights = bank.compare(
                *(text, images[positions], context.image_ids, self.bank_batch_size, context.step),
                None if self._concepts is None else of_targets,
            )
        elif self.distractor_scope != "batch":
            compared = self._compared(images, positions, context.bag_size, alike)  # (B, K)
            similarity = similarity.gather(1, compared.repeat_interleave(context.group_size, dim=0))
        if self.distractor_scope != "batch":
            columns = torch.zeros_like(columns)
        if of_concept is None:
            return retrieval_rewards(similarity, columns, self.reward_kind, scale, weights)
        each = [
            retrieval_rewards(
                similarity.scatter(1, columns[:, None], of_target[:, None]), columns, self.reward_kind, scale, weights
            )
            for of_target in of_concept.T
        ]
        return torch.stack(each, dim=1).masked_fill(of_concept.isnan(), math.nan).nanmean(1)

    def _of_concept(self, text: Tensor, features: Tensor, concepts: Tensor) -> Tensor:
        """Cosines `(N, P)` of captions with all training images of their concept, of `concepts` `(B,)`; NaN where it has fewer than P."""
        rows = [(self._concepts == concept).nonzero().flatten() for concept in concepts]
        rows = [each[:: -(-len(each) // _MOST_VIEWS)] for each in rows]
        padded = pad_sequence(rows, batch_first=True, padding_value=-1)  # (B, P)
        images = features[padded.clamp(min=0)].float()  # (B, P, D)
        cosines = text.view(len(rows), -1, text.size(1)) @ images.transpose(1, 2)  # (B, G, P)
        return cosines.masked_fill((padded < 0)[:, None], math.nan).flatten(0, 1)

    def _compared(self, images: Tensor, positions: Tensor, bag_size: int, alike: Tensor | None) -> Tensor:
        """Candidates `(B, K)` of each image, the target first, for the scopes 'bag' and 'hard'; `alike` `(B, C)`: others of its concept."""
        itself = positions[:, None]  # (B, 1)
        if self.distractor_scope == "bag":
            if not bag_size or len(images) % bag_size:
                raise ValueError(
                    f"distractor_scope='bag' needs whole bags; got {len(images)} images, bags of {bag_size}."
                )
            start = itself // bag_size * bag_size
            steps = torch.arange(1, bag_size, device=positions.device)
            others = start + (itself - start + steps) % bag_size
        else:
            cosines = images[positions] @ images.T  # (B, C)
            cosines.scatter_(1, itself, -math.inf)  # the target is excluded by its column, never by its value
            if alike is not None:
                cosines.masked_fill_(alike, -math.inf)
            others = cosines.topk(min(self.num_hard_distractors, images.size(0) - 1), dim=1).indices
        return torch.cat([itself, others], dim=1)

    def undefined(self, context: RewardContext) -> float:
        if self.undefined_reward is not None:
            return self.undefined_reward
        number = {
            "batch": len(context.candidates),
            "bag": context.bag_size,
            "hard": min(self.num_hard_distractors + 1, len(context.candidates)),
            "bank": self.bank_batch_size,
        }[self.distractor_scope]
        return {"log_prob": -2 * math.log(max(number, 2)), "cosine": -1.0, "accuracy": 0.0}[self.reward_kind]


# --- Self-retrieval with a bank of distractors, as a reward function with TRL's signature ----------------------------


class BankRewardFunction:
    r"""[`SelfRetrieval`] with `distractor_scope="bank"`, for the `reward_funcs` of TRL's trainers.

    A caption is compared with its image and with the bank, never with other images of the batch. So TRL may reward each
    group of captions alone, as its asynchronous GRPO does. That trainer pickles its reward functions: use a scorer that can
    be pickled, on the CPU. It also sends only the text of a prompt to vLLM: the policy does not see the image, and writes
    captions from text, such as a caption to rewrite. The data need a column `image_id`.

    Args:
        scorer ([`Scorer`] or `str`): The reward scorer or its name.
        targets ([`ImageBank`]): Features of the training images by the same scorer.
        bank ([`ImageBank`], *optional*): The distractors. None: images among `targets`, as `bank_images` and `bank_size` say.
        concepts (*optional*): What each target shows; see [`SelfRetrieval`].
        kwargs: Other fields of [`SelfRetrieval`], such as `bank_batch_size`.

    Example:
        >>> targets = ImageBank(features, train["image_id"], scorer.signature)  # doctest: +SKIP
        >>> reward = BankRewardFunction(scorer, targets)  # doctest: +SKIP
        >>> trainer = GRPOTrainer(model, reward_funcs=reward, train_dataset=train)  # doctest: +SKIP
    """

    def __init__(
        self,
        scorer: Scorer | str,
        targets: ImageBank,
        bank: ImageBank | None = None,
        concepts: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        loaded = retrieval.load_scorer(scorer)
        self.reward = SelfRetrieval(loaded, distractor_scope="bank", bank=bank, **kwargs)
        self.__name__ = self.reward.name  # under which TRL logs it
        self._rows = RowLookup(targets.image_ids)
        targets.check(loaded.signature, targets.features.size(1), [])
        device = getattr(loaded, "device", torch.device("cpu"))
        numbers = None if concepts is None else concept_numbers(concepts)
        self.reward.prepare_images(targets.image_ids, lambda scorer: targets.features, device, numbers)
        self._total = WeightedRewards([self.reward])

    def __call__(self, completions: Sequence[Any], image_id: Sequence[Any], **columns: Any) -> list[float]:
        """Rewards of N texts or lists of chat messages, in nats for `reward_kind="log_prob"`; other arguments are unused."""
        ids = [str(one) for one in image_id]
        rows = torch.from_numpy(self._rows.rows(ids))  # (N,): each caption counts as a group
        if unknown := self._rows.missing(ids):
            raise ValueError(f"The targets lack the image {unknown[0]!r}. Pass targets with all training images.")
        context = function_context(completions, rows, ids, {})
        return self._total(context)[:, 0].tolist()
