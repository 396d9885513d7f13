"""Arguments shared by all captioning trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

from transformers import TrainingArguments

from hf_captionrl.trainers.checkpoints import ExactResumeArguments
from hf_captionrl.trainers.policy import check_model_init_kwargs

# --- Ranges of numbers in a configuration that transformers does not check, or only during the run -------------------

_AT_LEAST_ONE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "generation_num_beams",
    "generation_max_new_tokens",
)
_NOT_NEGATIVE = ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm")
_BELOW_ONE = ("adam_beta1", "adam_beta2")


def check_ranges(args: Any) -> None:
    """Refuse numbers outside their range."""

    def refuse(name: str, rule: str) -> None:
        raise ValueError(f"{name} is {getattr(args, name)}, but must be {rule}. Use a number in this range.")

    def number(name: str) -> float | None:
        value = getattr(args, name, None)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    for name in _AT_LEAST_ONE:
        if (value := number(name)) is not None and not value >= 1:
            refuse(name, "1 or more")
    for name in _NOT_NEGATIVE:
        if (value := number(name)) is not None and not 0 <= value < math.inf:
            refuse(name, "finite and not negative")
    for name in _BELOW_ONE:
        if (value := number(name)) is not None and not 0 <= value < 1:
            refuse(name, "in [0, 1)")
    if (value := number("neftune_noise_alpha")) is not None and value < 0:
        refuse("neftune_noise_alpha", "not negative")


# --- Support for each field of `transformers.TrainingArguments`: it works, is refused, or is only for scripts --------
# A test compares the tables with the installed version, so that every new field needs an entry.


@dataclass(frozen=True)
class Support:
    """Support for one field."""

    # `"trainer"` (works; read by transformers' Trainer), `"own"` (works; read by this package), `"refused"` (an
    # error, except for the allowed values) or `"unrelated"` (no effect on training: flags for scripts, and settings
    # that are not needed here).
    status: Literal["trainer", "own", "refused", "unrelated"]
    reason: str = ""  # why it is refused, and what to use instead
    allowed: Callable[[Any], bool] = bool  # whether a value of a refused field is allowed


def _refused(reason: str, *allowed: Any, when: Callable[[Any], bool] | None = None) -> Support:
    return Support("refused", reason, when or (lambda value: value in allowed))


def _all(status: Literal["trainer", "own", "unrelated"], names: str, reason: str = "") -> dict[str, Support]:
    return dict.fromkeys(names.split(), Support(status, reason))


def _one_mesh(config: Any) -> bool:
    sizes = [getattr(config, f"{kind}_size", 1) or 1 for kind in ("tp", "cp", "sp")]
    return config is None or max(sizes) == 1


def _plain_loader(config: Any) -> bool:
    """Whether accelerate's DataLoader settings are the defaults."""
    get = config.get if isinstance(config, Mapping) else lambda name, default: getattr(config, name, default)
    return not (
        get("split_batches", False)
        or get("dispatch_batches", None)
        or not get("even_batches", True)
        or not get("use_seedable_sampler", True)
    )


BASE_FIELDS: dict[str, Support] = {
    **_all(
        "trainer",
        "output_dir num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args "
        "weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules gradient_accumulation_steps max_grad_norm bf16 fp16 "
        "tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs "
        "torch_compile torch_compile_backend torch_compile_mode use_cache neftune_noise_alpha torch_empty_cache_steps "
        "auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start save_only_model save_strategy save_steps "
        "save_on_each_node save_total_limit "
        "load_best_model_at_end greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism "
        "seed use_cpu accelerator_config dataloader_drop_last per_device_train_batch_size ddp_find_unused_parameters "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug",
    ),
    **_all(
        "own",
        "per_device_eval_batch_size prediction_loss_only include_num_input_tokens_seen metric_for_best_model data_seed "
        "skip_memory_metrics dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order push_to_hub hub_token hub_private_repo "
        "hub_model_id hub_revision",
    ),
    **_all("unrelated", "do_train do_eval do_predict resume_from_checkpoint local_rank", "Flags for scripts."),
    **_all(
        "unrelated",
        "eval_use_gather_object eval_accumulation_steps",
        "Evaluation gathers captions as text, so these have no effect.",
    ),
    "average_tokens_across_devices": _refused(
        "The loss is divided by the supervised tokens of the whole step on all processes, so that every split of a batch "
        "gives the same gradient. Leave it True.",
        True,
    ),
    "label_smoothing_factor": _refused(
        "The Trainer smooths full logits, which are never computed here. Use SmileConfig's mle_label_smoothing, which "
        "smooths the maximum-likelihood term.",
        0,
    ),
    "bf16_full_eval": _refused(
        "It would round the trained weights for good before they write captions. Use bf16=True, which computes in 16 bits.",
        False,
    ),
    "fp16_full_eval": _refused(
        "It would round the trained weights for good before they write captions. Use fp16=True, which computes in 16 bits.",
        False,
    ),
    "use_liger_kernel": _refused(
        "Liger replaces the forward in which the output head is tapped. Leave it out: head and loss are already fused.",
        False,
    ),
    "liger_kernel_config": _refused("It belongs to use_liger_kernel, which is refused. Leave it out.", None),
    "include_for_metrics": _refused(
        "compute_metrics gets captions and references, and with 'inputs' the image ids; the loss is eval_loss. Use [] or "
        "['inputs'].",
        when=lambda names: set(names or []) <= {"inputs"},
    ),
    "batch_eval_metrics": _refused(
        "Metrics of captions (retrieval, CIDEr-D) need all of them at once. Leave it False.", False
    ),
    "eval_do_concat_batches": _refused(
        "Predictions are one list of captions, in the order of the images. Leave it True.", True
    ),
    "enable_jit_checkpoint": _refused(
        "Its checkpoints hold a marker file that is removed after they are sealed, so they could not be resumed. Use "
        "save_on_signal=True, which also saves on SIGTERM.",
        False,
    ),
    "hub_strategy": _refused(
        "Intermediate checkpoints hold the optimizer as a pickle, which is never uploaded; they stay in output_dir. Use "
        "'end' or 'every_save'; both push the finished model once.",
        "end",
        "every_save",
    ),
    "hub_always_push": _refused(
        "The finished model is pushed once, and the trainer waits for the upload. Leave it False.", False
    ),
    "parallelism_config": _refused(
        "Tensor, context and sequence parallelism split the output head or the captions. Use DDP, FSDP or DeepSpeed.",
        when=_one_mesh,
    ),
    "remove_unused_columns": _refused("It drops the images. Leave it False.", False),
    "label_names": _refused("A batch's labels are called 'labels'. Leave it out.", None, ["labels"]),
    "train_sampling_strategy": _refused(
        "Each epoch draws another caption of each image, so lengths are not known in advance. Use 'random' or 'sequential'.",
        "random",
        "sequential",
    ),
    "length_column_name": _refused(
        "It belongs to train_sampling_strategy='group_by_length', which is refused. Leave it out.", "length"
    ),
}
"""Fields of [`CaptionConfig`] and [`SmileConfig`]."""

RL_FIELDS: dict[str, Support] = {
    **BASE_FIELDS,
    **_all("own", "dataloader_drop_last", "The incomplete last rollout is always dropped."),
    "auto_find_batch_size": _refused(
        "The images of a step are distractors of each other, so a smaller batch changes the reward. Lower "
        "per_device_train_batch_size and raise gradient_accumulation_steps, which leaves the rollout unchanged.",
        False,
    ),
    "neftune_noise_alpha": _refused(
        "Captions are generated without noise, so the trained policy would differ from the sampling policy. Leave it out.",
        None,
    ),
    "ignore_data_skip": _refused(
        "Bags, baselines and the curriculum depend on the position in the epoch, which a resumed run must keep. Leave it "
        "False.",
        False,
    ),
    "accelerator_config": _refused(
        "accelerate would split bags, so the trainer samples the rollouts. Leave split_batches, dispatch_batches, "
        "even_batches and use_seedable_sampler at their defaults.",
        when=_plain_loader,
    ),
    "train_sampling_strategy": _refused(
        "Batches are rollouts of random images or of bags (bag_schedule). Leave it 'random'.", "random"
    ),
}
"""Fields of [`CaptionRLConfig`] and its subclasses."""


def refuse_unsupported(args: Any, fields: Mapping[str, Support]) -> None:
    """Refuse values that would be ignored or have another effect."""
    for name, support in fields.items():
        value = getattr(args, name, None)
        plain = value.value if isinstance(value, Enum) else value
        if support.status == "refused" and not support.allowed(plain):
            raise ValueError(f"{name} is {plain!r}, which is not supported here. {support.reason}")


# --- Arguments shared by all captioning trainers ---------------------------------------------------------------------


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
