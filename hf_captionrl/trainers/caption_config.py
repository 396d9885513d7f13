"""Arguments shared by all captioning trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import TrainingArguments

from hf_captionrl.trainers.argument_ranges import check_ranges
from hf_captionrl.trainers.argument_support import BASE_FIELDS, Support, refuse_unsupported
from hf_captionrl.trainers.exact_resume import ExactResumeArguments
from hf_captionrl.trainers.policy import check_model_init_kwargs

__all__ = ["CaptionConfig"]


@dataclass
class CaptionConfig(ExactResumeArguments, TrainingArguments):
    r"""Arguments shared by all captioning trainers; a `transformers.TrainingArguments` with captioning defaults.

    Only fields that differ from `TrainingArguments` are listed. `trainers.argument_support.BASE_FIELDS` says how each of the
    others is supported; a value without an effect is refused.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]
    field_support: ClassVar[Mapping[str, Support]] = BASE_FIELDS

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Arguments for loading a model by name: a dict or JSON of from_pretrained's arguments, e.g. dtype, "
            "attn_implementation, revision, quantization_config. The dtype is float32 unless set."
        },
    )
    prompt: str | None = field(
        default=None,
        metadata={
            "help": "Text that every caption continues, e.g. 'a picture of '. None: the model family's default."
        },
    )
    max_caption_length: int = field(
        default=40,
        metadata={
            "help": "Longest training caption in tokens, prompt and end token included; longer ones are truncated."
        },
    )
    freeze_vision_tower: bool = field(
        default=False, metadata={"help": "Do not train the vision tower; it also stays in eval mode."}
    )
    cache_image_features: bool = field(
        default=False,
        metadata={
            "help": "Encode each image once for the whole run, into a memory-mapped cache on disk. Needs "
            "freeze_vision_tower and no image augmentation."
        },
    )
    cache_pixels: str | None = field(
        default=None,
        metadata={
            "help": "Decode and resize each image once, into a memory-mapped cache on disk, in feature_cache_dir: True or 'uint8' "
            "(exact), 'jpeg' (a tenth of the disk; pixels of photographs change by 2 to 4 of 255). For trained vision towers."
        },
    )
    image_decoder: str = field(
        default="pillow",
        metadata={
            "help": "'torchvision' decodes JPEGs without Pillow: the same pixels in less time. cache_pixels always does."
        },
    )
    frame_pooling: str = field(
        default="mean",
        metadata={
            "help": "How the features of frames become those of the video: 'mean', or for captioners with cross-attention "
            "(BLIP, VisionEncoderDecoder) the image tokens of all frames, 'concat' (also GIT with this number of frames) or "
            "'ordered', with a code for the order of frames; 'native': the video inputs of a chat model."
        },
    )
    feature_cache_dir: str | None = field(
        default=None, metadata={"help": "Folder of the caches. None: $CAPTIONRL_CACHE or under $HF_HOME."}
    )
    feature_cache_dtype: str = field(
        default="float32", metadata={"help": "Type of cached image features: 'float32' (exact) or 'float16' (half)."}
    )
    generation_num_beams: int = field(default=3, metadata={"help": "Number of beams in evaluation."})
    generation_max_new_tokens: int = field(
        default=75, metadata={"help": "Longest caption generated in evaluation, in tokens."}
    )
    generation_batch_size: int | None = field(
        default=None, metadata={"help": "Images per batch in generation. None: per_device_eval_batch_size."}
    )

    log_completions: bool = field(
        default=False,
        metadata={
            "help": "Show captions with images, references and ranks on the terminal and in the trackers of report_to, at each "
            "evaluation. Reinforcement learning also shows them, with their rewards, at each log of training."
        },
    )
    num_completions_to_print: int = field(default=5, metadata={"help": "Number of captions to show."})

    # Captioning needs every column of the data set, and the trainers count supervised tokens themselves.
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay False: collators need all columns."}
    )
    label_names: list[str] | None = field(
        default_factory=lambda: ["labels"], metadata={"help": "Names of the labels."}
    )

    def __post_init__(self) -> None:
        if isinstance(self.model_init_kwargs, str) and not self.model_init_kwargs.startswith(
            "{"
        ):  # JSON is read below
            check_model_init_kwargs(self.model_init_kwargs)
        if self.cache_image_features and not self.freeze_vision_tower:
            raise ValueError(
                "cache_image_features encodes each image once, which requires a frozen vision tower. "
                "Set freeze_vision_tower=True too, or cache_image_features=False."
            )
        # A switch in Python, YAML or on the command line.
        self.cache_pixels = {"true": "uint8", "false": None}.get(str(self.cache_pixels).lower(), self.cache_pixels)
        if self.cache_pixels not in (None, "uint8", "jpeg"):
            raise ValueError(f"cache_pixels is {self.cache_pixels!r}. Use 'uint8' (exact), 'jpeg' or None.")
        if self.image_decoder not in ("pillow", "torchvision"):
            raise ValueError(f"image_decoder is {self.image_decoder!r}. Use 'pillow' or 'torchvision'.")
        if self.cache_pixels and self.cache_image_features:
            raise ValueError(
                f"cache_pixels is {self.cache_pixels!r}, but cache_image_features already stores what is computed from the pixels. "
                "Use one of them: cache_image_features for a frozen vision tower, cache_pixels for a trained one."
            )
        if self.feature_cache_dtype not in ("float32", "float16"):
            raise ValueError(f"feature_cache_dtype is {self.feature_cache_dtype!r}. Use 'float32' or 'float16'.")
        if self.frame_pooling not in ("mean", "concat", "ordered", "native"):
            raise ValueError(f"frame_pooling is {self.frame_pooling!r}. Use 'mean', 'concat', 'ordered' or 'native'.")
        if self.max_caption_length < 2:
            raise ValueError(f"max_caption_length is {self.max_caption_length}. Use at least 2: one word and the end.")
        if self.load_best_model_at_end and self.metric_for_best_model is None:  # type: ignore[has-type]
            # Caption likelihood and CIDEr prefer generic captions; the papers select by retrieval.
            self.metric_for_best_model = "recall_at_1"
        check_ranges(self)
        super().__post_init__()
        self.model_init_kwargs = check_model_init_kwargs(self.model_init_kwargs)
        refuse_unsupported(self, self.field_support)
