"""SMILE: cross-entropy over the words of each caption only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_captionrl.captioners.head_tap import HeadInputs
from hf_captionrl.data import CaptionDataset
from hf_captionrl.losses import IGNORE_INDEX, fused_smile_loss, shift_first_token, smile_loss
from hf_captionrl.trainers.caption_config import CaptionConfig
from hf_captionrl.trainers.caption_trainer import CaptionTrainer
from hf_captionrl.trainers.dose import METRIC
from hf_captionrl.utils.options import Fraction, Positive, Share, check_values, documented


@dataclass
class SmileConfig(CaptionConfig):
    r"""Arguments of [`SmileTrainer`]; defaults are those of Yue et al. 2023, section 3.1, with these differences.

    - `captions_per_image="one"`: an epoch has one caption per image. Five such epochs of COCO are one of the paper's.
    - `per_device_train_batch_size=32`: the paper's step has 128 captions, 32 on each of four devices.
    - `mle_label_smoothing=0`: the authors' code smooths the MLE branch by 0.1, Eq. 4 does not.
    - Images are not augmented and captions not lower-cased. The authors' code crops images at random and removes punctuation.
    - `early_evaluations`, which `captionrl train smile` has, are ours; by default there are none.

    Only what differs from [`CaptionConfig`] is listed.
    """

    mle_weight: Fraction = documented(
        0.0, "lambda of Eq. 4: loss = lambda * MLE + (1 - lambda) * SMILE. 1 is plain MLE."
    )
    first_token: Literal["mle", "shift", "smile"] | None = documented(
        None,
        "Initial context restriction: 'mle' (whole vocabulary at the first token), 'shift' (its '##' form, WordPiece "
        "only) or 'smile' (none, the ablation). None: 'mle', but 'smile' with subset='random'.",
    )
    subset: Literal["caption", "random", "reverse"] = documented(
        "caption", "Words in the softmax: 'caption' (SMILE), 'random' or 'reverse' (the paper's ablations)."
    )
    num_random: Positive = documented(10, "Words drawn for subset='random'.")
    captions_per_image: Literal["one", "all"] = documented(
        "one",
        "Rows of an epoch: 'one' caption per image, drawn anew in each epoch, or 'all', a row per caption as in the "
        "authors' code: 5 times as many steps on COCO.",
    )
    mle_label_smoothing: Share = documented(0.0, "Label smoothing of the MLE branch; the authors' code has 0.1.")
    random_draw: Literal["sequence", "position"] = documented(
        "sequence", "Random words per 'sequence' (paper) or per 'position' (the authors' code)."
    )

    early_evaluations: list[int] = field(
        default_factory=list,
        metadata={
            "help": "Training captions seen at evaluations before those of each epoch or of eval_strategy. The start is evaluated too, "
            "and delivered unless the best checkpoint is significantly better; the run stops when R@1 has fallen three times. Without "
            "a scorer or with fewer than 100 validation images, it stops when captions are 1.1 times as long as the start's."
        },
    )
    per_device_train_batch_size: int = documented(32, "Captions per device and step.")
    learning_rate: float = documented(1e-5, "Peak learning rate.")
    weight_decay: float = documented(0.05, "AdamW weight decay.")
    lr_scheduler_type: str = documented("cosine", "Learning rate schedule.")
    num_train_epochs: float = documented(5.0, "Epochs; the best checkpoint is usually among the first 3.")

    def __post_init__(self) -> None:
        check_values(self)
        if self.early_evaluations:
            if (lowest := min(self.early_evaluations)) < 1:
                raise ValueError(f"early_evaluations holds {lowest}. Use numbers of captions from 1.")
            self.load_best_model_at_end: bool | None = True
            if self.eval_strategy == "no":  # type: ignore[has-type]
                self.eval_strategy, self.save_strategy = "epoch", "epoch"
            if self.metric_for_best_model not in (None, METRIC, *["loss"] * (self.mle_weight == 1)):  # type: ignore[has-type]
                raise ValueError(
                    f"metric_for_best_model is {self.metric_for_best_model!r}, but early_evaluations compare checkpoints with the "
                    f"start by {METRIC}; SMILE's loss does not tell which captions are better. Leave one of the two out."
                )
            self.metric_for_best_model, self.has_default_metric = METRIC, True
        super().__post_init__()

    @property
    def metric_without_scorer(self) -> str | None:
        return "loss" if self.mle_weight == 1 else None  # SMILE's loss does not tell which captions are better


class SmileObjective:
    """SMILE as an objective of the captioner's head.

    Reference: Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable MLE", Eq. 2-4.

    Args:
        seed (`str`): Seed of the draw. Each caption is drawn independently, so the loss does not depend on the split of a batch.
        settings: Of [`SmileConfig`]: `mle_weight`, `first_token` (not `"shift"`), `subset`, `mle_label_smoothing`,
            `num_random` and `random_draw`.
    """

    def __init__(self, *, seed: str = "0", **settings: Any) -> None:
        self.settings = {"num_random": 10, "random_draw": "sequence", **settings}
        self.seed = seed

    def __call__(self, head: HeadInputs) -> dict[str, Tensor]:
        """`loss`, the sum over the supervised tokens in nats."""
        settings: dict[str, Any] = {**self.settings, "reduction": "sum"}
        if settings.get("subset") == "random":
            projection: Any = head.logits if head.weight is None else head.weight.T
            settings["random_ids"] = self.draw(head.labels, projection.shape[-1])
        if head.hidden is None or head.weight is None:
            assert head.logits is not None
            return {"loss": smile_loss(head.logits, head.labels, **settings)}
        settings |= {"bias": head.bias, "softcap": head.softcap}
        return {"loss": fused_smile_loss(head.hidden, head.weight, head.labels, **settings)}

    def draw(self, labels: Tensor, vocab_size: int) -> Tensor:
        """Random words for each caption with aligned labels `(B, T)`: ids `(B, num_random)` or `(B, T, num_random)`."""
        per_position, num_random = self.settings["random_draw"] == "position", self.settings["num_random"]
        B, T = labels.shape
        ids = torch.zeros((B, T, num_random) if per_position else (B, num_random), dtype=torch.long)
        for row, label in enumerate(labels.cpu()):
            supervised = label != IGNORE_INDEX  # (T,)
            text = label[supervised].tolist()
            key = hashlib.blake2b(f"{self.seed}/{text}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
            shape = (len(text), num_random) if per_position else (num_random,)
            ids[(row, supervised) if per_position else row] = torch.randint(vocab_size, shape, generator=generator)
        return ids.to(labels.device)


class SmileTrainer(CaptionTrainer):
    """Finetunes a trained captioner with SMILE (or, at `mle_weight=1`, with maximum likelihood).

    The arguments are those of [`CaptionTrainer`], with a [`SmileConfig`].

    Example:
        >>> trainer = SmileTrainer("Salesforce/blip-image-captioning-base", SmileConfig("out"), train)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    args: SmileConfig
    config_class = SmileConfig
    method_name = "SMILE"

    def _caption_dataset(self, dataset: Any, args: Any, **more: Any) -> CaptionDataset:
        return super()._caption_dataset(dataset, args, captions_per_image=args.captions_per_image, **more)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.check_supervised(model, inputs, num_items_in_batch)
        outputs = self._run_head(model, inputs, self.smile_objective())
        loss = self.token_mean(outputs["loss"], inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def loss_sum(self, inputs: dict[str, Any]) -> Tensor:
        """Summand of `eval_loss`: the training objective, with the random words of the first epoch."""
        return self._run_head(self.model, inputs, self.smile_objective(epoch=0))["loss"]

    def _run_head(self, model: Any, inputs: dict[str, Any], objective: SmileObjective) -> Any:
        inputs = dict(inputs)
        if self.args.first_token == "shift":
            inputs["input_ids"], inputs["labels"] = shift_first_token(
                inputs["input_ids"], inputs["labels"], self.captioner.tokenizer
            )
        return model(**inputs, head_objective=objective)

    # Not `objective`, which transformers sets in a hyperparameter search.
    def smile_objective(self, epoch: int | None = None) -> SmileObjective:
        """The configured loss, with the random words of an epoch; None for the current one."""
        if epoch is None:
            epoch = int((self.state.epoch or 0.0) + 1e-6)
        args = self.args
        return SmileObjective(
            mle_weight=args.mle_weight,
            first_token="smile" if args.first_token == "shift" else args.first_token,
            subset=args.subset,
            mle_label_smoothing=args.mle_label_smoothing,
            num_random=args.num_random,
            random_draw=args.random_draw,
            seed=f"{args.seed}/{epoch}",
        )
