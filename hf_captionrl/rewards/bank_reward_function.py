r"""Self-retrieval with a bank of distractors, as a reward function with TRL's signature.

Legend: N captions, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_captionrl.retrieval import Scorer, load_scorer
from hf_captionrl.retrieval.row_lookup import RowLookup
from hf_captionrl.rewards.base import RewardContext, WeightedRewards
from hf_captionrl.rewards.image_bank import ImageBank
from hf_captionrl.rewards.self_retrieval import SelfRetrieval
from hf_captionrl.rewards.trl_reward_functions import completion_text

__all__ = ["BankRewardFunction"]


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
        kwargs: Other fields of [`SelfRetrieval`], such as `bank_batch_size` and `bank_weighting`.

    Raises:
        ValueError: If targets, bank and scorer do not belong together.

    Example:
        >>> targets = ImageBank(features, train["image_id"], scorer.signature)  # doctest: +SKIP
        >>> reward = BankRewardFunction(scorer, targets)  # doctest: +SKIP
        >>> trainer = GRPOTrainer(model, reward_funcs=reward, train_dataset=train)  # doctest: +SKIP
    """

    def __init__(self, scorer: Scorer | str, targets: ImageBank, bank: ImageBank | None = None, **kwargs: Any) -> None:
        loaded = load_scorer(scorer)
        self.reward = SelfRetrieval(loaded, distractor_scope="bank", bank=bank, **kwargs)
        self.__name__ = self.reward.name  # under which TRL logs it
        self._rows = RowLookup(targets.image_ids)
        targets.check(loaded.signature, targets.features.size(1), [])
        device = getattr(loaded, "device", torch.device("cpu"))
        self.reward.prepare_images(targets.image_ids, lambda scorer: targets.features, device)
        self._total = WeightedRewards([self.reward])

    def __call__(self, completions: Sequence[Any], image_id: Sequence[Any], **columns: Any) -> list[float]:
        """Reward captions, of one image or of several.

        Args:
            completions (`Sequence`): N texts or lists of chat messages.
            image_id (`Sequence[str]`): Id of the image of each of them.
            columns (`Any`): Other arguments of TRL, which are not used.

        Returns:
            `list[float]`: N rewards, in nats for `reward_kind="log_prob"`.

        Raises:
            ValueError: If an image has no features.
        """
        ids = [str(one) for one in image_id]
        rows = torch.from_numpy(self._rows.rows(ids))  # (N,): each caption counts as a group
        if (rows < 0).any():
            unknown = ids[int((rows < 0).int().argmax())]
            raise ValueError(
                f"The targets have no features of the image {unknown!r}. Pass targets with all training images."
            )
        candidates, positions = rows.unique(return_inverse=True)
        nothing = torch.empty(len(ids), 0)
        context = RewardContext(
            captions=[completion_text(completion).strip() for completion in completions],
            ids=nothing.long(),
            mask=nothing.bool(),
            ended=torch.ones(len(ids), dtype=torch.bool),
            rows=rows,
            image_ids=ids,
            references=[[] for _ in ids],
            candidates=candidates,
            positions=positions,
        )
        return self._total(context)[:, 0].tolist()
