"""Self-retrieval finetuning: captions are rewarded if a frozen image-text model retrieves their image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.retrieval import Scorer
from hf_captionrl.rewards import RewardLike
from hf_captionrl.trainers.caption_rl_trainer import CaptionRLTrainer
from hf_captionrl.trainers.self_retrieval_arguments import scorer_list
from hf_captionrl.trainers.self_retrieval_config import SelfRetrievalConfig

__all__ = ["SelfRetrievalTrainer"]


class SelfRetrievalTrainer(CaptionRLTrainer):
    r"""DiscriTune and No Detail Left Behind's self-retrieval finetuning.

    References: Dessi et al. 2023, "Cross-Domain Image Captioning with Discriminative Finetuning"; "No Detail Left Behind:
    Revisiting Self-Retrieval for Fine-Grained Image Captioning". Give `neighbours` (of `captionrl bags`) for BagCurri, and
    `peft_config=language_lora(model)`, `vision_lora(model)` or `both_lora(model)` for SR-L, SR-V, SR-LV.

    Args:
        model (`Captioner`, `PreTrainedModel` or `str`): The policy.
        scorer ([`Scorer`] or a list of them): Frozen reward scorer. Several are an ensemble.
        args ([`SelfRetrievalConfig`], *optional*): Configuration. None: the defaults, in `{model name}-SelfRetrieval`.
        train_dataset (`datasets.Dataset`, *optional*): Columns `image`, `image_id` and `captions`.
        eval_dataset (`datasets.Dataset`, *optional*): The same columns.
        reward_funcs (*optional*): Instead of the configured rewards; as for [`CaptionRLTrainer`].
        kwargs: For [`CaptionRLTrainer`]: `held_out_scorer`, `neighbours`, `peft_config`, `model_init`, `compute_metrics`, ...

    Raises:
        ValueError: If there is no scorer, or arguments contradict each other; before any training.

    Example:
        >>> trainer = SelfRetrievalTrainer("Salesforce/blip-image-captioning-base", scorer, args, train)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: SelfRetrievalConfig
    config_class = SelfRetrievalConfig
    method_name = "SelfRetrieval"

    def __init__(
        self,
        model: Captioner | Any | None,
        scorer: Scorer | Sequence[Scorer],
        args: SelfRetrievalConfig | None = None,
        train_dataset: datasets.Dataset | None = None,
        eval_dataset: datasets.Dataset | None = None,
        *,
        reward_funcs: RewardLike | Sequence[RewardLike | tuple[RewardLike, float]] | None = None,
        **kwargs: Any,
    ) -> None:
        scorers = scorer_list(scorer)
        args = self._resolve_args(model, args)
        super().__init__(
            model,
            args.make_rewards(scorer=scorers) if reward_funcs is None else reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            scorer=scorers[0],
            **kwargs,
        )
