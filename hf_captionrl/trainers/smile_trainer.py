"""SMILE: cross-entropy over only the words of the caption at hand."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.captioners.head import HeadInputs
from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss, shift_first_token, smile_loss
from hf_captionrl.trainers.caption_trainer import CaptionTrainer
from hf_captionrl.trainers.smile_config import SmileConfig

__all__ = ["SmileObjective", "SmileTrainer"]


class SmileObjective:
    """SMILE as an objective of the captioner's head.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-4.

    Args:
        mle_weight (`float`): lambda of Eq. 4, in [0, 1].
        first_token (`str`): `"mle"` or `"smile"`.
        subset (`str`): `"caption"`, `"random"` or `"reverse"`.
        label_smoothing (`float`): Of the MLE branch.
        random_draw (`str`): `"sequence"` or `"position"`, for `subset="random"`.
        random_ids (`torch.Tensor` of shape `(B, num_random)` or `(B, T, num_random)`, *optional*): The drawn words.
    """

    def __init__(
        self,
        *,
        mle_weight: float = 0.0,
        first_token: str = "mle",
        subset: str = "caption",
        label_smoothing: float = 0.0,
        random_draw: str = "sequence",
        random_ids: Tensor | None = None,
    ) -> None:
        self.settings: dict[str, Any] = {
            "mle_weight": mle_weight,
            "first_token": first_token,
            "subset": subset,
            "label_smoothing": label_smoothing,
            "random_draw": random_draw,
            "random_ids": random_ids,
        }

    def __call__(self, head: HeadInputs) -> dict[str, Tensor]:
        """Sum of the loss over the supervised tokens.

        Args:
            head (`HeadInputs`): Hidden states and weight of the head, or full logits in the fallback.

        Returns:
            `dict`: `loss`, a scalar sum in nats.
        """
        if head.hidden is None:
            assert head.logits is not None
            return {"loss": smile_loss(head.logits, head.labels, reduction="sum", **self.settings)}
        assert head.weight is not None
        total = fused_smile_loss(
            head.hidden,
            head.weight,
            head.labels,
            bias=head.bias,
            softcap=head.softcap,
            reduction="sum",
            **self.settings,
        )
        return {"loss": total}


class SmileTrainer(CaptionTrainer):
    """Finetunes a captioner with SMILE (or, at `mle_weight=1`, with maximum likelihood).

    SMILE is for further training: start from a captioner that already describes what it sees.

    Args: those of [`CaptionTrainer`], with a [`SmileConfig`].

    Example:
        >>> trainer = SmileTrainer("Salesforce/blip-image-captioning-base", SmileConfig("out"), train)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: SmileConfig
    _checked = False

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean nats per supervised token of the optimizer step.

        Args:
            model (`nn.Module`): The policy, as wrapped by accelerate.
            inputs (`dict`): A batch of the collator.
            return_outputs (`bool`): Return the head's output too.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Supervised tokens of the whole step.

        Returns:
            `torch.Tensor`, or a tuple of it and the outputs.

        Raises:
            ValueError: If no token of the batch is supervised.
        """
        inputs = dict(inputs)
        labels = inputs["labels"]
        if not (labels != IGNORE_INDEX).any():
            raise ValueError(
                "No token of this batch is supervised: every label is ignored. Are all captions empty after the prompt? "
                "Raise max_caption_length or check the captions with hf_captionrl.data.check_captions."
            )
        if not self._checked and model.training:
            self._checked = True
            self.captioner.self_check(inputs)
        if self.args.first_token == "shift":
            inputs["input_ids"], inputs["labels"] = shift_first_token(
                inputs["input_ids"], labels, self.captioner.tokenizer
            )
        outputs = model(**inputs, head_objective=self._objective(inputs["labels"]))
        loss = self.token_mean(outputs["loss"], labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _objective(self, labels: Tensor) -> SmileObjective:
        args = self.args
        assert args.random_draw is not None
        return SmileObjective(
            mle_weight=args.mle_weight,
            first_token="smile" if args.first_token == "shift" else args.first_token,
            subset=args.subset,
            label_smoothing=args.mle_label_smoothing or 0.0,
            random_draw=args.random_draw,
            random_ids=self._random_ids(labels) if args.subset == "random" else None,
        )

    def _random_ids(self, labels: Tensor) -> Tensor:
        """Random words of each caption, drawn from its own seed: the same for any split of the batch."""
        aligned = self.captioner.align_labels(labels)  # (B, T)
        B, T = aligned.shape
        shape = (T,) if self.args.random_draw == "position" else ()
        ids = torch.zeros(B, *shape, self.args.num_random, dtype=torch.long)
        epoch = int((self.state.epoch or 0.0) + 1e-6)
        for row, label in enumerate(aligned.cpu()):
            supervised = label != IGNORE_INDEX
            text = label[supervised].tolist()
            key = f"{self.args.seed}/{epoch}/{text}".encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(
                self.captioner.vocab_size, ((len(text),) if shape else ()) + (self.args.num_random,), generator=generator
            )
            if shape:
                ids[row, supervised] = drawn
            else:
                ids[row] = drawn
        return ids.to(labels.device)
