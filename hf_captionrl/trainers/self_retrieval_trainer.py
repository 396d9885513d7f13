"""Self-retrieval finetuning: captions are rewarded if a frozen image-text model retrieves their image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import datasets

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.rewards.base import Reward, RewardLike, make_reward, parse_weighted_reward, reward_class
from hf_captionrl.rewards.self_retrieval import RetrievalOptions
from hf_captionrl.rewards.text_rewards import CiderOptions, DiversityOptions, LengthOptions
from hf_captionrl.trainers.caption_rl_trainer import CaptionRLConfig, CaptionRLTrainer
from hf_captionrl.utils.options import Range, documented

if TYPE_CHECKING:
    from hf_captionrl.retrieval import Scorer


def scorer_list(scorer: Scorer | Sequence[Scorer] | None) -> list[Scorer]:
    """The reward scorers of a trainer, at least one."""
    scorers: list[Any] = list(scorer) if isinstance(scorer, (list, tuple)) else [scorer]
    if not scorers or scorers[0] is None:
        raise ValueError("Self-retrieval needs a scorer. Pass scorer=load_scorer(name).")
    return scorers


NotNegativeWeight = Annotated[float, Range(at_least=0)]


@dataclass
class SelfRetrievalArguments(LengthOptions, DiversityOptions, CiderOptions, RetrievalOptions):
    """Weight and options of every registered reward; by default self-retrieval alone, as in DiscriTune."""

    retrieval_weight: NotNegativeWeight = documented(1.0, "Weight of the self-retrieval reward; 0 leaves it out.")
    cider_weight: NotNegativeWeight = documented(0.0, "Weight of CIDEr-D; 0 leaves it out.")
    diversity_weight: NotNegativeWeight = documented(
        0.0, "Weight of the diversity of the captions of an image; 0 leaves it out."
    )
    rewards: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Further registered rewards with their weights, as NAME=WEIGHT or NAME:FIELD=VALUE,...=WEIGHT, such as "
            "claim_f1=1 or claim_f1:credit=claim=1."
        },
    )
    repetition_weight: NotNegativeWeight = documented(0.0, "Weight of the penalty on repetition; 0 leaves it out.")
    length_weight: NotNegativeWeight = documented(
        0.0, "Weight of the penalty on tokens beyond max_tokens; 0 leaves it out."
    )
    truncation_weight: NotNegativeWeight = documented(
        0.0, "Weight of the penalty on truncated captions; 0 leaves it out."
    )

    def make_rewards(self, **overrides: Any) -> list[tuple[Reward, float]]:
        """The rewards with a weight above 0, and their weights; `overrides` replaces fields of [`SelfRetrieval`]."""
        weights: list[tuple[str, dict[str, Any], float]] = [  # weighted sums add up in this order
            ("self_retrieval", overrides, self.retrieval_weight),
            ("cider", {}, self.cider_weight),
            ("diversity", {}, self.diversity_weight),
            *map(parse_weighted_reward, self.rewards),
            ("repetition", {}, self.repetition_weight),
            ("length", {}, self.length_weight),
            ("truncation", {}, self.truncation_weight),
        ]
        made = [(make_reward(reward_class(name), self, **fields), weight) for name, fields, weight in weights]
        return [(reward, weight) for reward, weight in made if weight]

    def check_rewards(self) -> None:
        """Refuse values that a reward does not accept, and weights that reward nothing."""
        self.make_rewards()
        if not (
            self.retrieval_weight or self.cider_weight or self.rewards
        ):  # penalties alone would teach empty captions
            raise ValueError(
                "retrieval_weight and cider_weight are 0 and rewards is empty, so that nothing is rewarded. Set one of them."
            )


@dataclass
class SelfRetrievalConfig(SelfRetrievalArguments, CaptionRLConfig):
    r"""Arguments of [`SelfRetrievalTrainer`]; defaults are DiscriTune's, but for the learning rate.

    Only what differs from [`CaptionRLConfig`] and [`SelfRetrievalArguments`] is listed.
    """

    do_sample: bool | None = documented(  # type: ignore[assignment]
        None,
        "Sample captions in training; False: greedy decoding. None: greedy (DiscriTune), but sampled with CIDEr in the "
        "reward, whose baseline is greedy, or with several captions per image.",
    )
    baseline: str | None = documented(
        None,
        "Baseline that is subtracted from rewards. None: 'running_mean' (DiscriTune), 'greedy' with CIDEr in the "
        "reward.",
    )
    learning_rate: float = documented(
        1e-5, "Learning rate, measured on photographs; DiscriTune's 1e-7 is for a hundred thousand images."
    )
    num_train_epochs: float = documented(20, "Number of epochs.")
    per_device_train_batch_size: int = documented(100, "Images per device and step: one target and 99 distractors.")
    generation_num_beams: int = documented(5, "Number of beams in evaluation.")
    dataloader_drop_last: bool = documented(
        True, "Must stay True: every step compares as many images, so that the last, smaller batch is left out."
    )

    def __post_init__(self) -> None:
        if not self.dataloader_drop_last:
            raise ValueError("dataloader_drop_last is False, but every step compares as many images. Leave it True.")
        names = [name for name, _, _ in map(parse_weighted_reward, self.rewards)]
        has_cider = self.cider_weight > 0 or "cider" in names
        if self.do_sample is None:
            self.do_sample = has_cider or self.num_generations > 1
        if self.baseline is None:
            self.baseline = "greedy" if has_cider else "running_mean"
        super().__post_init__()

    def check(self) -> None:
        self.check_rewards()
        super().check()


class SelfRetrievalTrainer(CaptionRLTrainer):
    r"""DiscriTune and No Detail Left Behind's self-retrieval finetuning.

    References: Dessi et al. 2023, "Cross-Domain Image Captioning with Discriminative Finetuning"; "No Detail Left Behind:
    Revisiting Self-Retrieval for Fine-Grained Image Captioning". Give `neighbours` (of `captionrl bags`) for BagCurri, and
    `peft_config=language_lora(model)`, `vision_lora(model)` or `both_lora(model)` for SR-L, SR-V, SR-LV.

    The arguments are those of [`CaptionRLTrainer`], with a [`SelfRetrievalConfig`], and:

    Args:
        scorer ([`Scorer`] or a list of them): Frozen reward scorer. Several are an ensemble. None only with `reward_funcs`
            that need none.
        reward_funcs (*optional*): Instead of the configured rewards.

    Example:
        >>> trainer = SelfRetrievalTrainer("Salesforce/blip-image-captioning-base", scorer, args, train)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: SelfRetrievalConfig
    config_class = SelfRetrievalConfig
    method_name = "SelfRetrieval"

    def __init__(
        self,
        model: Captioner | Any | None = None,
        scorer: Scorer | Sequence[Scorer] | None = None,
        args: SelfRetrievalConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: datasets.Dataset | None = None,
        *,
        reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        args = self._resolve_args(model, args)
        scorers = [None] if scorer is None and reward_funcs is not None else scorer_list(scorer)
        if reward_funcs is None:
            reward_funcs = args.make_rewards(scorer=scorers)
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, scorer=scorers[0], **kwargs)
