"""Support for each field of `transformers.TrainingArguments`: it works, is refused, or is only for scripts.

A test compares the tables with the installed version, so that every new field needs an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

__all__ = ["BASE_FIELDS", "RL_FIELDS", "Support", "refuse_unsupported"]


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
