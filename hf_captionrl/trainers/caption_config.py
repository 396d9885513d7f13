"""Arguments shared by all captioning trainers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

from transformers import TrainingArguments

from hf_captionrl.trainers.checkpoints import ExactResumeArguments
from hf_captionrl.trainers.policy import check_model_init_kwargs
from hf_captionrl.utils.options import Positive, Range, check_values, documented

# --- Fields of `transformers.TrainingArguments` that would have no effect, or another one ------------------------------

Refused = Mapping[str, tuple[Callable[[Any], bool], str]]
"""By name: whether a value is allowed, and why others are not, with what to use instead."""


def _only(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def _one_mesh(config: Any) -> bool:
    return config is None or max(getattr(config, f"{kind}_size", 1) or 1 for kind in ("tp", "cp", "sp")) == 1


def _plain_loader(config: Any) -> bool:
    """Whether accelerate's DataLoader settings are the defaults."""
    settings = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
    defaults = {"split_batches": False, "dispatch_batches": None, "even_batches": True, "use_seedable_sampler": True}
    return all(settings.get(name, default) == default for name, default in defaults.items())


REFUSED: Refused = {
    "average_tokens_across_devices": (_only(True), "The loss is divided by the supervised tokens of the whole step."),
    "label_smoothing_factor": (_only(0), "Full logits are never computed. Use SmileConfig's mle_label_smoothing."),
    "bf16_full_eval": (_only(False), "It would round the trained weights for good. Use bf16=True."),
    "fp16_full_eval": (_only(False), "It would round the trained weights for good. Use fp16=True."),
    "use_liger_kernel": (_only(False), "Head and loss are already fused, in the forward that it replaces."),
    "include_for_metrics": (lambda names: not names, "compute_metrics gets captions and references only."),
    "prediction_loss_only": (_only(False), "Captions are what is evaluated. Leave it False."),
    "include_num_input_tokens_seen": (_only(False, "no"), "It would count pixels. Leave it out."),
    "enable_jit_checkpoint": (_only(False), "Its checkpoints are not renamed when complete. Use save_on_signal=True."),
    "hub_strategy": (_only("end", "every_save"), "Checkpoints hold the optimizer as a pickle. Use 'end'."),
    "parallelism_config": (_one_mesh, "It splits the output head or the captions. Use DDP, FSDP or DeepSpeed."),
    "remove_unused_columns": (_only(False), "It drops the images. Leave it False."),
    "train_sampling_strategy": (_only("random", "sequential"), "Lengths are not known. Use 'random' or 'sequential'."),
}
"""Refused by every captioning trainer."""

RL_REFUSED: Refused = {
    **REFUSED,
    "auto_find_batch_size": (
        _only(False),
        "A smaller batch has fewer distractors. Lower per_device_train_batch_size and raise gradient_accumulation_steps.",
    ),
    "neftune_noise_alpha": (_only(None), "Captions are generated without noise. Leave it out."),
    "ignore_data_skip": (_only(False), "Bags and baselines depend on the position in the epoch. Leave it False."),
    "accelerator_config": (_plain_loader, "The trainer samples the rollouts, and accelerate would split bags."),
    "train_sampling_strategy": (_only("random"), "Batches are rollouts of random images or of bags (bag_schedule)."),
}
"""Refused by the reinforcement-learning trainers."""

TRL_NAMES = {
    "Evaluation generates one caption per image. Use generation_num_beams.": "num_generations_eval",
    "A rollout is an optimizer step. Use per_device_train_batch_size.": "steps_per_generation",
    "Use generation_kwargs.": "cache_implementation|min_p|repetition_penalty",
    "Use prompt.": "chat_template_kwargs",
    "Use scale_rewards.": "normalize_advantages",
    "Use entropy_weight, which is constant.": r"entropy_(coef\w*|target)|use_adaptive_entropy",
    "The importance ratio is that of a token. Use epsilon and epsilon_high.": "delta|importance_sampling_level|"
    r"off_policy_mask_threshold|top_entropy_quantile|vespo_\w+",
    "Rewards are added up as they are. Use reward_weights.": "multi_objective_aggregation|reward_clip_range",
    "The reference is the initial captioner. Use beta.": r"ref_model_\w+|sync_ref_model|use_bias_correction_kl",
    "Use log_completions and report_to.": "log_completions_hub_repo|log_multimodal|log_unique_prompts",
    "Images are always shuffled. Use data_seed.": "shuffle_dataset",
    "The captioner generates alone. Use SelfRetrievalGRPOTrainer.": r"(use_)?(vllm|transformers_)\w*|ds3_\w+|max_tool_\w+",
    "It has no effect here. Leave it out.": "cast_lm_head_to_fp32|disable_dropout|pad_to_multiple_of|router_aux_loss_coef|"
    r"sapo_temperature_\w+|trust_remote_code",
}
"""Options of TRL's `GRPOConfig` and `RLOOConfig` that the reinforcement-learning trainers lack, by what to use instead."""


def trl_remedy(name: str) -> str:
    """What to use instead of an option of TRL, after a blank; empty for other names."""
    return next((f" {remedy}" for remedy, names in TRL_NAMES.items() if re.fullmatch(names, name)), "")


def refuse_unsupported(args: CaptionConfig) -> None:
    """Refuse values that would be ignored or have another effect."""
    for name, (is_allowed, reason) in args.refused.items():
        value = getattr(args, name, None)
        value = value.value if isinstance(value, Enum) else value
        if not is_allowed(value):
            raise ValueError(f"{name} is {value!r}, which is not supported here. {reason}")


@dataclass
class CaptionConfig(ExactResumeArguments, TrainingArguments):
    r"""Arguments shared by all captioning trainers; a `transformers.TrainingArguments` with captioning defaults.

    Only fields that differ from `TrainingArguments` are listed. The others work as there, except those in
    `trainers.caption_config.REFUSED`, whose values would have no effect.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]
    refused: ClassVar[Refused] = REFUSED
    retrieval_metric: ClassVar[str] = "recall_at_1"
    """Default metric for the best model: caption likelihood and CIDEr prefer generic captions; the papers select by retrieval."""
    has_default_metric = False
    """Whether `metric_for_best_model` was left to the default."""

    model_init_kwargs: dict[str, Any] | str | None = documented(
        None,
        "Arguments for loading a model by name: a dict or JSON of from_pretrained's arguments, e.g. dtype, "
        "attn_implementation, revision, quantization_config. The dtype is float32 unless set.",
    )
    prompt: str | None = documented(
        None, "Text that every caption continues, e.g. 'a picture of '. None: the model family's default."
    )
    max_caption_length: Annotated[int, Range(at_least=2)] | None = documented(
        None,
        "Longest training caption in tokens, prompt and end token included; longer ones are truncated and lack their end. "
        "None: the 99th percentile of the training captions, and at least 40.",
    )
    freeze_vision_tower: bool = documented(False, "Do not train the vision tower; it also stays in eval mode.")
    cache_image_features: bool = documented(
        False,
        "Encode each image once for the whole run, into a memory-mapped cache on disk. Needs freeze_vision_tower and "
        "no image augmentation.",
    )
    cache_pixels: bool = documented(
        False,
        "Decode and resize each image once, into a memory-mapped cache on disk, in feature_cache_dir. For trained vision "
        "towers.",
    )
    frame_pooling: Literal["mean", "concat", "ordered"] = documented(
        "mean",
        "How the features of frames become those of the video: 'mean', or for captioners with cross-attention (BLIP, "
        "VisionEncoderDecoder) the image tokens of all frames, 'concat' or 'ordered', with a code for the order of frames.",
    )
    feature_cache_dir: str | None = documented(None, "Folder of the caches. None: $CAPTIONRL_CACHE or under $HF_HOME.")
    feature_cache_dtype: Literal["float32", "float16"] = documented(
        "float32", "Type of cached image features: 'float32' (exact) or 'float16' (half)."
    )
    generation_num_beams: Positive = documented(3, "Number of beams in evaluation.")
    generation_max_new_tokens: Positive = documented(75, "Longest caption generated in evaluation, in tokens.")
    generation_batch_size: int | None = documented(
        None, "Images per batch in generation. None: per_device_eval_batch_size."
    )

    log_completions: bool = documented(
        False,
        "Show captions with images, references and ranks on the terminal and in the trackers of report_to, at each "
        "evaluation. Reinforcement learning also shows them, with their rewards, at each log of training.",
    )
    num_completions_to_print: int = documented(5, "Number of captions to show.")

    # Captioning needs every column of the data set, and the trainers count supervised tokens themselves.
    remove_unused_columns: bool = documented(False, "Must stay False: collators need all columns.")
    label_names: list[str] | None = field(default_factory=lambda: ["labels"], metadata={"help": "Names of labels."})

    def __post_init__(self) -> None:
        if isinstance(self.model_init_kwargs, str) and not self.model_init_kwargs.startswith("{"):
            check_model_init_kwargs(self.model_init_kwargs)  # JSON is read below
        check_values(self)
        if self.cache_image_features and not self.freeze_vision_tower:
            raise ValueError("cache_image_features needs a frozen vision tower. Set freeze_vision_tower=True too.")
        if self.cache_pixels and self.cache_image_features:
            raise ValueError(
                "cache_pixels and cache_image_features exclude each other. Use one of them: features for a frozen tower."
            )
        if self.load_best_model_at_end and self.metric_for_best_model is None:  # type: ignore[has-type]
            self.metric_for_best_model, self.has_default_metric = self.retrieval_metric, True
        super().__post_init__()
        self.model_init_kwargs = check_model_init_kwargs(self.model_init_kwargs)
        refuse_unsupported(self)

    @property
    def metric_without_scorer(self) -> str | None:
        """Default metric for the best model without a scorer; None: the last checkpoint is delivered."""
        return None
