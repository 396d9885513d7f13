"""Configuration of [`SmileTrainer`]."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_captionrl.trainers.caption_config import CaptionConfig

__all__ = ["SmileConfig"]

# Where the paper and the released code disagree (Yue et al. 2023; github.com/yuezih/SMILE).
_PRESETS: dict[str, dict[str, float | str]] = {
    "paper": {"mle_label_smoothing": 0.0, "random_draw": "sequence"},
    "code": {"mle_label_smoothing": 0.1, "random_draw": "position"},
}


@dataclass
class SmileConfig(CaptionConfig):
    r"""Arguments of [`SmileTrainer`]; defaults are those of Yue et al. 2023, section 3.1.

    Only what differs from [`CaptionConfig`] is listed.
    """

    mle_weight: float = field(
        default=0.0, metadata={"help": "lambda of Eq. 4: loss = lambda * MLE + (1 - lambda) * SMILE. 1 is plain MLE."}
    )
    first_token: str | None = field(
        default=None,
        metadata={
            "help": "Initial context restriction: 'mle' (whole vocabulary at the first token), 'shift' (its '##' form, "
            "WordPiece only) or 'smile' (none, the ablation). None: 'mle', but 'smile' with subset='random'."
        },
    )
    subset: str = field(
        default="caption",
        metadata={"help": "Words in the softmax: 'caption' (SMILE), 'random' or 'reverse' (the paper's ablations)."},
    )
    num_random: int = field(default=10, metadata={"help": "Words drawn for subset='random'."})
    captions_per_image: str = field(
        default="one",
        metadata={
            "help": "Rows of an epoch: 'one' caption per image, drawn anew in each epoch, or 'all', a row per caption as in the "
            "authors' code: 5 times as many steps on COCO."
        },
    )
    preset: str = field(
        default="paper",
        metadata={"help": "'paper' or 'code': which one to follow where they disagree. See _PRESETS in the source."},
    )
    mle_label_smoothing: float | None = field(
        default=None, metadata={"help": "Label smoothing of the MLE branch. None: the preset's, 0.0 or 0.1."}
    )
    random_draw: str | None = field(
        default=None, metadata={"help": "Random words per 'sequence' or per 'position'. None: the preset's."}
    )

    per_device_train_batch_size: int = field(default=32, metadata={"help": "Captions per device and step."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(default=0.05, metadata={"help": "AdamW weight decay."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    num_train_epochs: float = field(
        default=5.0, metadata={"help": "Epochs; the best checkpoint is usually among the first 3."}
    )

    def __post_init__(self) -> None:
        if not 0.0 <= self.mle_weight <= 1.0:
            raise ValueError(f"mle_weight is {self.mle_weight}. Use a number in [0, 1] (lambda of Eq. 4).")
        if self.first_token not in (None, "mle", "shift", "smile"):
            raise ValueError(f"first_token is {self.first_token!r}. Use 'mle', 'shift' or 'smile'.")
        if self.subset not in ("caption", "random", "reverse"):
            raise ValueError(f"subset is {self.subset!r}. Use 'caption', 'random' or 'reverse'.")
        if self.captions_per_image not in ("one", "all"):
            raise ValueError(f"captions_per_image is {self.captions_per_image!r}. Use 'one' or 'all'.")
        if self.preset not in _PRESETS:
            raise ValueError(f"preset is {self.preset!r}. Use one of {sorted(_PRESETS)}.")
        if self.num_random < 1:
            raise ValueError(f"num_random is {self.num_random}. Use at least 1.")
        for name, value in _PRESETS[self.preset].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.random_draw not in ("sequence", "position"):
            raise ValueError(f"random_draw is {self.random_draw!r}. Use 'sequence' or 'position'.")
        if not 0.0 <= float(self.mle_label_smoothing or 0.0) < 1.0:
            raise ValueError(f"mle_label_smoothing is {self.mle_label_smoothing}. Use a value in [0, 1).")
        super().__post_init__()
